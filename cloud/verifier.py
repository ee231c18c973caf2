"""`python -m cloud.verifier`: load target and drafter, then serve devices until SIGTERM or SIGINT.

Torch and everything that needs it are imported late, so that wrong flags and --help are answered at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType

from pydantic import ValidationError
from pydantic_settings import SettingsError

from cloud.server.tls import Certificate, CertificateError
from cloud.settings import Settings, describe_errors, is_link, read_settings, unknown_variables
from cloud.telemetry import log
from outrider_core.serving import bind, in_url

#: a signal came before anything was served; a library's `except:` around an import, or Python in one of its callbacks,
#: may have swallowed the exit
_leaving = threading.Event()
#: SIGHUP came before anything was served: files may have been read before it
_reloading = threading.Event()


def main(argv: Sequence[str] | None = None, prog: str = "python -m cloud.verifier") -> int:
    """Run the verifier. Returns the exit status; a failure at start is one line on stderr.

    prog: how it was called, for help.
    """
    _open_standard_streams()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, _reload_later)
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv, prog)
    except ValidationError as error:
        return _fail(describe_errors(error))
    except SettingsError as error:
        return _fail(str(error.__cause__ or error))
    except (OSError, ValueError) as error:
        return _fail(str(error))
    if settings.print_config:
        print(settings.as_toml(), end="")
        return 0
    log.write_to_stderr(settings)
    for name in unknown_variables():
        log.warning("unknown variable in the environment: no setting has this name", name=name)
    if is_link(link := os.environ.get("VERIFIER_PORT", "")):
        log.warning(
            "VERIFIER_PORT is ignored: it is a link that Kubernetes makes for a Service, not a port", value=link
        )
    try:
        certificate = Certificate.of(settings)  # now, so that a wrong key fails before a large model is loaded
        bound = bind(settings.host, settings.port)  # so does a port in use
    except CertificateError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}")
    with contextlib.ExitStack() as sockets:
        for each in bound:
            sockets.enter_context(each)
        try:
            return _run(settings, bound, certificate)
        except Exception:
            if _leaving.is_set():
                return 0  # a C extension that was being imported has turned the exit into an error of its own
            raise


def _run(settings: Settings, bound: list[socket.socket], certificate: Certificate | None) -> int:
    """Load, print the ready line, serve."""
    if sys.stderr.isatty():
        print(f"loading target {settings.model} ...", file=sys.stderr, flush=True)
    from rich.console import Console

    from cloud.http_server import HttpServer
    from cloud.loading import load_verifier
    from cloud.server.accounts import AuthError
    from cloud.server.page import PageError, find_page
    from cloud.telemetry.progress import Bar
    from outrider_core.models.moa_config import DrafterError
    from outrider_core.targets.memory import return_large_blocks
    from outrider_core.targets.source import TargetError

    return_large_blocks()
    try:
        find_page(settings)  # reports a wrong folder before a large model is loaded
        with Bar(Console(stderr=True)) as bar:
            verifier = load_verifier(settings, bar if sys.stderr.isatty() else None)
    except (TargetError, DrafterError, AuthError, PageError) as error:
        return 0 if _leaving.is_set() else _fail(str(error))
    try:
        server = HttpServer(verifier, settings, certificate, _leaving, _reloading)
    except PageError as error:
        return _fail(str(error))
    if _leaving.is_set():
        return 0
    host, port = bound[0].getsockname()[:2]
    scheme = "wss" if certificate else "ws"
    _say(
        f"verifier ready: {scheme}://{in_url(host)}:{port}/v1/verify target={verifier.target_hash} "
        f"drafter={verifier.drafter_hash} max_context={verifier.max_context} max_nodes={verifier.max_nodes} "
        f"max_sessions={settings.max_sessions} kv_tokens={settings.kv_tokens}"
    )
    # a signal before uvicorn's handlers ends the process; nothing is lost
    warnings.filterwarnings("ignore", "coroutine 'Server.serve' was never awaited")
    server.run(sockets=bound)
    if server.status:
        log.settle()
        os._exit(server.status)  # a broken engine may hang or crash while Python shuts down
    return 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit with 0 while loading. Once it serves, `cloud.http_server.HttpServer` has its own handlers."""
    _leaving.set()
    raise SystemExit(0)


def _reload_later(_number: int, _frame: FrameType | None) -> None:
    _reloading.set()


def _say(line: str) -> None:
    """Print on standard output, whose reader may be gone."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python would try again at the end, and exit with 120


def _open_standard_streams() -> None:
    """Open closed standard streams, so that no file or socket gets their numbers and then the log."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _fail(text: str) -> int:
    print(f"verifier: {' '.join(text.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
