"""A device's connection without I/O: frames in, frames out, the engine in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from msgspec import structs

from cloud.engine.features import PackedRows
from cloud.engine.request import EngineRequest, Reply, Status
from cloud.server.close_codes import CloseCode
from cloud.server.limits import BYTES_PER_TOKEN, Account
from cloud.server.outbox import Outbox
from cloud.server.service import Verifier
from cloud.server.stream import Stream
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.wire import (
    ERR_BOUNDS,
    ERR_BUSY,
    ERR_GOING_AWAY,
    ERR_MALFORMED,
    ERR_MISMATCH,
    ERR_ORDER,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    Close,
    Error,
    Generate,
    Hello,
    Open,
    ServerMessage,
    Verdict,
    Verify,
    WireError,
    decode_client,
    other_arithmetic,
    unpack_ids,
    unpack_tree,
)

MAX_STREAMS = 16
#: malformed frames that one connection may send
MAX_MALFORMED = 100
#: nothing is read while more requests than this wait for the engine thread to admit them
MAX_BACKLOG = 2 * MAX_STREAMS

#: seconds after which a device may try the same verifier again
RESTART_SECONDS = 1.0
BUSY_SECONDS = 1.0


class Connection:
    """Checks a device's messages, passes them to the engine and queues the answers in `outbox`.

    account: owner of the connection; its limits hold for all its connections together. streams_by_session: of all
    connections of this process; a session OPENed here leaves the connection it was on. post(function, *args) runs a
    function in the thread that calls `receive` (an event loop's call_soon_threadsafe). wake() is called when `outbox`
    or `closing` has something new.
    """

    def __init__(
        self,
        verifier: Verifier,
        account: Account,
        streams_by_session: dict[bytes, Stream],
        post: Callable[..., Any],
        wake: Callable[[], None],
    ) -> None:
        self.outbox = Outbox()
        self.closing: tuple[CloseCode, str] | None = None  # close code and reason, used once the outbox is empty
        self.greeted = False
        self._drafts = True  # the device has the drafter, and reads feature rows
        self.request_id = ""  # of the handshake, for the log
        self.account = account
        self._verifier, self._post, self._wake = verifier, post, wake
        self._streams: dict[int, Stream] = {}
        self._streams_by_session = streams_by_session
        self._malformed = 0
        self._backlog: deque[EngineRequest] = deque()

    @property
    def backlogged(self) -> bool:
        """Return whether the device sends faster than the engine admits; bounds what one connection can queue."""
        while self._backlog and self._backlog[0].status is not Status.QUEUED:
            self._backlog.popleft()
        return len(self._backlog) > MAX_BACKLOG

    def receive(self, frame: bytes) -> None:
        """Handle one frame, which may hold any bytes."""
        try:
            self._handle(decode_client(frame))
        except WireError as error:
            self._malformed += 1
            self._error(ERR_MALFORMED, str(error))
            if self._malformed >= MAX_MALFORMED:
                self.close(CloseCode.POLICY, "too many malformed frames")

    def close(self, code: CloseCode, reason: str) -> None:
        """Close the socket once the outbox is empty."""
        self.closing = (code, reason)
        self._wake()

    def going_away(self) -> None:
        """Tell the device that the verifier is shutting down. Requests in progress are still answered."""
        if self.greeted:
            self._error(ERR_GOING_AWAY, "the verifier is shutting down; OPEN elsewhere", retry_after=RESTART_SECONDS)

    def lost(self) -> None:
        """Cancel the requests of a closed socket. Session records stay, to be resumed."""
        for stream in list(self._streams.values()):
            self._unbind(stream)

    def _handle(self, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._hello(message)
        elif not self.greeted:
            self._error(ERR_ORDER, "the first message must be HELLO")
            self.close(CloseCode.POLICY, "no HELLO")
        elif isinstance(message, Open):
            self._open(message)
        else:
            stream = self._streams.get(message.stream)
            if stream is None:
                self._unknown(message.stream)
            elif isinstance(message, Verify | Generate):
                self._round(stream, message)
            elif isinstance(message, Cancel):
                if stream.round is not None:
                    stream.round.cancelled, stream.round = True, None
            elif isinstance(message, Close):
                self._unbind(stream)
                self._submit(EngineRequest(stream.session_id, message, lambda reply, done: None))

    def _hello(self, hello: Hello) -> None:
        verifier = self._verifier
        if self.greeted:
            self._error(ERR_ORDER, "HELLO came twice")
            return
        self._drafts = bool(hello.drafter_hash)
        mine = (PROTOCOL_VERSION, verifier.target_hash, verifier.drafter_hash if self._drafts else "")
        yours = (hello.protocol, hello.target_hash, hello.drafter_hash)
        if mine != yours:
            names = ("protocol", "target", "drafter")
            differ = [
                f"{name} is {your!r}, here {my!r}"
                for name, my, your in zip(names, mine, yours, strict=True)
                if my != your
            ]
            self._error(
                ERR_MISMATCH, f"{'; '.join(differ)}; use a bundle made for this verifier, or export this one again"
            )
            self.close(CloseCode.MISMATCH, "protocol, target or drafter differ")
            return
        if hello.arithmetic not in ("", verifier.arithmetic):
            self._error(ERR_MISMATCH, other_arithmetic(hello.arithmetic, verifier.arithmetic))
            self.close(CloseCode.MISMATCH, "the arithmetic differs")
            return
        self.greeted = True
        self._send(verifier.welcome())

    def _open(self, message: Open) -> None:
        verifier, number = self._verifier, message.stream
        count = len(message.tokens) // 4
        if not count:
            self._error(ERR_BOUNDS, "OPEN needs at least one token", number)
        elif count > verifier.max_context:
            self._error(ERR_TOO_LONG, f"{count} tokens; the context holds {verifier.max_context}", number)
        elif number not in self._streams and len(self._streams) >= MAX_STREAMS:
            self._error(ERR_BUSY, f"{MAX_STREAMS} streams are open on this connection: CLOSE one", number, BUSY_SECONDS)
        elif not self._draining(number):
            session_id = self.account.scoped(message.session)
            before = {self._streams.get(number), self._streams_by_session.get(session_id)} - {None}
            limit = self.account.limits.sessions
            if self.account.streams - len(before) >= limit:
                self._error(ERR_BUSY, f"this token's {limit} sessions are open: CLOSE one", number, BUSY_SECONDS)
                return
            constraint = message.constraint
            if self._limited(number, prefill=count + (len(constraint.schema) // BYTES_PER_TOKEN if constraint else 0)):
                return
            tokens = unpack_ids(message.tokens)  # takes time, so it is charged first
            text = verifier.refusal(message.sampling)
            if constraint and not text:
                text = verifier.constraints.check(constraint, count)
            if max(tokens) >= verifier.vocab_size:
                text = f"token {max(tokens)} is outside the vocabulary of {verifier.vocab_size}"
            if text:
                self._error(ERR_BOUNDS, text, number)
                return
            for stream in before:
                if stream is not None:
                    stream.leave(stream)
            stream = Stream(number, session_id, self._unbind)
            self._streams[number] = self._streams_by_session[session_id] = stream
            self.account.streams += 1
            stream.opening = request = self._request(stream, message, tokens=tokens)
            if constraint is None:
                self._submit(request)
                return
            stream.held.append(request)
            self._backlog.append(request)
            rules = verifier.constraints.prepare(self.account.name, constraint, tokens, lambda: request.cancelled)
            rules.add_done_callback(lambda future: self._post(partial(self._ready, stream, future)))

    def _ready(self, stream: Stream, rules: Future[Rules]) -> None:
        """Continue a stream whose constraint is ready, or cannot be obeyed."""
        held, stream.held = stream.held, []
        failure = CancelledError() if rules.cancelled() else rules.exception()
        if failure or self._streams.get(stream.number) is not stream:
            for request in held:
                request.end()  # the engine thread never gets them
            given_up = isinstance(failure, CancelledError)
            if failure and not given_up and self._streams.get(stream.number) is stream:
                asked = stream.round is not None
                self._unbind(stream)
                self._error(ERR_BOUNDS, str(failure), stream.number)
                if asked:
                    self._unknown(stream.number)
            return
        held[0].rules = rules.result()
        for request in held:
            self._verifier.submit(request)

    def _round(self, stream: Stream, message: Verify | Generate) -> None:
        verifier, number = self._verifier, stream.number
        if stream.round is not None:
            under_way = stream.round.message
            if type(under_way) is type(message) and under_way.seq == message.seq:  # type: ignore[union-attr]
                return  # an impatient device sent it again; the reply to the first one will come
            self._error(ERR_ORDER, f"seq {message.seq} came while another is under way; CANCEL that first", number)
            return
        if self._draining(number):
            return
        if isinstance(message, Generate):
            if not self._limited(number, verifies=1):
                stream.round = self._request(stream, message)
                self._submit(stream.round, stream)
            return
        tree = unpack_tree(message.tokens, message.parents)
        depth = max(tree.depths, default=0)
        if len(tree) > verifier.max_nodes:
            self._error(ERR_BOUNDS, f"the tree has {len(tree)} nodes; at most {verifier.max_nodes} are allowed", number)
        elif max(tree.tokens, default=0) >= verifier.vocab_size:
            self._error(
                ERR_BOUNDS, f"token {max(tree.tokens)} is outside the vocabulary of {verifier.vocab_size}", number
            )
        elif message.base_len + depth > verifier.max_context:
            self._error(
                ERR_TOO_LONG,
                f"{message.base_len} tokens and {depth} levels; the context holds {verifier.max_context}",
                number,
            )
        elif not self._limited(number, verifies=1, nodes=len(tree)):
            stream.round = self._request(stream, message, tree=tree)
            self._submit(stream.round, stream)

    def _unknown(self, number: int) -> None:
        self._error(ERR_UNKNOWN, f"no stream {number} on this connection: OPEN first", number)

    def _draining(self, number: int) -> bool:
        """Refuse new work while the verifier shuts down."""
        if self._verifier.draining:
            self._error(ERR_GOING_AWAY, "the verifier is shutting down; OPEN elsewhere", number, RESTART_SECONDS)
        return self._verifier.draining

    def _limited(self, number: int, **amounts: float) -> bool:
        """Charge the account; refuse the request if it is over its limits."""
        wait = self.account.charge(**amounts)
        if wait:
            self._error(ERR_BUSY, f"over this token's limit of {' or '.join(amounts)} per second", number, wait)
        return wait > 0

    def _request(self, stream: Stream, message: Open | Verify | Generate, **content: Any) -> EngineRequest:
        """Make a request whose replies return to this thread."""

        def send(reply: Reply, done: bool) -> None:
            self._post(partial(self._deliver, stream, request, reply, done))

        account = self.account.name
        request = EngineRequest(
            stream.session_id, message, send, account=account, request_id=self.request_id, **content
        )
        return request

    def _submit(self, request: EngineRequest, stream: Stream | None = None) -> None:
        """Pass a request to the engine, after those that `stream` holds."""
        self._backlog.append(request)
        if stream and stream.held:
            stream.held.append(request)
        else:
            self._verifier.submit(request)

    def _deliver(self, stream: Stream, request: EngineRequest, reply: Reply, done: bool) -> None:
        if done and stream.opening is request:
            stream.opening = None
        if done and stream.round is request:
            stream.round = None
        if isinstance(request.message, Generate) and isinstance(reply, Verdict):
            self.account.spend(verifies=1)
        if self._streams.get(stream.number) is not stream:
            return  # closed, moved away or opened anew meanwhile
        if isinstance(reply, PackedRows):
            if self._drafts:
                self.outbox.put_features(stream.number, reply)
        elif isinstance(reply, Verdict) and not self._drafts:
            self._send(structs.replace(reply, rows=b""))
        else:
            self._send(reply)
        self._wake()

    def _unbind(self, stream: Stream) -> None:
        stream.cancel()
        self.outbox.forget_features(stream.number)
        if self._streams.get(stream.number) is stream:
            del self._streams[stream.number]
            self.account.streams -= 1
        if self._streams_by_session.get(stream.session_id) is stream:
            del self._streams_by_session[stream.session_id]

    def _error(self, code: int, text: str, stream: int = -1, retry_after: float = 0.0) -> None:
        self._send(Error(code, text[:512], stream, min(int(1000 * retry_after), 2**31 - 1)))

    def _send(self, message: ServerMessage) -> None:
        if isinstance(message, Error):
            self._verifier.metrics.errors.labels(str(message.code)).inc()
        self.outbox.put(message)
        self._wake()
