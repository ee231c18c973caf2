"""uvicorn's protocols with bounds that it lacks: on silent sockets, sockets that are not read, pings and fragments."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from cloud.auth import Bucket
from cloud.close_codes import CloseCode

#: seconds a client may take from connecting to the end of its first request's headers
FIRST_REQUEST = 10.0
#: seconds after a close in which the client may read what was already sent
LAST_READ = 5.0
#: pings and pongs of one connection, per second on average, above which it is dropped
CONTROLS_PER_SECOND = 50.0
#: fragments of one message; the size limit does not catch empty ones
MAX_FRAGMENTS = 4096


class HttpProtocol(H11Protocol):
    """Drops connections that send no request in time."""

    _first: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._first = self.loop.call_later(FIRST_REQUEST, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._first is not None and (self.cycle is not None or self.transport.get_protocol() is not self):
            self._first.cancel()
            self._first = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._first is not None:
            self._first.cancel()
        super().connection_lost(exc)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Drops sockets whose client does not read, or that flood with frames outside of any backpressure."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._controls = Bucket(CONTROLS_PER_SECOND, time.monotonic)

    def _flooded(self) -> bool:
        """Count a ping or pong. Too many cut the socket, because a close would wait for the client to read."""
        self._controls.take(1)
        if self._controls.wait() > 0:
            self.transport.abort()
        return self.transport.is_closing()

    def handle_ping(self) -> None:
        if not self._flooded():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if not self._flooded():
            super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.frames = []
            self.conn.fail(CloseCode.TOO_LARGE, "too many fragments")
            self.handle_parser_exception()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    async def send(self, message: Any) -> None:
        await super().send(message)
        match cast(dict[str, Any], message):
            case {"type": "websocket.close"}:
                self.loop.call_later(LAST_READ, self.transport.abort)
            case {"type": "websocket.http.response.body"}:
                self.handshake_complete = self.close_sent  # else uvicorn would log a refused handshake as an error
