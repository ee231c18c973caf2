"""`python -m cloud.scale`: many replicas of the verifier behind one address, through Ray Serve.

Each replica is one process with its own target, drafter and engine thread, and serves the app of `cloud.app`.
Sessions live in one replica's memory, but OPEN carries all token ids: any replica resumes any session, so replicas
may come, go and die. Ray is imported late, so that --help and wrong flags are answered at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import SettingsError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloud.settings import Settings
from outrider_core.protocol.wire import MAX_CLIENT_FRAME

APPLICATION = "verifier"
DEPLOYMENT = "Replica"
REPLICA_HEADER = b"x-replica"
CLOSE_TOO_LARGE = 1009
STICKY_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
POLL_SECONDS = 0.5

EPILOG = """\
Flags after -- are the verifier's own and hold for every replica (python -m cloud.verifier --help):

  python -m cloud.scale --replicas 2 -- --model smollm2-135m-instruct --threads 1
  python -m cloud.scale --replicas 2 --max-replicas 8 --gpus-per-replica 1 -- --model /models/m --drafter /models/d

Ctrl-C or SIGTERM stops everything this command has started.
"""


class ScaleError(Exception):
    """The replicas cannot be run as asked; one clear line."""


class Scale(BaseModel):
    """How many replicas, and what each of them gets. Flags of the command and arguments of `build`."""

    model_config = ConfigDict(extra="forbid")

    replicas: Annotated[int, Field(ge=1, description="replicas to run; the fewest, with --max-replicas")] = 1
    max_replicas: Annotated[
        int, Field(ge=0, description="grow up to so many replicas as devices connect; 0: always --replicas")
    ] = 0
    sessions_per_replica: Annotated[
        int, Field(ge=1, description="connections a replica is meant for; twice as many are the most it takes")
    ] = 64
    gpus_per_replica: Annotated[float, Field(ge=0, description="GPUs reserved for each replica; 0: none")] = 0
    cpus_per_replica: Annotated[float, Field(ge=0, description="CPU cores reserved for each replica")] = 1
    drain_seconds: Annotated[
        float, Field(ge=0, description="time a replica to be stopped leaves its devices to go by themselves")
    ] = 5
    sticky: Annotated[
        bool, Field(description="bring connections with the same x-session-id header to the same replica")
    ] = False

    @model_validator(mode="after")
    def _check(self) -> Scale:
        if 0 < self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is less than replicas {self.replicas}")
        return self

    def options(self) -> dict[str, Any]:
        """Options of the Serve deployment. An open WebSocket is one ongoing request for its whole life."""
        options: dict[str, Any] = {
            "name": DEPLOYMENT,
            "max_ongoing_requests": 2 * self.sessions_per_replica,
            "max_queued_requests": self.sessions_per_replica,
            "graceful_shutdown_timeout_s": self.drain_seconds,
            "graceful_shutdown_wait_loop_s": 0.5,
            "health_check_period_s": 5,
            "health_check_timeout_s": 30,
            "ray_actor_options": {"num_gpus": self.gpus_per_replica, "num_cpus": self.cpus_per_replica},
        }
        if self.max_replicas:
            options["autoscaling_config"] = {
                "min_replicas": self.replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.sessions_per_replica,
                "upscale_delay_s": 10,
                "downscale_delay_s": 600,
            }
        else:
            options["num_replicas"] = self.replicas
        if self.sticky:
            options["request_router_config"] = {"request_router_class": STICKY_ROUTER}
        return options


class Replica:
    """One verifier in a process of its own, as Serve drives it. Loads in the constructor, so once per process.

    With settings.tp > 1 the other ranks are processes beside it, on the GPUs that Ray has given it.
    """

    def __init__(self, settings: Settings) -> None:
        from cloud import log
        from cloud.parallel import Followers
        from cloud.service import load_verifier

        log.write_to_stderr(settings)
        followers = Followers(settings) if settings.tp > 1 else None
        try:
            self._settings, self._verifier = settings, load_verifier(settings)
        except Exception:
            if followers:
                followers.kill()
            raise

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve asks for the app after the constructor and runs its lifespan, which starts the engine thread."""
        from ray import serve

        from cloud.app import create_app

        return _Ingress(create_app(self._verifier, self._settings), serve.get_replica_context().replica_id.unique_id)

    def check_health(self) -> None:
        """Asked by Serve every few seconds; a replica that raises is replaced."""
        if not self._verifier.alive:
            raise RuntimeError("the engine thread is dead")


class _Ingress:
    """The app as the plain server would show it: Serve's proxy passes far larger frames. Also names the replica."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app, self._header = app, (REPLICA_HEADER, replica.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and len(message.get("bytes") or b"") > MAX_CLIENT_FRAME:
                await send({"type": "websocket.close", "code": CLOSE_TOO_LARGE, "reason": "frame too large"})
                return {"type": "websocket.disconnect", "code": CLOSE_TOO_LARGE}
            return message

        async def named(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, bounded, named)


def build(args: dict[str, Any]) -> Any:
    """The Serve application, for `serve run` and `serve deploy` with `import_path: cloud.scale:build`.

    `args` are Scale's fields and the verifier's settings side by side, as in `replicas: 2` and `max_context: 4096`.
    Raises ScaleError with one clear line.
    """
    values = {str(name).replace("-", "_"): value for name, value in args.items()}
    scale = {name: values.pop(name) for name in list(values) if name in Scale.model_fields}
    try:
        return application(Scale(**scale), Settings(**values))
    except ValidationError as error:
        raise ScaleError(_describe(error)) from None


def application(scale: Scale, settings: Settings, attempts: int = 5) -> Any:
    """The Serve application of validated settings, which travel to the replicas as they are.

    `attempts`: how often a replica may fail to load before the deployment counts as failed. Raises ScaleError where
    scale and settings contradict each other.
    """
    from ray import serve

    on_gpu = settings.device.startswith("cuda")
    if on_gpu and not scale.gpus_per_replica:
        raise ScaleError(f"device {settings.device} needs GPUs in every replica: set gpus_per_replica to {settings.tp}")
    if settings.tp > 1 and scale.gpus_per_replica not in (0, settings.tp):
        raise ScaleError(f"tp {settings.tp} wants {settings.tp} GPUs: gpus_per_replica is {scale.gpus_per_replica:g}")
    if scale.gpus_per_replica and not on_gpu and settings.device != "auto":
        raise ScaleError(f"gpus_per_replica {scale.gpus_per_replica:g} would idle: device is {settings.device}")
    options = scale.options() | {"max_constructor_retry_count": attempts}
    return serve.deployment(**options)(serve.ingress()(Replica)).bind(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the replicas until a signal. Returns the exit status; every failure is one line on stderr."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parsed = _parser().parse_args(words[:split])
    try:
        scale = Scale(**{name: getattr(parsed, name) for name in Scale.model_fields})
        settings = _settings(words[split + 1 :], "0.0.0.0" if parsed.proxy == "haproxy" else parsed.http_host, parsed)
        if parsed.proxy == "haproxy" and (scale.sticky or parsed.ray_address):
            raise ScaleError("--proxy haproxy goes neither with --sticky nor with --ray-address; see docs/operating.md")
        return _run(scale, settings, parsed)
    except ValidationError as error:
        return _fail(_describe(error))
    except SettingsError as error:
        return _fail(str(error.__cause__ or error))
    except ScaleError as error:
        return _fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cloud.scale",
        description="Serve a target to Outrider devices from many replicas of the verifier behind one address.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python -m cloud.scale [flags] [-- verifier flags]",
    )
    for name, field in Scale.model_fields.items():
        flag, text = "--" + name.replace("_", "-"), field.description
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, default=field.default, metavar="N", help=f"{text} (default: {field.default})")
    parser.add_argument("--http-host", default="127.0.0.1", metavar="HOST", help="address to listen on")
    parser.add_argument("--http-port", type=int, default=8765, metavar="PORT", help="TCP port (default: 8765)")
    parser.add_argument(
        "--proxy",
        choices=("python", "haproxy"),
        default="python",
        help="what moves bytes between devices and replicas; haproxy is faster, but listens on all addresses",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="join this Ray cluster (auto: the one running on this machine); default: a local one for this command",
    )
    return parser


def _settings(flags: list[str], host: str, parsed: argparse.Namespace) -> Settings:
    """The verifier's settings from its flags and VERIFIER_*, for the address that Serve will listen on."""
    for flag in flags:
        if flag.split("=")[0] in ("--host", "--port"):
            raise ScaleError(f"{flag} is the address of a single verifier; use --http-host and --http-port before --")
    address = ["--host", host, "--port", str(parsed.http_port)]
    settings = Settings(_cli_parse_args=[*flags, *address])  # type: ignore[call-arg]
    if settings.port == 0:
        raise ScaleError("--http-port: 0 is no port; give a free one")
    # replicas may start in another folder
    folder = Path(settings.model).expanduser()
    if folder.is_dir():
        settings.model = str(folder.resolve())
    settings.drafter = settings.drafter.expanduser().resolve()
    return settings


def _run(scale: Scale, settings: Settings, parsed: argparse.Namespace) -> int:
    """Start Ray and Serve, deploy, report, wait, and stop what was started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if parsed.proxy == "haproxy":
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", f"{scale.drain_seconds:g}")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ScaleError("Ray is not installed: pip install 'outrider[scale]'") from None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # Serve's import has set it

    app = application(scale, settings, attempts=1)
    began, deployed = time.monotonic(), False
    try:
        _start(scale, settings, parsed.ray_address)
        deployed = True
        serve.run_many(
            [serve.RunTarget(app, name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait(scale, began)
        shown = f"[{parsed.http_host}]" if ":" in parsed.http_host else parsed.http_host
        print(
            f"verifiers ready: ws://{shown}:{settings.port}/v1/verify replicas={scale.replicas} "
            f"max_replicas={scale.max_replicas or scale.replicas} ray={ray.get_runtime_context().gcs_address}",
            flush=True,
        )
        while True:
            time.sleep(60)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if ray.is_initialized():
            _say("stopping")
            if deployed:
                serve.delete(APPLICATION)
            ray.shutdown()  # ends a local Ray, leaves one that was joined


def _start(scale: Scale, settings: Settings, address: str | None) -> None:
    """Join or start Ray, see that the replicas fit, start Serve's proxy."""
    import ray
    from ray import serve

    _check_addresses(settings, address)
    _say(f"joining Ray at {address}" if address else "starting Ray")
    try:
        ray.init(
            address=address or "local",
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else {"include_dashboard": False}),
        )
    except ConnectionError as error:
        raise ScaleError(f"cannot join Ray at {address}: {error}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # Ray has set its own
    for name, each in (("CPU", scale.cpus_per_replica), ("GPU", scale.gpus_per_replica)):
        needed, there = each * scale.replicas, ray.cluster_resources().get(name, 0.0)
        if needed > there:
            text = f"{scale.replicas} replicas need {needed:g} {name}s, Ray has {there:g}"
            if address is None:
                raise ScaleError(f"{text}; use fewer replicas or a smaller --{name.lower()}s-per-replica")
            _say(f"{text}; waiting for more machines")
    serve.start(
        http_options={"host": settings.host, "port": settings.port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )


def _wait(scale: Scale, began: float) -> None:
    """Return when all replicas run, with a line whenever their number changes. Raises ScaleError if they cannot."""
    from ray import serve

    reported = -1
    while True:
        status = serve.status().applications.get(APPLICATION)
        deployment = status.deployments.get(DEPLOYMENT) if status else None
        running = deployment.replica_states.get("RUNNING", 0) if deployment else 0
        if running != reported:
            _say(f"{running} of {scale.replicas} replicas ready after {time.monotonic() - began:.0f} s")
            reported = running
        if status and status.status == "DEPLOY_FAILED":
            raise ScaleError(_cause(deployment.message if deployment else status.message))
        if status and status.status == "RUNNING" and running >= scale.replicas:
            return
        time.sleep(POLL_SECONDS)


def _cause(message: str) -> str:
    """The exception's own line at the end of Serve's account of a replica's failed constructor."""
    lines = [line for line in message.splitlines() if line and not line[0].isspace()]
    return lines[-1].partition("Error: ")[2] or lines[-1] if lines else "the replicas failed to start"


def _check_addresses(settings: Settings, ray_address: str | None) -> None:
    """Fail at once where Ray would take seconds to fail, or wait for ever. Raises ScaleError."""
    if ray_address is None:
        try:
            family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            text = f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
            raise ScaleError(text) from None
        return
    host, _, port = ray_address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ScaleError(f"no Ray answers at {ray_address}: {error.strerror or error}") from None


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _describe(error: ValidationError) -> str:
    """All faults as `--flag: what is wrong`."""
    faults: Sequence[Mapping[str, Any]] = error.errors()
    flags = ["--" + str(fault["loc"][0]).replace("_", "-") + ": " if fault["loc"] else "" for fault in faults]
    return "; ".join(
        flag + fault["msg"].removeprefix("Value error, ") for flag, fault in zip(flags, faults, strict=True)
    )


def _say(text: str) -> None:
    print(f"scale: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> int:
    _say(" ".join(text.split()))
    return 2


if __name__ == "__main__":
    from cloud.scale import main as imported  # replicas unpickle cloud.scale.Replica, not __main__.Replica

    sys.exit(imported())
