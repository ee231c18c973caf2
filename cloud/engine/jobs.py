"""What the engine thread is asked: a job per request, and the jobs that wait for one session."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cloud.engine.acceptance import Chances
from cloud.engine.features import FeatureRows
from cloud.engine.sessions import Session
from cloud.engine.stream_lookup import StreamLookup
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Close, Error, Generate, Open, ServerMessage, Verify

#: what a job answers: a message, or feature rows for the connection to cut into FEATURES
Reply = ServerMessage | FeatureRows


@dataclass(eq=False)
class Job:
    """One request to the engine thread.

    tokens: OPEN's ids; rules: of its constraint. tree: VERIFY's. account: name of who asks; accounts share the engine
    evenly. request_id: of the HTTP request or handshake that it came by, for the log. reply(message, done) is called in
    the engine thread, with `done` set for the last message. `cancelled` may be set by any thread; a
    step that is already running still ends and is answered. `admitted`: the engine thread has taken it from its queue.

    top: for a GENERATE: tell the chances of each token and of so many beside it; `chances` has them while its verdict
    is given to `reply`. drafted, accepted: nodes verified for it so far, and those that were the target's own.
    """

    session: bytes
    request: Open | Verify | Generate | Close
    reply: Callable[[Reply, bool], None]
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree = field(default_factory=TokenTree)
    rules: Rules | None = None
    top: int | None = None
    chances: Chances = ()
    drafted: int = 0
    accepted: int = 0
    account: str = ""
    request_id: str = ""
    cancelled: bool = False
    admitted: bool = False
    waiting_since: float = field(default_factory=time.perf_counter)

    def fail(self, code: int, text: str, retry_after_ms: int = 0) -> None:
        """Answer with an ERROR."""
        self.reply(Error(code, text, self.request.stream, retry_after_ms), True)


@dataclass(eq=False)
class PendingSession:
    """A session with work for the engine: an OPEN whose feature rows are due, a VERIFY or GENERATE, or both."""

    session: Session
    account: str
    opening: Job | None = None
    round: Job | None = None
    generated: int = 0  # tokens of the GENERATE so far
    lookup: StreamLookup | None = None  # what its text foretells
    token_by_token: bool = False  # something could not be drawn behind what was foretold

    @property
    def top(self) -> int | None:
        """See Job."""
        return self.round.top if self.round else None

    @property
    def waiting_since(self) -> float:
        """When the older of its requests came."""
        return min(job.waiting_since for job in (self.opening, self.round) if job is not None)
