"""uvicorn's protocols with bounds that it lacks: on sockets, slow requests and messages, what is not read, pings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from cloud.server.close_codes import CloseCode
from cloud.server.limits import (
    CONTROLS_PER_SECOND,
    LAST_READ,
    MAX_FRAGMENTS,
    UNREAD,
    WAITING,
    Account,
    Bucket,
    Gate,
    Refusal,
)


class Deadline:
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
    """Cuts sockets beyond the gate's bounds, and those that do not send a request or read a reply in time.

    A request's headers have `Gate.request_seconds` from the connection's begin, or from the end of the last reply. What
    is left of a body when its reply has been sent has LAST_READ.
    """

    def __init__(self, gate: Gate, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate, self._address = gate, ""
        self._entered = self._upgraded = False
        self._reading = Deadline(self.loop, self._too_slow)
        self._writing = Deadline(self.loop, self._not_read)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._entered = self._gate.enter(self._address)
        if self._entered:
            self._watch()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Set the deadline for what the client has to send now."""
        if self._upgraded:
            self._reading.lift()
        elif self.conn.their_state is h11.IDLE:
            self._reading.keep("head", self._gate.request_seconds)
        elif self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            self._reading.keep("rest of a body", LAST_READ)
        else:
            self._reading.lift()

    def _too_slow(self) -> None:
        self._gate.refused(Refusal.SLOW_REQUEST)
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing.keep("reply", UNREAD)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.lift()

    def _not_read(self) -> None:
        self._gate.refused(Refusal.UNREAD)
        self.transport.abort()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True  # from here on the socket is the WebSocketProtocol's
        self._writing.lift()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.lift()
        self._writing.lift()
        if self._entered:
            self._gate.leave(self._address)
        super().connection_lost(exc)


class Waiting:
    """Bytes that one socket holds of an unfinished message, counted to an account once it is known."""

    def __init__(self) -> None:
        self._account: Account | None = None
        self.bytes = 0

    def belongs_to(self, account: Account | None) -> None:
        """Count it to this account from here on; None: to none, as the socket is gone."""
        if self._account is not None:
            self._account.waiting -= self.bytes
        if account is not None:
            account.waiting += self.bytes
        self._account = account

    def hold(self, amount: int) -> bool:
        """What is held now. False: too much for the account, where there is more than before."""
        more, self.bytes = amount - self.bytes, amount
        if self._account is not None:
            self._account.waiting += more
            return more <= 0 or not self._account.overfull
        return True


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Cuts sockets whose client does not read, does not finish its messages, or floods outside of any backpressure."""

    def __init__(self, gate: Gate, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate, self._address = gate, ""
        self._controls = Bucket(CONTROLS_PER_SECOND, time.monotonic)
        self._message = Deadline(self.loop, self._unfinished)
        self._fragments = 0
        self._waiting = Waiting()
        self.app_state = {**self.app_state, WAITING: self._waiting}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._message.lift()
        self._waiting.hold(0)
        self._gate.leave(self._address)  # the HttpProtocol has entered it
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        held = self._fragments + len(self.conn.reader.buffer)
        if held:
            self._message.keep("message", self._gate.message_seconds)
        else:
            self._message.lift()
        if not self._waiting.hold(held):
            self._fail(Refusal.WAITING, "too many unfinished messages of this token")

    def send_receive_event_to_app(self) -> None:
        super().send_receive_event_to_app()
        self._fragments = 0
        self._message.lift()

    def _unfinished(self) -> None:
        if self.read_paused:  # it is this side that reads no further
            self._message.lift()
            self._message.keep("message", self._gate.message_seconds)
        else:
            self._fail(Refusal.SLOW_MESSAGE, "a message was not finished in time")

    def _fail(self, reason: Refusal, text: str) -> None:
        """Close the socket and forget what it holds, so that the account's other sockets do not suffer for it."""
        self.frames, self._fragments = [], 0
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(CloseCode.POLICY, text)  # from here on what comes is thrown away
            self.handle_parser_exception()
        self._waiting.hold(len(self.conn.reader.buffer))
        self._gate.refused(reason)
        self.loop.call_later(LAST_READ, self.transport.abort)  # else the close would wait for a client to read

    def _flooded(self) -> bool:
        """Count a ping or pong. Too many cut the socket, because a close would wait for the client to read."""
        self._controls.take(1)
        if self._controls.wait() > 0:
            self._gate.refused(Refusal.FLOOD)
            self.transport.abort()
        return self.transport.is_closing()

    def handle_ping(self) -> None:
        if not self._flooded():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if not self._flooded():
            super().handle_pong(event)

    def handle_text(self, event: Frame) -> None:
        self._fragments = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._fragments = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            self._fragments += len(event.data)
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
