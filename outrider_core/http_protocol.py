"""uvicorn's HTTP protocol, with limits on sockets, slow requests, tiny chunks and unread replies."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, Protocol

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

#: seconds for reading the rest of a body that is not needed, and for a close
LAST_READ = 5.0
#: seconds that an idle connection is kept: longer than the pools of clients keep theirs (Go 90, aiohttp 15, httpx 5),
#: so that none of them sends a request just as it is closed here
KEEP_ALIVE = 100
#: uvicorn's log line about invalid HTTP has no address, and strangers may cause any number of them: they are counted
logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != "Invalid HTTP request received.")
#: seconds to wait if no socket can be accepted
ACCEPT_AGAIN = 0.1
#: bytes that one TLS socket may read at once; asyncio's own 256 KiB are taken before a handshake has begun
TLS_BUFFER = 1 << 16
#: chunks of one body that may have any size; later ones need CHUNK bytes on average: each takes the loop some 30 us
FREE_CHUNKS, CHUNK = 256, 256


class SocketBounds(Protocol):
    """Limits on the sockets of one server.

    Attributes:
        request_seconds: Time for the headers of a request, from the start of the connection, or from the first byte of
            a later request.
        unread_seconds: Time that a client may read nothing of a reply that is sent to it.
    """

    request_seconds: float
    unread_seconds: float

    def enter(self, protocol: HttpProtocol) -> bool:
        """Count a socket that has just been accepted. False: it must be cut, and was not counted."""

    def leave(self, address: str) -> None:
        """Remove a socket that is gone from the count."""

    def refused(self, reason: str) -> None:
        """Count a socket that was cut: tls_handshake, slow_request, unread, invalid_request."""


class SocketDeadline:
    """A timer that cuts a socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cut: Callable[[], None]) -> None:
        self._loop, self._cut = loop, cut
        self._timer: asyncio.TimerHandle | None = None
        self._kind = ""

    def keep(self, kind: str, seconds: float) -> None:
        """Cut in `seconds` if nothing changes; a running deadline of the same kind is kept."""
        if self._timer is None or self._kind != kind:
            self.lift()
            self._kind, self._timer = kind, self._loop.call_later(seconds, self._cut)

    def lift(self) -> None:
        """Cancel the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Connection(h11.Connection):
    """Limits the number of chunks by the size of the body."""

    _chunks = _bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK:
                raise h11.RemoteProtocolError(f"too many small chunks: send chunks of {CHUNK} bytes or more")
        return event


class HttpProtocol(H11Protocol):
    """Cuts sockets beyond the limits, and those that do not send a request or read a reply in time.

    A request's headers have `request_seconds`, see SocketBounds, and the next request KEEP_ALIVE to begin. The rest of
    a body after its reply has LAST_READ.

    Attributes:
        address: The client's.
        since: When the socket was made or its last reply ended, in seconds of the loop's clock.
    """

    def __init__(self, bounds: SocketBounds, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Connection(h11.SERVER)
        self._bounds, self.address, self.since = bounds, "", self.loop.time()
        self._entered = self._upgraded = False
        self._reading = SocketDeadline(self.loop, self._too_slow)
        self._writing = SocketDeadline(self.loop, self._not_read)

    @property
    def idle(self) -> bool:
        """Return whether no reply is pending."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def kept(self) -> bool:
        """Return whether it has had a reply, and the next request has not begun."""
        return self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def cut(self) -> None:
        """Close it at once, and remove it from the count."""
        self.leave()
        self.transport.abort()

    def enter(self, address: str) -> bool:
        """Count the socket, which comes from `address`. False: it is one too many, and must be cut."""
        self.address = address
        self._entered = self._bounds.enter(self)
        return self._entered

    def leave(self) -> None:
        """Remove the socket from the count."""
        if self._entered:
            self._entered = False
            self._bounds.leave(self.address)

    def no_tls(self) -> None:
        """Count a failed TLS handshake, and remove the socket from the count."""
        self._bounds.refused("tls_handshake")
        self.leave()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._entered or self.enter(self.client[0] if self.client else ""):
            self._watch()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Set the deadline for the client's next bytes."""
        if self._upgraded:
            self._reading.lift()
        elif self.kept:
            self._reading.keep("next", KEEP_ALIVE)
        elif self.conn.their_state is h11.IDLE:
            self._reading.keep("head", self._bounds.request_seconds)
        elif self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            self._reading.keep("rest of a body", LAST_READ)
        else:
            self._reading.lift()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not a request or a body, and close. After a reply has begun, only close."""
        fault = sys.exception()
        if fault is not None:
            fault.__traceback__ = None  # its frames hold it, and the socket's buffers
        self._bounds.refused("invalid_request")
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        status = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
        error = {"message": f"this is not HTTP: {fault}", "type": "invalid_request_error", "param": None}
        body = msgspec.json.encode({"error": {**error, "code": "invalid_request"}})
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _too_slow(self) -> None:
        if not self.kept:
            self._bounds.refused("slow_request")
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing.keep("reply", self._bounds.unread_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.lift()

    def _not_read(self) -> None:
        self._bounds.refused("unread")
        self.transport.abort()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True  # from here on the socket is the WebSocket protocol's
        self._writing.lift()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.lift()
        self._writing.lift()
        self.leave()
        super().connection_lost(None)  # after an error uvicorn would keep its timer, and TLS its buffers


class TlsServer:
    """Accepts sockets for TLS, and counts each before its handshake, with the interface of asyncio.Server.

    asyncio's own reports only sockets whose handshake has succeeded.

    Args:
        make: Returns the HTTP protocol of a socket.
        listener: The listening socket.
        seconds: Time for a handshake.
    """

    def __init__(
        self, make: Callable[[], HttpProtocol], listener: socket.socket, context: ssl.SSLContext, seconds: float
    ) -> None:
        self._make, self._context, self._seconds = make, context, seconds
        listener.setblocking(False)
        SSLProtocol.max_size = TLS_BUFFER
        self._handshakes = set[asyncio.Task[None]]()
        self._accepting = asyncio.create_task(self._accept(listener))

    def close(self) -> None:
        """Stop accepting. The listener stays open."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Wait until accepting has stopped."""
        await asyncio.wait({self._accepting})

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # it is gone already, or this process has no descriptor left
                await asyncio.sleep(ACCEPT_AGAIN)
                continue
            http = self._make()
            if not http.enter(address[0]):
                accepted.close()
                continue
            handshake = asyncio.create_task(self._shake(http, accepted))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake(self, http: HttpProtocol, accepted: socket.socket) -> None:
        times = {"ssl_handshake_timeout": self._seconds, "ssl_shutdown_timeout": LAST_READ}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: http, accepted, ssl=self._context, **times)
        except OSError as error:
            error.__traceback__ = None  # its frames hold it, and the socket's buffers
            http.no_tls()
