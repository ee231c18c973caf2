"""An answer's view of its verifier: the link, its limits, the request in flight, refusals and deadlines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from edge_runtime.session.actions import Pin, Send
from edge_runtime.session.settled import Settled
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.speed.arms import Arm
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.protocol.wire import (
    ERR_BOUNDS,
    ERR_BUSY,
    ERR_GOING_AWAY,
    ERR_MALFORMED,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    FINISH_NONE,
    Cancel,
    Error,
    Generate,
    Open,
    Verdict,
    Verify,
    Welcome,
    pack_ids,
    pack_tree,
)

#: seconds until OPEN is sent again if the verifier names no time
RETRY_SECONDS = 1.0
SHORTEST_RETRY = 0.05


class Deadline(StrEnum):
    """An awaited event, the most important first. `Session.tick` acts when one's time has passed."""

    CONNECT = "connect"  #: the first link of an answer
    GIVE_UP = "give up"  #: the target's return, once offline writing has stopped
    RETRY = "retry"  #: the time that the verifier named when it refused a request
    REPLY = "reply"  #: the reply to a request
    RENEW = "renew"  #: any message at all, before another connection is made


class Refusal(StrEnum):
    """Consequence of a verifier's refusal. None loses text."""

    IGNORE = "ignore"  #: nothing: it concerns a cancelled request, or a link that ends after its replies
    REOPEN = "reopen"  #: it knows another text, or none: OPEN again
    RETRY = "retry"  #: OPEN again later
    FATAL = "fatal"  #: it would refuse again: this link's verifier is not asked any more
    FULL = "full"  #: its context is full


class Limits(NamedTuple):
    """Limits of the next tree: `nodes` and levels."""

    nodes: int
    depth: int


class StreamClock(StrEnum):
    """What is known so far of a stream's time per token, from its verdicts."""

    SILENT = "silent"  #: no token has come
    UNTIMED = "untimed"  #: tokens have come, without a time
    FIRST = "first"  #: the first token told its step's time
    RUNNING = "running"  #: a later one did too


@dataclass(frozen=True)
class InFlight:
    """A request whose reply is awaited. sent, due: when it was sent, and when its reply is overdue.

    `sent` of a running stream is when its last token came. Other fields: see `Settled`.
    """

    seq: int
    arm: Arm | None
    tree: TokenTree
    sent: float
    due: float
    after_open: bool
    scores: tuple[float, ...] = ()
    clock: StreamClock = StreamClock.SILENT


class VerifierState:
    """The present verifier of one answer. stream, session_id, sampling, constraint: as on the wire.

    context: tokens that its answers may hold. timer: of rounds; it outlives the answer. seq: of the last request.
    linked: there is a link. refused: this link's verifier permanently refused a request. complaint: why it refused the
    last request, in words for people; "" once it has answered. pinned: the arithmetic of the answer's verified text; ""
    without any, or if unknown. heard: when the link last delivered something.
    """

    def __init__(
        self,
        stream: int,
        session_id: bytes,
        sampling: Sampling,
        constraint: Constraint | None,
        context: int,
        patience: Patience,
        timer: RoundTimer,
    ) -> None:
        self._stream, self._session_id, self._sampling = stream, session_id, sampling
        self._constraint, self._patience, self._timer = constraint, patience, timer
        self._gaps = RoundTimer(timer.floor, timer.ceiling, timer.first)  # between streamed tokens
        self.context = context
        self.linked = self.refused = False
        self.complaint = ""
        self.in_flight: InFlight | None = None
        self.seq = 0
        self.fresh_open = False  # OPEN was sent and no request since
        self.max_nodes = 64
        self._tree_budget = MAX_NODES  # its present wish; it may prune larger trees
        self.pinned = ""
        self._offered = ""  # arithmetic of the link's verifier; "" if unknown
        self.connect_by: float | None = None  # the first link is waited for until then
        self.retry_at: float | None = None  # nothing is requested before
        self.heard = 0.0

    @property
    def can_ask(self) -> bool:
        """Return whether a request may be sent."""
        return self.linked and not self.refused and self.in_flight is None and self.retry_at is None

    @property
    def streams(self) -> bool:
        """Return whether the target streams: its next token is awaited."""
        return self.in_flight is not None and self.in_flight.arm is Arm.STREAM

    @property
    def wanted(self) -> list[Pin]:
        """Return the arithmetic that the link should look for."""
        return [Pin(self.pinned)] if self.pinned else []

    def limits(self, room: int) -> Limits:
        """Return the limits of the next tree, if the text has `room` levels."""
        return Limits(min(self.max_nodes, self._tree_budget), room)

    # --- the link ---

    def link_up(self, welcome: Welcome, now: float) -> bool:
        """Take a new link. Returns whether its verifier supports the answer's constraint.

        One that does not would ignore it, so it is not asked.
        """
        self._offered, self.linked, self.heard = welcome.arithmetic, True, now
        self.max_nodes = min(welcome.max_nodes, MAX_NODES)
        self._tree_budget = welcome.tree_budget or MAX_NODES
        self.context = welcome.max_context
        self.refused, self.complaint = False, ""
        if not (self._constraint and self._constraint.needs & ~welcome.constraints):
            return True
        self.connect_by = None
        self._refuse_for_good("this verifier does not support the answer's constraint; update it, or ask without one")
        return False

    def link_down(self) -> None:
        """Handle a lost link."""
        self.linked, self.in_flight, self.retry_at = False, None, None

    def pin(self) -> list[Pin]:
        """Pin the arithmetic, as the link's verifier has written some of the answer."""
        if self.pinned or not self._offered:
            return []
        self.pinned = self._offered
        return self.wanted

    # --- requests ---

    def forget_request(self) -> None:
        """Forget every request and wait."""
        self.in_flight = self.retry_at = self.connect_by = None

    def open(self, committed: list[int], rows_held: int) -> Send:
        """Return OPEN with everything committed; the drafter holds the first `rows_held` feature rows."""
        self.fresh_open = True
        held = min(rows_held, len(committed) - 1)
        ids = pack_ids(committed)
        return Send(Open(self._stream, self._session_id, self.seq, ids, held, self._sampling, self._constraint))

    def verify(self, arm: Arm | None, tree: TokenTree, base: int, now: float, scores: tuple[float, ...] = ()) -> Send:
        """Return VERIFY for `tree` below the first `base` tokens."""
        self._start(arm, tree, now, scores)
        tokens, parents = pack_tree(tree)
        return Send(Verify(self._stream, self.seq, base, tokens, parents))

    def generate(self, base: int, limit: int, now: float) -> Send:
        """Return GENERATE for at most `limit` tokens after the first `base`."""
        self._start(Arm.STREAM, TokenTree(), now)
        return Send(Generate(self._stream, self.seq, base, limit, True))

    def cancel(self) -> list[Send]:
        """Return CANCEL for a stream, which would continue otherwise."""
        return [Send(Cancel(self._stream))] if self.streams and self.linked else []

    def settle(self, verdict: Verdict, base: int, now: float) -> Settled | None:
        """Settle a verdict when `base` tokens are committed. None: it is stale, as its request was cancelled.

        A GENERATE stays in flight, as its next token is awaited.
        """
        request = self.in_flight
        if request is None or verdict.seq != request.seq or verdict.base_len != base:
            return None
        streams, engine = request.arm is Arm.STREAM, verdict.engine_us / 1e6
        same_step = request.clock in (StreamClock.FIRST, StreamClock.RUNNING) and not verdict.engine_us
        if not request.after_open and not same_step:
            (self._gaps if streams else self._timer).add(now - request.sent)
        self.in_flight = self._awaiting_more(request, engine > 0, now) if streams else None
        self.complaint = ""
        self._tree_budget = verdict.tree_budget or self._tree_budget
        path = [request.tree.tokens[node] for node in verdict.accepted if node < len(request.tree)]
        return Settled(
            request.arm, request.tree, request.scores, tuple(verdict.accepted), [*path, verdict.bonus],
            now - request.sent, engine, verdict.finish != FINISH_NONE,
            request.after_open, now >= request.due, same_step,
            request.clock is StreamClock.SILENT or (same_step and request.clock is StreamClock.FIRST),
        )  # fmt: skip

    def _awaiting_more(self, request: InFlight, timed: bool, now: float) -> InFlight:
        """Return the stream after one more token; `timed`: it carried its step's time."""
        if request.clock is StreamClock.SILENT:
            clock = StreamClock.FIRST if timed else StreamClock.UNTIMED
        else:
            clock = StreamClock.RUNNING if timed else request.clock
        return replace(request, sent=now, due=now + self._gaps.timeout(), after_open=False, clock=clock)

    def _start(self, arm: Arm | None, tree: TokenTree, now: float, scores: tuple[float, ...] = ()) -> None:
        self.seq += 1
        after_open, self.fresh_open = self.fresh_open, False
        wait = max(self._timer.timeout(), self._patience.open) if after_open else self._timer.timeout()
        self.in_flight = InFlight(self.seq, arm, tree, now, now + wait, after_open, scores)

    # --- refusals ---

    def refuse(self, error: Error, now: float) -> Refusal:
        """Handle an error: a refusal of the last request, or the verifier's end."""
        if error.code == ERR_GOING_AWAY and error.stream == -1:
            return Refusal.IGNORE  # requests in flight are still answered; then the link comes up elsewhere
        if error.code == ERR_UNKNOWN:
            return self.resync(now)
        if error.code == ERR_TOO_LONG:
            return Refusal.FULL
        if error.code in (ERR_MALFORMED, ERR_BOUNDS):
            self._refuse_for_good(error.text)
            return Refusal.FATAL
        advised = error.code in (ERR_BUSY, ERR_GOING_AWAY)
        wait = max(SHORTEST_RETRY, error.retry_after_ms / 1000) if advised else RETRY_SECONDS
        self.complaint, self.in_flight, self.retry_at = error.text, None, now + wait
        return Refusal.RETRY

    def resync(self, now: float) -> Refusal:
        """Handle a verifier that has another text, or none."""
        if self.in_flight is None:
            return Refusal.IGNORE  # the OPEN before was refused
        if not self.in_flight.after_open:
            return Refusal.REOPEN
        self.in_flight, self.retry_at = None, now + RETRY_SECONDS  # OPEN has just not helped
        return Refusal.RETRY

    def _refuse_for_good(self, why: str) -> None:
        self.refused, self.complaint, self.in_flight, self.retry_at = True, why, None, None

    # --- deadlines ---

    def deadlines(self, offline: bool, give_up_at: float | None) -> list[tuple[Deadline, float]]:
        """Return all deadlines, the most important first. offline: the reply is overdue already.

        give_up_at: end of the wait for the target's return.
        """
        moments = [
            (Deadline.CONNECT, self.connect_by),
            (Deadline.GIVE_UP, give_up_at),
            (Deadline.RETRY, self.retry_at),
        ]
        if self.in_flight:
            due = self.in_flight.due
            moments.append((Deadline.REPLY, None if offline else due))
            moments.append((Deadline.RENEW, max(self.heard, due) + self._patience.silence))
        return [(deadline, moment) for deadline, moment in moments if moment is not None]
