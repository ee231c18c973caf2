"""The verifier's ASGI app: health checks and the WebSocket that devices talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloud.connection import CLOSE_POLICY, Connection, Stream
from cloud.service import Verifier
from protocol.wire import MAX_CLIENT_FRAME, SUBPROTOCOL

HELLO_SECONDS = 10.0
CLOSE_UNSUPPORTED = 1003


def create_app(
    verifier: Verifier, hello_seconds: float = HELLO_SECONDS, extra_routes: Sequence[Route] = ()
) -> Starlette:
    """The app of one verifier. It starts the engine thread and stops it at shutdown."""
    streams_by_session: dict[bytes, Stream] = {}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        verifier.start()
        yield
        await asyncio.to_thread(verifier.stop)

    async def healthz(_: Request) -> Response:
        return _status(verifier.alive, "alive", "the engine thread is dead")

    async def readyz(_: Request) -> Response:
        return _status(verifier.ready, "ready", "not ready")

    async def verify(websocket: WebSocket) -> None:
        if not verifier.ready:
            await websocket.send_denial_response(PlainTextResponse("not ready\n", 503))
        elif SUBPROTOCOL not in websocket.scope["subprotocols"]:
            text = f"WebSocket subprotocol {SUBPROTOCOL} is required\n"
            await websocket.send_denial_response(PlainTextResponse(text, 400))
        else:
            await websocket.accept(SUBPROTOCOL)
            await _Socket(websocket, verifier, streams_by_session, hello_seconds).run()

    routes = [Route("/healthz", healthz), Route("/readyz", readyz), WebSocketRoute("/v1/verify", verify)]
    return Starlette(routes=[*routes, *extra_routes], lifespan=lifespan)


def _status(good: bool, yes: str, no: str) -> Response:
    return PlainTextResponse(f"{yes if good else no}\n", 200 if good else 503)


def uvicorn_config(app: Starlette) -> uvicorn.Config:
    """How uvicorn serves the app. int8 rows do not shrink, so there is no compression."""
    return uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=MAX_CLIENT_FRAME,
        ws_per_message_deflate=False,
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        lifespan="on",
        server_header=False,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=5,
    )


class _Socket:
    """Moves frames between one WebSocket and its Connection."""

    def __init__(
        self,
        websocket: WebSocket,
        verifier: Verifier,
        streams_by_session: dict[bytes, Stream],
        hello_seconds: float,
    ) -> None:
        self._websocket, self._hello_seconds = websocket, hello_seconds
        self._news, self._room = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        self._connection = Connection(verifier, streams_by_session, loop.call_soon_threadsafe, self._news.set)

    async def run(self) -> None:
        """Until the socket closes."""
        tasks = {asyncio.create_task(self._receive()), asyncio.create_task(self._send())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (WebSocketDisconnect, OSError):
            pass  # gone without a word: nothing to answer
        finally:
            self._connection.lost()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> None:
        """Returns when the device is gone; on a fault of its own it waits for the sender to close."""
        connection, loop = self._connection, asyncio.get_running_loop()
        deadline = loop.time() + self._hello_seconds
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
            connection.receive(frame)
            while connection.outbox.crowded and connection.closing is None:
                self._room.clear()
                await self._room.wait()
            while connection.backlogged:
                await asyncio.sleep(0.02)

    async def _send(self) -> None:
        """Returns when the Connection wants the socket closed and all is sent."""
        connection = self._connection
        while True:
            self._news.clear()
            while (frame := connection.outbox.next()) is not None:
                await self._websocket.send_bytes(frame)
                self._room.set()
            if connection.closing is not None:
                if self._websocket.application_state is WebSocketState.CONNECTED:
                    await self._websocket.close(*connection.closing)
                return
            await self._news.wait()
