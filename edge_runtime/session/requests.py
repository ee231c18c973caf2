"""One answer's requests to the verifier: their numbers, the one under way, and when its reply is overdue."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.session.actions import Send
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.transcript import SessionStats
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Generate, Open, Verdict, Verify, pack_ids, pack_tree


@dataclass(frozen=True)
class Flight:
    """A request whose reply is awaited. sent, due: when it was sent, and when its reply is overdue.

    tree: None for a GENERATE. scores: log path probabilities of the tree's nodes. chain: the understudy drafted it.
    catching_up: it is the chain of provisional tokens. after_open: the reply may take longer, as the verifier may have
    to read the whole text first. streaming: of a GENERATE that brought a token already; `sent` is when the last one
    came. tells_times: a token of it told what its step took. measured: one behind its first token did.
    """

    seq: int
    tree: TokenTree | None
    sent: float
    due: float
    after_open: bool
    scores: tuple[float, ...] = ()
    catching_up: bool = False
    streaming: bool = False
    tells_times: bool = False
    measured: bool = False

    def same_step(self, verdict: Verdict) -> bool:
        """Whether a stream's `verdict` came of one step with the verdict before, which told its time."""
        return self.tells_times and not verdict.engine_us

    chain: bool = False


class Requests:
    """Numbers requests and learns how long replies take. stream, session_id, constraint: as on the wire.

    timer: of rounds; it outlives the answer.
    """

    def __init__(
        self,
        stream: int,
        session_id: bytes,
        sampling: Sampling,
        patience: Patience,
        timer: RoundTimer,
        stats: SessionStats,
        constraint: Constraint | None = None,
    ) -> None:
        self._stream, self._session_id, self._sampling = stream, session_id, sampling
        self._constraint = constraint
        self._patience, self._timer, self._stats = patience, timer, stats
        self._gaps = RoundTimer(timer.floor, timer.ceiling, timer.first)  # between streamed tokens
        self.flight: Flight | None = None
        self.seq = 0
        self.fresh_open = False  # an OPEN was sent and no request since

    def open(self, committed: list[int], rows_held: int) -> Send:
        """OPEN with everything committed. Whatever was under way is forgotten."""
        self.flight, self.fresh_open = None, True
        held = min(rows_held, len(committed) - 1)
        ids = pack_ids(committed)
        return Send(Open(self._stream, self._session_id, self.seq, ids, held, self._sampling, self._constraint))

    def verify(
        self,
        tree: TokenTree,
        base: int,
        now: float,
        scores: tuple[float, ...] = (),
        catching_up: bool = False,
        chain: bool = False,
    ) -> Send:
        """VERIFY `tree` below the first `base` tokens."""
        self._fly(tree, now, scores, catching_up, chain)
        tokens, parents = pack_tree(tree)
        return Send(Verify(self._stream, self.seq, base, tokens, parents))

    def generate(self, base: int, most: int, now: float) -> Send:
        """GENERATE at most `most` tokens behind the first `base`."""
        self._fly(None, now)
        return Send(Generate(self._stream, self.seq, base, most, True))

    def answered(self, flight: Flight, verdict: Verdict, now: float) -> None:
        """`verdict` on `flight` came. A GENERATE stays under way: its next token is awaited."""
        if not flight.after_open and not flight.same_step(verdict):
            (self._gaps if flight.tree is None else self._timer).add(now - flight.sent)
        self.flight = None
        if flight.tree is None:
            timed = verdict.engine_us > 0
            self.flight = Flight(
                flight.seq, None, now, now + self._gaps.timeout(), False, streaming=True,
                tells_times=flight.tells_times or timed, measured=flight.measured or (flight.streaming and timed),
            )  # fmt: skip

    def _fly(
        self,
        tree: TokenTree | None,
        now: float,
        scores: tuple[float, ...] = (),
        catching_up: bool = False,
        chain: bool = False,
    ) -> None:
        self.seq += 1
        self._stats.calls += 1
        after_open, self.fresh_open = self.fresh_open, False
        wait = max(self._timer.timeout(), self._patience.open) if after_open else self._timer.timeout()
        self.flight = Flight(self.seq, tree, now, now + wait, after_open, scores, catching_up, chain=chain)
