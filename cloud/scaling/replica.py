"""A replica in Ray Serve, and the Serve application made of replicas."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloud.scaling.fleet_metrics import FleetMetrics
from cloud.scaling.options import Scale, ScaleError
from cloud.server.close_codes import CloseCode
from cloud.settings import Settings, describe_errors, read_settings
from outrider_core.protocol.wire import MAX_CLIENT_FRAME

REPLICA_HEADER = b"x-replica"


class Replica:
    """A verifier in its own process, run by Serve. It loads in the constructor, so once per process.

    vLLM's other tensor-parallel ranks are processes beside it, on the GPUs that Ray has given it.
    """

    def __init__(self, settings: Settings) -> None:
        from cloud.loading import load_verifier
        from cloud.telemetry import log

        log.write_to_stderr(settings)
        self._fleet: FleetMetrics | None = None
        self._settings, self._verifier = settings, load_verifier(settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app; Serve calls this after the constructor and runs the lifespan, which starts the engine."""
        from ray import serve

        from cloud.app import App

        name = serve.get_replica_context().replica_id.unique_id
        self._fleet = FleetMetrics(name, self._verifier.metrics.text)
        return _Ingress(App(self._verifier, self._settings, metrics=self._fleet.text).asgi, name)

    def check_health(self) -> None:
        """Raise if unhealthy; Serve calls this every few seconds and then replaces the replica.

        It also notices a changed token file, and sends the replica's report to the fleet's metrics.
        """
        from cloud.telemetry import log

        if why := self._verifier.broken:
            log.error("broken: Serve replaces this replica", why=why)
            raise RuntimeError(why)
        if self._fleet is not None:
            self._fleet.report()
        if self._verifier.accounts.stale:
            self._verifier.reload_tokens()


class _Ingress:
    """Limits frames like the plain server, as Serve's proxy passes far larger ones, and names the replica."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app, self._header = app, (REPLICA_HEADER, replica.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and len(message.get("bytes") or b"") > MAX_CLIENT_FRAME:
                code = CloseCode.TOO_LARGE.value  # a plain int: Serve's proxy may not have our modules
                await send({"type": "websocket.close", "code": code, "reason": "frame too large"})
                return {"type": "websocket.disconnect", "code": code}
            return message

        async def named(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, bounded, named)


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application, for `serve run` and `serve deploy` with `import_path: cloud.scale:build`.

    `args` are Scale's fields and the verifier's settings side by side, as in `replicas: 2` and `max_model_len: 4096`.
    Raises ScaleError with one clear line.
    """
    values = {str(name).replace("-", "_"): value for name, value in args.items()}
    scale = {name: values.pop(name) for name in list(values) if name in Scale.model_fields}
    try:
        settings = read_settings([], "cloud.scale:build", **values)
        if settings.ssl_certfile is not None:
            raise ScaleError(
                "ssl_certfile: the proxy is Serve's; give it the certificate (http_options: ssl_certfile, ssl_keyfile)"
            )
        return application(Scale(**scale), settings)
    except ValidationError as error:
        raise ScaleError(describe_errors(error)) from None
    except (SettingsError, OSError, ValueError) as error:
        raise ScaleError(str(error.__cause__ or error)) from None


def application(scale: Scale, settings: Settings, attempts: int = 5) -> Any:
    """Return the Serve application of validated settings, which are sent to the replicas unchanged.

    `attempts`: how often a replica may fail to load before the deployment counts as failed. Raises ScaleError if scale
    and settings contradict each other.
    """
    from ray import serve

    on_gpu, ranks = settings.device.startswith("cuda"), settings.tensor_parallel_size
    if on_gpu and not scale.gpus_per_replica:
        raise ScaleError(f"device {settings.device} needs GPUs in every replica: set gpus_per_replica to {ranks}")
    if ranks > 1 and scale.gpus_per_replica not in (0, ranks):
        raise ScaleError(
            f"tensor_parallel_size {ranks} needs {ranks} GPUs, but gpus_per_replica is {scale.gpus_per_replica:g}"
        )
    if scale.gpus_per_replica and not on_gpu and settings.device != "auto":
        raise ScaleError(f"gpus_per_replica {scale.gpus_per_replica:g} would idle: device is {settings.device}")
    options = scale.options() | {"max_constructor_retry_count": attempts}
    return serve.deployment(**options)(serve.ingress()(Replica)).bind(settings)
