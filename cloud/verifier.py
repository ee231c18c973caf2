"""`python -m cloud.verifier`: load target and drafter, then serve devices until SIGTERM or SIGINT.

Torch and all that needs it are imported late, so that wrong flags and --help are answered at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from types import FrameType

import structlog
from pydantic import ValidationError
from pydantic_settings import SettingsError
from structlog.typing import Processor

from cloud.settings import Settings, read_settings


def main(argv: Sequence[str] | None = None, prog: str = "python -m cloud.verifier") -> int:
    """Run the verifier. Returns the exit status; every failure at start is one line on stderr.

    prog: how it was called, for help.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv, prog)
    except ValidationError as error:
        return _fail("; ".join(_describe(fault) for fault in error.errors()))
    except SettingsError as error:
        return _fail(str(error.__cause__ or error))
    except (OSError, ValueError) as error:
        return _fail(f"--config: {error}".replace("--config: --config", "--config"))
    if settings.print_config:
        print(settings.as_toml(), end="")
        return 0
    _log_to_stderr(settings)
    if int(os.environ.get("RANK", "0")) > 0:
        return _follow(settings)
    try:
        context = _tls(settings)
        listener = _listen(settings.host, settings.port)
    except ssl.SSLError as error:
        return _fail(f"--tls-cert, --tls-key: {error.reason or error}")
    except OSError as error:
        where = error.filename or f"{settings.host} port {settings.port}"
        return _fail(f"cannot {'read' if error.filename else 'listen on'} {where}: {error.strerror or error}")
    with listener:
        return _run(settings, listener, context)


def _run(settings: Settings, listener: socket.socket, context: ssl.SSLContext | None) -> int:
    """Load, say so, serve."""
    if sys.stderr.isatty():
        print(f"loading target {settings.model} ...", file=sys.stderr, flush=True)
    from cloud.auth import AuthError
    from cloud.service import load_verifier
    from cloud.serving import Server
    from outrider_core.models.moa import DrafterError
    from outrider_core.models.target import TargetError

    try:
        verifier = load_verifier(settings)
    except (TargetError, DrafterError, AuthError) as error:
        return _fail(str(error))
    server = Server(verifier, settings, context)
    listener.listen(server.config.backlog)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"verifier ready: {'wss' if context else 'ws'}://{shown}:{port}/v1/verify target={verifier.target_hash} "
        f"drafter={verifier.drafter_hash} max_context={verifier.max_context} max_nodes={verifier.max_nodes} "
        f"max_sessions={settings.max_sessions} kv_tokens={settings.kv_tokens}",
        flush=True,
    )
    server.run(sockets=[listener])
    return 0


def _follow(settings: Settings) -> int:
    """Any rank but the first: load a share and do as rank 0 says. Signals are for rank 0, which ends the others."""
    from cloud.service import load_verifier
    from outrider_core.models.moa import DrafterError
    from outrider_core.models.target import TargetError

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        load_verifier(settings)
    except (TargetError, DrafterError) as error:
        return _fail(str(error))
    return 0


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """Read now, so that a wrong key fails before a large model is loaded."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    for path in (settings.tls_cert, settings.tls_key):
        path.open("rb").close()  # a clear error where ssl gives none
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


def _listen(host: str, port: int) -> socket.socket:
    """Bind now, so that a taken port fails before a large model is loaded; listening comes later."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit 0 while loading; while serving `cloud.serving.Server` has its own handlers."""
    raise SystemExit(0)


def _describe(fault: object) -> str:
    """A pydantic fault as `--flag: what is wrong`."""
    assert isinstance(fault, dict)
    flag = "--" + str(fault["loc"][0]).replace("_", "-") + ": " if fault["loc"] else ""
    return flag + str(fault["msg"]).removeprefix("Value error, ")


def _fail(text: str) -> int:
    print(f"verifier: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _log_to_stderr(settings: Settings) -> None:
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    level = getattr(logging, settings.log_level.upper())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper("iso"),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # libraries' own warnings come out in the same shape
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())
