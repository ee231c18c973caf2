"""The verifier's ASGI app: the WebSocket that devices talk to, health, metrics, and the OpenAI-style endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloud.auth import Account, Bucket, bearer
from cloud.connection import CLOSE_POLICY, Connection, Stream
from cloud.metrics import CONTENT_TYPE
from cloud.openai import openai_routes
from cloud.service import Verifier
from cloud.settings import Settings, is_loopback
from cloud.transport import HttpProtocol, WebSocketProtocol
from outrider_core.chat_api.completions import ApiError
from outrider_core.protocol.wire import MAX_CLIENT_FRAME, SUBPROTOCOL

HELLO_SECONDS = 10.0
#: frames that are read of one connection, on average; a device sends some ten
FRAMES_PER_SECOND = 200.0
CLOSE_UNSUPPORTED = 1003
CLOSE_RESTART = 1012
CLOSE_REVOKED = 4003
FOREIGN = "pages of this origin may not ask; the operator can add it with --allow-origin"
TOKEN_NEEDED = "a valid token is needed: Authorization: Bearer TOKEN"
#: devices told to go are spread over this many seconds, so that they do not all come back at once
RETRY_SPREAD = 1.0

log = structlog.get_logger()


class App:
    """State that the sockets of one verifier share. `asgi` is the app to serve."""

    def __init__(
        self,
        verifier: Verifier,
        hello_seconds: float = HELLO_SECONDS,
        allow_origin: Sequence[str] = (),
        max_connections: int = 10_000,
        extra_routes: Sequence[BaseRoute] = (),
    ) -> None:
        self.verifier, self.hello_seconds = verifier, hello_seconds
        self.streams: dict[bytes, Stream] = {}
        self.sockets: set[_Socket] = set()
        self._allow_origin, self._max_connections = set(allow_origin), max_connections
        routes: list[BaseRoute] = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            WebSocketRoute("/v1/verify", self._verify),
            *extra_routes,
        ]
        if verifier.tokenizer is not None:
            routes += openai_routes(verifier, verifier.model_name, verifier.tokenizer, self.admit)
        self.asgi = Starlette(routes=routes, lifespan=self._lifespan)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let rounds under way end for at most `seconds`, tell the devices, close their sockets."""
        self.verifier.drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        for socket in self.sockets:
            socket.connection.going_away()
        while not self.verifier.idle and loop.time() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # the last replies are on their way to this thread
        for index, socket in enumerate(list(self.sockets)):
            spread = RETRY_SPREAD * index / len(self.sockets)
            socket.connection.close(CLOSE_RESTART, f"the verifier restarts; retry after {spread:.1f} s")
        while self.sockets and loop.time() < until + 1.0:
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.verifier.start()
        yield
        await asyncio.to_thread(self.verifier.stop)

    async def _healthz(self, _: Request) -> Response:
        return _status(self.verifier.alive, "alive", "the engine thread is dead or hangs")

    async def _readyz(self, _: Request) -> Response:
        return _status(self.verifier.ready, "ready", "not ready")

    async def _metrics(self, request: Request) -> Response:
        local = request.client is not None and is_loopback(request.client.host)
        if not local and self.account(request) is None:
            return PlainTextResponse("a token is needed\n", 401, {"WWW-Authenticate": "Bearer"})
        return Response(self.verifier.metrics.text(), media_type=CONTENT_TYPE)

    def account(self, connection: HTTPConnection) -> Account | None:
        """Who asks, or None."""
        protocols = connection.scope.get("subprotocols", ())
        return self.verifier.accounts.authenticate(bearer(connection.headers.get("authorization"), protocols))

    def admit(self, request: Request) -> Account:
        """Whose HTTP request it is. Raises ApiError."""
        if self.foreign(request):
            self.verifier.metrics.refused.labels("origin").inc()
            raise ApiError(403, FOREIGN, code="origin_not_allowed")
        account = self.account(request)
        if account is None:
            self.verifier.metrics.refused.labels("token").inc()
            raise ApiError(401, TOKEN_NEEDED, code="invalid_api_key")
        return account

    def foreign(self, connection: HTTPConnection) -> bool:
        """Whether a web page asks that is neither this server's own nor allowed: browsers let any page connect."""
        origin = connection.headers.get("origin")
        if origin is None or origin in self._allow_origin:
            return False
        return urlsplit(origin).netloc != connection.headers.get("host")

    def _refusal(self, websocket: WebSocket, account: Account | None) -> tuple[str, int, str] | None:
        """(reason for the metrics, HTTP status, text) if the handshake is refused."""
        if not self.verifier.ready:
            return "not_ready", 503, "not ready"
        if self.foreign(websocket):
            return "origin", 403, FOREIGN
        if account is None:
            return "token", 401, TOKEN_NEEDED
        if len(self.sockets) >= self._max_connections:
            return "connections", 503, "all connections of this verifier are taken; try again later"
        if SUBPROTOCOL not in websocket.scope["subprotocols"]:
            return "subprotocol", 400, f"WebSocket subprotocol {SUBPROTOCOL} is required"
        return None

    async def _verify(self, websocket: WebSocket) -> None:
        account = self.account(websocket)
        refusal = self._refusal(websocket, account)
        if refusal is not None or account is None:
            reason, status, text = refusal or ("token", 401, TOKEN_NEEDED)
            self.verifier.metrics.refused.labels(reason).inc()
            await websocket.send_denial_response(PlainTextResponse(text + "\n", status))
            return
        with contextlib.suppress(WebSocketDisconnect, OSError):
            await websocket.accept(SUBPROTOCOL)
            await _Socket(websocket, self, account).run()


def create_app(verifier: Verifier, settings: Settings) -> Starlette:
    """The app of one verifier, for any ASGI server. It starts the engine thread and stops it at shutdown."""
    return App(verifier, allow_origin=settings.allow_origin, max_connections=settings.max_connections).asgi


def _status(good: bool, yes: str, no: str) -> Response:
    return PlainTextResponse(f"{yes if good else no}\n", 200 if good else 503)


def uvicorn_config(app: Starlette, **options: object) -> uvicorn.Config:
    """How uvicorn serves the app. feature rows do not shrink, so there is no compression."""
    defaults: dict[str, object] = {
        "http": HttpProtocol,
        "ws": WebSocketProtocol,
        "ws_max_size": MAX_CLIENT_FRAME,
        "ws_per_message_deflate": False,
        "ws_ping_interval": 20.0,
        "ws_ping_timeout": 20.0,
        "lifespan": "on",
        "server_header": False,
        "access_log": False,
        "log_config": None,
        "proxy_headers": False,
        "timeout_graceful_shutdown": 5,
    }
    return uvicorn.Config(app, **{**defaults, **options})  # type: ignore[arg-type]


class _Socket:
    """Moves frames between one WebSocket and its Connection."""

    def __init__(self, websocket: WebSocket, app: App, account: Account) -> None:
        self._websocket, self._app = websocket, app
        self._metrics = app.verifier.metrics
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._frames = Bucket(FRAMES_PER_SECOND, time.monotonic)
        loop = asyncio.get_running_loop()
        self.connection = Connection(app.verifier, account, app.streams, loop.call_soon_threadsafe, self._news.set)

    async def run(self) -> None:
        """Until the socket closes."""
        self._app.sockets.add(self)
        self._metrics.connections.inc()
        tasks = {asyncio.create_task(self._receive()), asyncio.create_task(self._send())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (WebSocketDisconnect, OSError):
            pass  # gone without a word: nothing to answer
        finally:
            self.connection.lost()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._app.sockets.discard(self)
            self._metrics.connections.dec()

    async def _receive(self) -> None:
        """Returns when the device is gone; on a fault of its own it waits for the sender to close."""
        connection, loop = self.connection, asyncio.get_running_loop()
        deadline = loop.time() + self._app.hello_seconds
        while True:
            try:
                async with asyncio.timeout_at(None if connection.greeted else deadline):
                    message = await self._websocket.receive()
            except TimeoutError:
                connection.close(CLOSE_POLICY, "no HELLO in time")
                await asyncio.Event().wait()
            if message["type"] == "websocket.disconnect":
                return
            frame = message.get("bytes")
            if connection.closing is not None:
                continue
            if frame is None:
                connection.close(CLOSE_UNSUPPORTED, "binary messages only")
                continue
            if connection.account.revoked:
                connection.close(CLOSE_REVOKED, "the token is no longer valid")
                continue
            self._metrics.bytes_in.inc(len(frame))
            connection.receive(frame)
            self._frames.take(1)
            if pause := self._frames.wait():
                await asyncio.sleep(pause)  # nothing is read meanwhile: a flood fills its own socket
            while connection.outbox.crowded and connection.closing is None:
                self._room.clear()
                await self._room.wait()
            while connection.backlogged:
                await asyncio.sleep(0.02)

    async def _send(self) -> None:
        """Returns when the Connection wants the socket closed and all is sent."""
        connection = self.connection
        while True:
            self._news.clear()
            while (frame := connection.outbox.next()) is not None:
                await self._websocket.send_bytes(frame)
                self._metrics.bytes_out.inc(len(frame))
                self._room.set()
            if connection.closing is not None:
                if self._websocket.application_state is WebSocketState.CONNECTED:
                    await self._websocket.close(*connection.closing)
                return
            await self._news.wait()
