"""`python -m cloud.verifier`: load target and drafter, then serve devices until SIGTERM or SIGINT.

Torch and all that needs it are imported late, so that wrong flags and --help are answered at once.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import structlog
from pydantic import ValidationError
from pydantic_settings import SettingsError

from cloud.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verifier. Returns the exit status; every failure at start is one line on stderr."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        flags = list(sys.argv[1:] if argv is None else argv)
        settings = Settings(_cli_parse_args=flags)  # type: ignore[call-arg]
    except ValidationError as error:
        return _fail("; ".join(_describe(fault) for fault in error.errors()))
    except SettingsError as error:
        return _fail(str(error.__cause__ or error))
    _log_to_stderr()
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as error:
        return _fail(f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}")
    with listener:
        return _run(settings, listener)


def _run(settings: Settings, listener: socket.socket) -> int:
    """Load, say so, serve."""
    import uvicorn

    from cloud.server import create_app, uvicorn_config
    from cloud.service import load_verifier
    from models.moa import DrafterError
    from models.target import TargetError

    try:
        verifier = load_verifier(settings)
    except (TargetError, DrafterError) as error:
        return _fail(str(error))
    config = uvicorn_config(create_app(verifier))
    listener.listen(config.backlog)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"verifier ready: ws://{shown}:{port}/v1/verify target={verifier.target_hash} "
        f"drafter={verifier.drafter_hash} max_context={verifier.max_context} max_nodes={verifier.max_nodes} "
        f"max_sessions={settings.max_sessions} kv_tokens={settings.kv_tokens}",
        flush=True,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


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
    """Exit 0 while loading; while serving uvicorn has its own handler and raises the signal again at the end."""
    raise SystemExit(0)


def _describe(fault: object) -> str:
    """A pydantic fault as `--flag: what is wrong`."""
    assert isinstance(fault, dict)
    flag = "--" + str(fault["loc"][0]).replace("_", "-") + ": " if fault["loc"] else ""
    return flag + str(fault["msg"]).removeprefix("Value error, ")


def _fail(text: str) -> int:
    print(f"verifier: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
