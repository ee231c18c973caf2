"""uvicorn's WebSocket protocol, with limits on slow messages, unread replies and pings."""

from __future__ import annotations

import time
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from cloud.server.close_codes import CloseCode
from cloud.server.limits import (
    CONTROLS_PER_SECOND,
    MAX_FRAGMENTS,
    WAITING,
    Account,
    Bucket,
    Gate,
    RefusalReason,
)
from outrider_core.http_protocol import LAST_READ, SocketDeadline


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
        """Set the bytes held now. False: too much for the account, and more than before."""
        more, self.bytes = amount - self.bytes, amount
        if self._account is not None:
            self._account.waiting += more
            return more <= 0 or not self._account.overfull
        return True


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Cuts sockets whose client does not read, does not finish its messages, or floods outside of backpressure."""

    def __init__(self, gate: Gate, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate, self._address = gate, ""
        self._controls = Bucket(CONTROLS_PER_SECOND, time.monotonic)
        self._message = SocketDeadline(self.loop, self._unfinished)
        self._closing = SocketDeadline(self.loop, lambda: self.transport.abort())
        self._fragments = 0
        self._waiting = Waiting()
        self.app_state = {**self.app_state, WAITING: self._waiting}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._message.lift()
        self._closing.lift()
        self._waiting.hold(0)
        self._gate.leave(self._address)  # the HttpProtocol has counted it
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.disconnected:
            return
        super().data_received(data)
        held = self._fragments + len(self.conn.reader.buffer)
        if held:
            self._message.keep("message", self._gate.message_seconds)
        else:
            self._message.lift()
        if not self._waiting.hold(held):
            self._fail(RefusalReason.WAITING, "too many unfinished messages of this token")

    def handle_parser_exception(self) -> None:
        """Send the close frame, disconnect the app, and discard what the client is still sending.

        If the socket were closed at once, the client's next bytes would reset the connection, and it might never read
        why.
        """
        self.frames, self._fragments = [], 0
        if self.disconnected:
            return
        self.disconnected = True
        if not self.close_sent:
            closing = self.conn.close_sent
            assert closing is not None
            self.queue.put_nowait({"type": "websocket.disconnect", "code": closing.code, "reason": closing.reason})
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.close_timer is not None:
            self.close_timer.cancel()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.close_timer = self.loop.call_later(LAST_READ, self.transport.abort)
        else:  # TLS cannot; it is reset by what comes next
            self.close_timer = None
            self.transport.close()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # uvicorn would log it, and fail if the client's close frame came with it
                self._refuse(CloseCode.INVALID, "not valid UTF-8")
                return
        super().send_receive_event_to_app()
        self._fragments = 0
        self._message.lift()

    def _unfinished(self) -> None:
        if self.read_paused:  # this side has paused reading
            self._message.lift()
            self._message.keep("message", self._gate.message_seconds)
        else:
            self._fail(RefusalReason.SLOW_MESSAGE, "a message was not finished in time")

    def _fail(self, reason: RefusalReason, text: str) -> None:
        """Close the socket and drop what it holds, so that the account's other sockets are not affected."""
        self.frames, self._fragments = [], 0
        if not self.close_sent and not self.transport.is_closing():
            self._refuse(CloseCode.POLICY, text)
        self._waiting.hold(len(self.conn.reader.buffer))
        self._gate.refused(reason)
        self._closing.keep("close", LAST_READ)  # else the close would wait for a client to read

    def _refuse(self, code: CloseCode, text: str) -> None:
        self.conn.fail(code, text)
        self.handle_parser_exception()

    def _flooded(self) -> bool:
        """Count a ping or pong. Too many cut the socket, because a close would wait for the client to read.

        Returns whether nothing can be answered any more.
        """
        self._controls.take(1)
        if self._controls.wait() > 0:
            self._gate.refused(RefusalReason.FLOOD)
            self.transport.abort()
        return self.disconnected or self.transport.is_closing()

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
            self._refuse(CloseCode.TOO_LARGE, "too many fragments")

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    async def send(self, message: Any) -> None:
        await super().send(message)
        match cast(dict[str, Any], message):
            case {"type": "websocket.close"}:
                self._closing.keep("close", LAST_READ)
            case {"type": "websocket.http.response.body"}:
                self.handshake_complete = self.close_sent  # else uvicorn would log a refused handshake as an error
