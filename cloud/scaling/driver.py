"""Run the replicas from one command: start Ray and Serve, deploy, report, wait, and stop what was started."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import sys
import time
from types import FrameType
from typing import NoReturn

from cloud.scaling.fleet_metrics import DIFFER, disagreement, end_hub, reports_now
from cloud.scaling.options import DEPLOYMENT, Proxy, Scale, ScaleError
from cloud.scaling.replica import application
from cloud.settings import Settings
from outrider_core.serving import bind, in_url

APPLICATION = "verifier"
POLL_SECONDS = 0.5


def run(scale: Scale, settings: Settings, host: str, proxy: Proxy, ray_address: str | None) -> NoReturn:
    """Serve until SIGINT or SIGTERM, which end it with SystemExit(0). Raises ScaleError with one clear line.

    host: the address to print. ray_address: the Ray cluster to join; None: a local one for this command.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if proxy is Proxy.HAPROXY:
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
        _start(scale, settings, ray_address)
        deployed = True
        serve.run_many(
            [serve.RunTarget(app, name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait(scale, began)
        if differ := disagreement(reports_now()):
            say(f"error: {DIFFER}: {differ}")
        if settings.ssl_certfile is not None:
            _check_tls(settings)
        print(
            f"verifiers ready: {'wss' if settings.ssl_certfile else 'ws'}://{in_url(host)}:{settings.port}/v1/verify "
            f"replicas={scale.replicas} max_replicas={scale.max_replicas or scale.replicas} "
            f"ray={ray.get_runtime_context().gcs_address}",
            flush=True,
        )
        while True:
            time.sleep(60)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if ray.is_initialized():
            say("stopping")
            if deployed:
                serve.delete(APPLICATION)
                end_hub()
            ray.shutdown()  # ends a local Ray, leaves one that was joined


def _start(scale: Scale, settings: Settings, address: str | None) -> None:
    """Join or start Ray, check that the replicas fit, start Serve's proxy."""
    import ray
    from ray import serve

    _check_addresses(settings, address)
    say(f"joining Ray at {address}" if address else "starting Ray")
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
        signal.signal(number, leave)  # Ray has set its own
    signal.signal(signal.SIGHUP, reload)
    for name, each in (("CPU", scale.cpus_per_replica), ("GPU", scale.gpus_per_replica)):
        needed, there = each * scale.replicas, ray.cluster_resources().get(name, 0.0)
        if needed > there:
            text = f"{scale.replicas} replicas need {needed:g} {name}s, Ray has {there:g}"
            if address is None:
                raise ScaleError(f"{text}; use fewer replicas or a smaller --{name.lower()}s-per-replica")
            say(f"{text}; waiting for more machines")
    serve.start(
        http_options={"host": settings.host, "port": settings.port, **_certificate(settings)},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )


def _certificate(settings: Settings) -> dict[str, str]:
    """Return the certificate's options by Serve's names."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return {}
    return {"ssl_certfile": str(settings.ssl_certfile), "ssl_keyfile": str(settings.ssl_keyfile)}


def _check_tls(settings: Settings) -> None:
    """Raise ScaleError unless Serve's proxy uses TLS: one that ran already keeps its own options."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, settings.port), timeout=10) as raw, context.wrap_socket(raw):
            pass
    except OSError as error:
        raise ScaleError(
            f"Serve's proxy at {host} port {settings.port} does not speak TLS, and tokens would travel in clear text "
            f"({error}); stop the Serve that runs there, or give it the certificate itself (http_options)"
        ) from None


def _wait(scale: Scale, began: float) -> None:
    """Return when all replicas run, logging each change of their number. Raises ScaleError if they cannot."""
    from ray import serve

    reported = -1
    while True:
        status = serve.status().applications.get(APPLICATION)
        deployment = status.deployments.get(DEPLOYMENT) if status else None
        running = deployment.replica_states.get("RUNNING", 0) if deployment else 0
        if running != reported:
            say(f"{running} of {scale.replicas} replicas ready after {time.monotonic() - began:.0f} s")
            reported = running
        if status and status.status == "DEPLOY_FAILED":
            raise ScaleError(_cause(deployment.message if deployment else status.message))
        if status and status.status == "RUNNING" and running >= scale.replicas:
            return
        time.sleep(POLL_SECONDS)


def _cause(message: str) -> str:
    """Return the exception's own line, from Serve's report of a replica whose constructor failed."""
    lines = [line for line in message.splitlines() if line and not line[0].isspace()]
    return lines[-1].partition("Error: ")[2] or lines[-1] if lines else "the replicas failed to start"


def _check_addresses(settings: Settings, ray_address: str | None) -> None:
    """Fail at once if Ray would fail after seconds or wait indefinitely. Raises ScaleError."""
    if ray_address is None:
        try:
            for probe in bind(settings.host, settings.port):
                probe.close()
        except OSError as error:
            text = f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
            raise ScaleError(text) from None
        return
    host, _, port = ray_address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ScaleError(f"Ray does not answer at {ray_address}: {error.strerror or error}") from None


def leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """Exit with status 0 on a signal."""
    raise SystemExit(0)


def reload(_number: int, _frame: FrameType | None) -> None:
    """On a signal, log which files are read again without it."""
    say("replicas read a changed token file by themselves, within seconds; a new certificate takes a restart")


def say(text: str) -> None:
    """Report progress on stderr."""
    print(f"scale: {text}", file=sys.stderr, flush=True)
