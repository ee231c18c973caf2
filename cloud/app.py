"""The verifier's ASGI app: the WebSocket that devices talk to, health, metrics, and the OpenAI-style endpoints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import date
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from cloud.server.close_codes import CloseCode
from cloud.server.device_socket import DeviceSocket
from cloud.server.limits import WAITING, Account, Gate, RefusalReason
from cloud.server.openai import EngineBackend
from cloud.server.page import page_routes
from cloud.server.service import Verifier
from cloud.server.stream import Stream
from cloud.settings import Settings
from cloud.telemetry import log
from cloud.telemetry.metrics import CONTENT_TYPE
from outrider_core.chat.api.app import api_app, api_routes, probe_routes
from outrider_core.chat.api.errors import ApiError
from outrider_core.protocol.wire import SUBPROTOCOL
from outrider_core.serving import PageRules, bearer, is_loopback
from outrider_core.tracing import Traced, trace_of

FOREIGN = (
    "pages of this origin are refused; the operator can allow it, "
    "or the origin under which pages reach this verifier, with --allow-origin"
)
#: headers of a proxy: the client is not on this machine, though the socket is
FORWARDED = {"forwarded", "x-forwarded-for", "x-real-ip", "via"}
TOKEN_NEEDED = "a valid token is needed: Authorization: Bearer TOKEN"
#: at a shutdown, devices are asked to retry at times spread over this many seconds
RETRY_SPREAD = 1.0


class App:
    """The app of one verifier, and the state that its sockets share. Any ASGI server can serve `asgi`.

    It starts the engine thread and stops it at shutdown. settings: access and limits. metrics: source of `/metrics`; by
    default the verifier's own.
    """

    def __init__(
        self,
        verifier: Verifier,
        settings: Settings,
        metrics: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self.verifier = verifier
        self.gate = Gate(settings, verifier.metrics)
        self._streams: dict[bytes, Stream] = {}
        self.sockets: set[DeviceSocket] = set()
        names = {settings.host, *filter(None, (urlsplit(origin).hostname for origin in settings.allow_origin))}
        self._pages = PageRules(settings.allow_origin, names, verifier.accounts.required, serves_pages=True)
        self._metrics_text = metrics
        self._metrics_account = settings.metrics_account
        self._logged_expiries = set[tuple[str, date | None]]()
        routes: list[BaseRoute] = [
            *probe_routes(self._healthz, self._readyz),
            Route("/metrics", self._metrics),
            Route("/v1/verify", _upgrade_needed),
            WebSocketRoute("/v1/verify", self._verify),
            *page_routes(settings, self._pages),
        ]
        if verifier.tokenizer is not None:
            backend = EngineBackend(verifier, verifier.model_name, verifier.tokenizer, self.admit, self.gate)
            routes += api_routes(backend)
        counted = {getattr(each, "path", "") for each in routes}  # strangers may ask for any number of other paths

        def replied(path: str, status: int) -> None:
            verifier.metrics.http_requests.labels(path if path in counted else "other", str(status)).inc()

        self.asgi: ASGIApp = Traced(api_app(routes, settings.allow_origin, self._lifespan), replied)

    async def drain(self, seconds: float) -> None:
        """Stop accepting, notify devices, let rounds in progress end for at most `seconds`, and close the sockets."""
        self.verifier.drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        for socket in self.sockets:
            socket.connection.going_away()
        while not self.verifier.idle and self.verifier.alive and loop.time() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # the engine thread has posted the last replies, but this loop has not sent them yet
        for index, socket in enumerate(list(self.sockets)):
            spread = RETRY_SPREAD * index / len(self.sockets)
            socket.connection.close(CloseCode.RESTART, f"the verifier restarts; retry after {spread:.1f} s")
        while self.sockets and loop.time() < until + 1.0:
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.verifier.start()
        yield
        await asyncio.to_thread(self.verifier.stop)

    async def _healthz(self, _: Request) -> Response:
        if why := self.verifier.broken:
            return _status(503, f"broken: {why}")
        return _status(200, "draining" if self.verifier.draining else "alive")

    async def _readyz(self, _: Request) -> Response:
        if why := self.verifier.broken:
            return _status(503, f"broken: {why}")
        return _status(503, "draining") if self.verifier.draining else _status(200, "ready")

    async def _metrics(self, request: Request) -> Response:
        local, required, reads_all = _is_local(request), self.verifier.accounts.required, True
        if not local or FORWARDED & set(request.headers.keys()) or self._pages.rebound(request.headers):
            account = self.account(request)
            fault = self._token_fault(account)
            if (local and not required) or account is None or fault or self._metrics_account not in ("", account.name):
                self.gate.refused(fault[0] if fault else RefusalReason.TOKEN)
                return PlainTextResponse(
                    "a token that may read metrics is needed\n", 401, {"WWW-Authenticate": "Bearer"}
                )
            reads_all = account.name == self._metrics_account
        text = self.verifier.metrics.text() if self._metrics_text is None else await self._metrics_text()
        if not reads_all:  # a token may not read what other accounts use
            text = b"".join(line for line in text.splitlines(True) if b'account="' not in line)
        return Response(text, media_type=CONTENT_TYPE)

    def account(self, connection: HTTPConnection) -> Account | None:
        """Return the account of a request, even if its token has expired; None if there is no such token."""
        protocols = connection.scope.get("subprotocols", ())
        return self.verifier.accounts.authenticate(bearer(connection.headers.get("authorization"), protocols))

    def _token_fault(self, account: Account | None) -> tuple[RefusalReason, str] | None:
        """Return why the token of a request is refused, and log an expired one once; None if it is not."""
        if account is None:
            return RefusalReason.TOKEN, TOKEN_NEEDED
        if not account.expired:
            return None
        if (account.name, account.expires) not in self._logged_expiries:
            self._logged_expiries.add((account.name, account.expires))
            log.warning("expired token refused", account=account.name, expires=str(account.expires))
        return RefusalReason.EXPIRED, f"this token expired on {account.expires}; ask the operator for a new one"

    def admit(self, request: HTTPConnection) -> Account:
        """Return the account of an HTTP request. Raises ApiError 401 or 403."""
        read_by_page = request.scope["method"] == "GET" and _is_local(request)  # browsers name the Origin of all others
        if self._pages.foreign(request.headers) or (read_by_page and self._pages.rebound(request.headers)):
            self.gate.refused(RefusalReason.ORIGIN)
            raise ApiError(403, FOREIGN, code="origin_not_allowed")
        account = self.account(request)
        if fault := self._token_fault(account):
            self.gate.refused(fault[0])
            raise ApiError(401, fault[1], code="invalid_api_key")
        assert account is not None
        return account

    def _refusal(self, websocket: WebSocket, account: Account | None) -> tuple[RefusalReason, int, str] | None:
        """Return why a handshake is refused, with HTTP status and text; None if it is not."""
        if not self.verifier.ready:
            return RefusalReason.NOT_READY, 503, "not ready"
        if self._pages.foreign(websocket.headers):
            return RefusalReason.ORIGIN, 403, FOREIGN
        if fault := self._token_fault(account):
            return fault[0], 401, fault[1]
        assert account is not None
        if account.crowded:
            return RefusalReason.ACCOUNT, 429, "all connections of this token are taken; close one"
        if len(self.sockets) >= self.gate.max_connections:
            return RefusalReason.CONNECTIONS, 503, "all connections of this verifier are taken; try again later"
        if SUBPROTOCOL not in websocket.scope["subprotocols"]:
            return RefusalReason.SUBPROTOCOL, 400, f"WebSocket subprotocol {SUBPROTOCOL} is required"
        return None

    async def _verify(self, websocket: WebSocket) -> None:
        account = self.account(websocket)
        refusal = self._refusal(websocket, account)
        if refusal is not None or account is None:
            reason, status, text = refusal or (RefusalReason.TOKEN, 401, TOKEN_NEEDED)
            self.gate.refused(reason)
            await websocket.send_denial_response(PlainTextResponse(text + "\n", status))
            return
        account.connections += 1
        if (waiting := websocket.scope.get("state", {}).get(WAITING)) is not None:
            waiting.belongs_to(account)
        try:
            with contextlib.suppress(WebSocketDisconnect, OSError):
                await websocket.accept(SUBPROTOCOL)
                log.info("device connected", account=account.name, **trace_of(websocket.scope).fields)
                socket = DeviceSocket(websocket, self.verifier, account, self._streams, self.gate.hello_seconds)
                self.sockets.add(socket)
                try:
                    await socket.run()
                finally:
                    self.sockets.discard(socket)
        finally:
            account.connections -= 1


async def _upgrade_needed(_: Request) -> Response:
    text = f"devices connect here by WebSocket, subprotocol {SUBPROTOCOL}\n"
    return PlainTextResponse(text, 426, {"Upgrade": "websocket", "Connection": "Upgrade"})


def _is_local(connection: HTTPConnection) -> bool:
    return connection.client is not None and is_loopback(connection.client.host)


def _status(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)
