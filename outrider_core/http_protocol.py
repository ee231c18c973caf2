"""uvicorn's HTTP protocol with bounds that it lacks: on sockets, slow requests and what is not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: seconds that the rest of a body may take which nobody wants any more, and in which a close is awaited
LAST_READ = 5.0


class SocketBounds(Protocol):
    """What sockets of one server may do.

    Attributes:
        request_seconds: What a client may take for the headers of its next request.
        unread_seconds: For how long it may read nothing of a reply that is sent to it.
    """

    request_seconds: float
    unread_seconds: float

    def enter(self, protocol: HttpProtocol) -> bool:
        """Count a socket that has just been accepted. False: it is to be cut, and was not counted."""

    def leave(self, address: str) -> None:
        """Forget a counted socket that is gone."""

    def refused(self, reason: str) -> None:
        """Count one that was cut: slow_request, unread."""


class SocketDeadline:
    """A timer that cuts a socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cut: Callable[[], None]) -> None:
        self._loop, self._cut = loop, cut
        self._timer: asyncio.TimerHandle | None = None
        self._kind = ""

    def keep(self, kind: str, seconds: float) -> None:
        """Cut in `seconds` if nothing changes; a deadline of the same kind that runs already stays as it is."""
        if self._timer is None or self._kind != kind:
            self.lift()
            self._kind, self._timer = kind, self._loop.call_later(seconds, self._cut)

    def lift(self) -> None:
        """Forget it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpProtocol(H11Protocol):
    """Cuts sockets beyond the bounds, and those that do not send a request or read a reply in time.

    A request's headers have `request_seconds` from the connection's begin, or from the end of the last reply. What
    is left of a body when its reply has been sent has LAST_READ.

    Attributes:
        address: The client's.
        since: When the socket was made or its last reply ended, in seconds of the loop's clock.
    """

    def __init__(self, bounds: SocketBounds, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bounds, self.address, self.since = bounds, "", self.loop.time()
        self._entered = self._upgraded = False
        self._reading = SocketDeadline(self.loop, self._too_slow)
        self._writing = SocketDeadline(self.loop, self._not_read)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for a reply on it."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._entered = self._bounds.enter(self)
        if self._entered:
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
        """Set the deadline for what the client has to send now."""
        if self._upgraded:
            self._reading.lift()
        elif self.conn.their_state is h11.IDLE:
            self._reading.keep("head", self._bounds.request_seconds)
        elif self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            self._reading.keep("rest of a body", LAST_READ)
        else:
            self._reading.lift()

    def _too_slow(self) -> None:
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
        if self._entered:
            self._bounds.leave(self.address)
        super().connection_lost(exc)
