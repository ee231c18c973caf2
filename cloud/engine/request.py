"""Requests to the engine thread: OPEN, VERIFY, GENERATE and CLOSE, from arrival to last reply."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from cloud.engine.acceptance import Chances
from cloud.engine.features import PackedRows
from cloud.engine.stream_lookup import StreamLookup
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Close, Error, Generate, Open, ServerMessage, Verify

#: a reply: a message, or feature rows that the connection cuts into FEATURES
Reply = ServerMessage | PackedRows


class Status(Enum):
    """Stage of a request. Only the thread that holds the request writes it."""

    QUEUED = "queued"  # until the engine thread takes it
    WAITING = "waiting"  # its session takes part in steps until it is answered
    ENDED = "ended"  # answered, failed or dropped


@dataclass(eq=False)
class EngineRequest:
    """A request to the engine thread.

    session_id: the verifier's own id of the session. tokens: OPEN's ids; rules: of its constraint. tree: VERIFY's.
    account: name of the client; accounts share the engine evenly. request_id: of its HTTP request or handshake, for the
    log. send(reply, done) is called in the engine thread, with `done` set for the last reply. Any thread may set
    `cancelled`; a step that is already running still ends and is answered.

    is_drafted: a drafter proposes its trees, so their nodes count and feature rows are sent with each of them. top: for
    a GENERATE: report the chances of each token and of this many others; `chances` holds them while its verdict is
    passed to `send`. generated: tokens of the GENERATE so far. drafted, accepted: nodes verified for it so far, and
    those that the target drew too. lookup: predicts its text. token_by_token: without lookup from now on, because
    nothing could be drawn after a guess. unready: it has waited for its own prompt or mask, not for the engine alone.
    """

    session_id: bytes
    message: Open | Verify | Generate | Close
    send: Callable[[Reply, bool], None]
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree = field(default_factory=TokenTree)
    rules: Rules | None = None
    top: int | None = None
    account: str = ""
    request_id: str = ""
    is_drafted: bool = field(init=False)
    status: Status = Status.QUEUED
    cancelled: bool = False
    waiting_since: float = field(default_factory=time.perf_counter)
    chances: Chances = ()
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    lookup: StreamLookup | None = None
    token_by_token: bool = False
    unready: bool = False

    def __post_init__(self) -> None:
        self.is_drafted = isinstance(self.message, Verify)

    def answer(self, reply: Reply) -> None:
        """Send the last reply."""
        self.end()
        self.send(reply, True)

    def end(self) -> None:
        """End the request and free its memory, as a connection may keep it for long."""
        self.status, self.lookup = Status.ENDED, None

    def fail(self, code: int, text: str, retry_after_ms: int = 0) -> None:
        """Answer with an ERROR."""
        self.answer(Error(code, text, self.message.stream, retry_after_ms))
