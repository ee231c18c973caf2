"""Serve a verifier's app under uvicorn: signals, graceful shutdown, TLS."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from types import FrameType

import uvicorn

from cloud.app import App
from cloud.server.limits import raise_descriptors
from cloud.server.service import Verifier
from cloud.server.tls import Certificate, CertificateError
from cloud.server.uvicorn_protocols import WebSocketProtocol
from cloud.settings import Settings
from cloud.telemetry import log
from outrider_core.http_protocol import KEEP_ALIVE, HttpProtocol, TlsServer
from outrider_core.protocol.wire import MAX_CLIENT_FRAME

#: exit status if the engine is broken, or if the shutdown itself hangs (EX_SOFTWARE of sysexits)
EXIT_BROKEN = 70
#: seconds between checks whether the engine is broken
WATCH_SECONDS = 0.5
#: seconds after the last answer in which sockets close, requests are cut and the engine thread ends
LAST_SECONDS = 8.0


class HttpServer(uvicorn.Server):
    """Serves one verifier from one process.

    SIGTERM or SIGINT drains it: /readyz turns 503, devices get ERROR 9, answers in progress end, sockets close with
    1012, the process exits with 0. A second signal ends the process at once. SIGHUP reads token file and certificate
    again. A broken engine ends the process too, with `status` EXIT_BROKEN. Whatever hangs, shutdown takes at most
    LAST_SECONDS more than the time for answers in progress.
    """

    def __init__(
        self,
        verifier: Verifier,
        settings: Settings,
        certificate: Certificate | None,
        leaving: threading.Event,
        reloading: threading.Event,
    ) -> None:
        """leaving, reloading: set if a signal came before anything was served, as its exception may be swallowed."""
        raise_descriptors()
        self.app = App(verifier, settings)
        options = {}
        if certificate is not None:
            options = {"ssl_context_factory": lambda _config, _default: certificate.context}
            verifier.metrics.certificate_expiry.set(certificate.expires)
        super().__init__(uvicorn_config(self.app, **options))
        if self.app.gate.max_connections > (most := self.app.gate.most_sockets):
            log.warning("few sockets: raise the limit of open files", sockets_at_most=most)
        self.status = 0
        self._verifier = verifier
        self._certificate = certificate
        self._accounts, self._seconds = verifier.accounts, settings.shutdown_timeout
        self._leaving, self._reloading = leaving, reloading
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        signal.signal(signal.SIGHUP, self._hang_up)
        if self._certificate is not None:
            self._loop.create_server = self._tls_server  # type: ignore[method-assign,assignment]
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch())
        _notify("READY=1")
        if self._reloading.is_set():
            self._reload()
        if self._leaving.is_set():
            self._end()

    async def _tls_server(
        self, make: Callable[[], HttpProtocol], *, sock: socket.socket, ssl: ssl.SSLContext, backlog: int
    ) -> TlsServer:
        """Build the server in the form that uvicorn expects."""
        sock.listen(backlog)
        return TlsServer(make, sock, ssl, self.app.gate.request_seconds)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:  # uvicorn has not started, so there is nothing to drain
            self._leaving.set()
            raise SystemExit(0)
        if self._ending is not None:
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self._end)

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended, and asyncio's own handlers with it: SIGHUP would kill
            self._loop.call_soon_threadsafe(self._reload)

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._drain())
            limit = threading.Timer(self._seconds + LAST_SECONDS, os._exit, (EXIT_BROKEN,))
            limit.daemon = True
            limit.start()
            log.info("ending", seconds_at_most=self._seconds)
            _notify("STOPPING=1")

    async def _watch(self) -> None:
        """End the process once the engine is broken."""
        while (why := self._verifier.broken) is None:
            await asyncio.sleep(WATCH_SECONDS)
        self.status = EXIT_BROKEN
        log.error("broken: the process ends; start it again", why=why, status=EXIT_BROKEN)
        self._end()

    async def _drain(self) -> None:
        await self.app.drain(self._seconds)
        if self._watching is not None:
            self._watching.cancel()  # from here on the engine thread should end
        self.should_exit = True

    def _reload(self) -> None:
        if not self._accounts.required and self._certificate is None:
            log.info("nothing to reload: started without --auth-file and --ssl-certfile")
        if self._accounts.required:
            self._verifier.reload_tokens()
        if self._certificate is not None:
            try:
                changed = self._certificate.reload()
            except CertificateError as error:
                log.error("certificate not read, the old one stays", why=str(error))
                return
            expires = datetime.fromtimestamp(self._certificate.expires, UTC).isoformat()
            log.info("certificate read again" if changed else "certificate unchanged", expires=expires)
            self._verifier.metrics.certificate_expiry.set(self._certificate.expires)


def _notify(state: str) -> None:
    """Report to systemd, if it started this process with Type=notify. See sd_notify(3)."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def uvicorn_config(app: App, **options: object) -> uvicorn.Config:
    """Return uvicorn's configuration for the app. Feature rows do not compress, so deflate is off."""
    defaults: dict[str, object] = {
        "http": partial(HttpProtocol, app.gate),
        "ws": partial(WebSocketProtocol, app.gate),
        "ws_max_size": MAX_CLIENT_FRAME,
        "ws_per_message_deflate": False,
        "ws_ping_interval": 20.0,
        "ws_ping_timeout": 20.0,
        "lifespan": "on",
        "server_header": False,
        "access_log": False,
        "log_config": None,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE,
        "timeout_graceful_shutdown": 3,
    }
    return uvicorn.Config(app.asgi, **{**defaults, **options})  # type: ignore[arg-type]
