"""What the device has measured of drafter, link and target, and what follows: tree size, when to stop, which mode.

A round of tree drafting commits 1 + (sum of the sent nodes' acceptance probabilities) tokens and takes
exposed drafting + trip + step(nodes). A stream commits a token per step(0). Everything below maximises or compares
tokens per second by these two lines. Seconds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_runtime.policy import Mode
from outrider_core.protocol.costs import CostCurve, unpack_costs
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Welcome

#: weight of the newest observation; a token of a stream says less than a round, a tree drafted beside one stands for
#: the rounds between it and the last
SMOOTHING, TOKEN_SMOOTHING, COMPARED_SMOOTHING = 0.2, 0.1, 0.4
#: observations that a depth's calibration begins with, at "as predicted"; older ones fade
PRIOR, FADING = 4.0, 0.99
#: levels that are calibrated apart; deeper ones count as the last
DEPTHS = 12
#: another mode must promise so much more ...
MARGIN = 1.05
#: ... so many times in a row, beside trees; beside a stream, where a token that was held up is followed by a burst
TIMES, STREAM_TIMES = 2, 8
#: tokens of a stream that is tried, as what it brings is only guessed from the verifier's curve; a guess of less than
#: this share of what trees bring is believed
TRIAL, WORTH_A_TRIAL = 8, 0.5
#: share of the time that trials may cost; after each, half as much, so many times
TRYING, HALVINGS = 0.03, 5
#: bounds of what a drafting step must promise, in accepted tokens
LEAST_GAIN, MOST_GAIN = 0.01, 0.6
#: of a tree, before one was drafted
SOME_NODES = 16.0
#: a tree is drafted with so many times the nodes that were worth sending of those before it, and at least so many
SPARE, LEAST_NODES = 2, 16
#: tokens of a stream between trees drafted beside it; where trees bring less than half of what it does
COMPARE_EVERY, COMPARE_RARELY = 8, 64
#: share of a stream's time that drafting these trees may take, but for an answer's first streamed tokens: what is known
#: then is of other answers
COMPARING, SOON = 0.02, 32
#: share of a round that drafting must be for drafting ahead: it costs energy, and spares a third of it at most
AHEAD_SHARE = 0.2


def _blend(old: float | None, new: float, weight: float = SMOOTHING) -> float:
    return new if old is None else old + weight * (new - old)


def _follow(own: float | None, now: float, other: float | None) -> tuple[float, float | None]:
    """(load of one kind of step, where it is `now`; that of the other kind, which rises and falls with it).

    Each keeps a level of its own: where the curve is wrong for one kind, the other must not be judged by it.
    """
    new = _blend(own, now)
    return new, other if own is None or other is None else other * new / own


@dataclass
class Pace:
    """Smoothed measurements; they outlive answers."""

    curve: CostCurve | None = None  # the verifier's, as WELCOME told; None: it takes a second, see `load`
    load: float | None = None  # its steps of trees take so many times as long as the curve says
    token_load: float | None = None  # and those of single tokens
    trip: float | None = None  # a round without the verifier's engine and queue
    queue: float = 0.0
    exposed: float = 0.0  # drafting between a verdict and the next VERIFY
    drafter_step: float | None = None
    whole: float | None = None  # drafting a tree of which nothing was there
    gap: float | None = None  # between tokens of a stream
    gaps: int = 0  # of which `gap` is the mean
    late: bool = False  # tokens arrive that an outage held back
    compared: float = 0.0  # drafting a tree for comparison
    tau: float = 2.0  # tokens of a tree round
    nodes: float | None = None  # of a tree
    predicted: list[float] = field(default_factory=lambda: [PRIOR] * (DEPTHS + 1))  # accepted nodes, by depth
    accepted: list[float] = field(default_factory=lambda: [PRIOR] * (DEPTHS + 1))

    # --- measurements ---

    def linked(self, welcome: Welcome, trip: float) -> None:
        """A handshake took `trip`. Another verifier has other costs; what was measured of the same one stays."""
        curve, self.trip = unpack_costs(welcome.costs), trip
        if curve is None or curve != self.curve:
            self.curve, self.load, self.token_load = curve, None, None
            self.gap, self.gaps = None, 0

    def drafted(self, seconds: float, steps: int, whole: bool) -> None:
        """whole: nothing of the tree was there before, and no prompt had to be read."""
        if steps:
            self.drafter_step = _blend(self.drafter_step, seconds / steps)
        if whole:
            self.whole = _blend(self.whole, seconds)

    def verified(
        self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], wait: float, engine: float, queue: float
    ) -> None:
        """A tree's verdict came after `wait`: `path` was accepted; engine, queue: the verifier's own part of it."""
        self._stepped(1 + len(tree), engine)
        self.trip = _blend(self.trip, max(0.0, wait - engine - queue))
        self.queue = _blend(self.queue, queue)
        self._brought(tree, scores, path)

    def streamed(self, gap: float, engine: float, overdue: bool) -> None:
        """A streamed token came `gap` after the one before it. An outage, and what it held back, say nothing."""
        self._stepped(1, engine)
        self.late = overdue or (self.late and gap < engine / 2)
        if not self.late:
            self.gaps += 1
            self.gap = _blend(self.gap, gap, max(TOKEN_SMOOTHING, 1 / self.gaps))

    def foreseen(self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], seconds: float) -> None:
        """Of a tree drafted in `seconds` beside a stream, for comparison, `path` came true."""
        self._brought(tree, scores, path, COMPARED_SMOOTHING)
        self.compared = _blend(self.compared, seconds)

    def _brought(
        self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], weight: float = SMOOTHING
    ) -> None:
        """Learn from what came of a tree. tau is what its nodes promise, calibrated: that varies less than luck."""
        self.nodes = _blend(self.nodes, len(tree), weight)
        if len(scores) != len(tree) or not scores:
            self.tau = _blend(self.tau, 1 + len(path), weight)
            return
        for depth in range(1, DEPTHS + 1):
            self.predicted[depth] = PRIOR + FADING * (self.predicted[depth] - PRIOR)
            self.accepted[depth] = PRIOR + FADING * (self.accepted[depth] - PRIOR)
        for depth, score in zip(tree.depths, scores, strict=True):
            self.predicted[min(depth, DEPTHS)] += float(np.exp(score))
        for depth in range(1, len(path) + 1):
            self.accepted[min(depth, DEPTHS)] += 1
        self.tau = _blend(self.tau, float(self._expected(tree, scores)[-1]), weight)

    def _expected(self, tree: TokenTree, scores: Sequence[float]) -> NDArray[np.float64]:
        """Tokens that the first 1, 2, ... nodes of `tree` promise, as far as promises were kept so far."""
        ratio = np.minimum(4.0, np.array(self.accepted) / np.array(self.predicted))
        depths = np.minimum(np.array(tree.depths), DEPTHS)
        tokens: NDArray[np.float64] = 1 + np.cumsum(np.minimum(1.0, np.exp(scores) * ratio[depths]))
        return tokens

    def waited(self, exposed: float) -> None:
        self.exposed = _blend(self.exposed, exposed)

    def _stepped(self, tokens: int, engine: float) -> None:
        if engine <= 0:
            return
        now = engine / self._told(tokens)
        if tokens > 1:
            self.load, self.token_load = _follow(self.load, now, self.token_load)
        else:
            self.token_load, self.load = _follow(self.token_load, now, self.load)

    # --- what follows ---

    def step(self, nodes: float) -> float:
        """Seconds of the verifier's engine for a tree of so many nodes; 0: for a token of a stream."""
        own, other = (self.load, self.token_load) if nodes else (self.token_load, self.load)
        return (own or other or (1.0 if self.curve else 0.0)) * self._told(1 + nodes)

    def tree_rate(self) -> float:
        """Tokens per second of tree drafting."""
        return self.tau / self.round()

    def round(self) -> float:
        """Seconds of a round of tree drafting."""
        return max(1e-4, self.exposed + self._fixed() + self._tree_step())

    def stream_rate(self) -> float | None:
        """Tokens per second of a stream, or None where nothing is known."""
        if self.gap is not None:
            return 1 / max(1e-4, self.gap)
        return 1 / (step + self.queue) if (step := self.step(0)) else None

    def trial_cost(self) -> float:
        """Seconds that a short stream costs in place of trees: it must be asked for, and may be slower."""
        stream = self.stream_rate() or math.inf
        return self.exposed + self._fixed() + TRIAL * max(0.0, 1 / stream - 1 / self.tree_rate())

    def compare_every(self, streamed: int) -> int:
        """Tokens of a stream between trees drafted beside it for comparison: each costs the device time and energy.

        streamed: tokens of this answer's streams so far.
        """
        stream = self.stream_rate()
        if stream is None:
            return COMPARE_EVERY
        every = COMPARE_RARELY if 2 * self.tree_rate() < stream else COMPARE_EVERY
        return every if streamed <= SOON else max(every, math.ceil(self.compared * stream / COMPARING))

    def drafts_ahead(self) -> bool:
        """Whether drafting is enough of a round to be hidden."""
        return self.whole is not None and self.whole >= AHEAD_SHARE * (self.whole + self._fixed() + self._tree_step())

    def gain(self) -> float:
        """Accepted tokens that one more drafting step must promise to be worth its time."""
        return min(MOST_GAIN, max(LEAST_GAIN, self.tree_rate() * (self.drafter_step or 0.0)))

    def worth_drafting(self) -> int:
        """Nodes to draft of the next tree, so that there is a choice of what to send."""
        return max(LEAST_NODES, math.ceil(SPARE * (SOME_NODES if self.nodes is None else self.nodes)))

    def worth_sending(self, tree: TokenTree, scores: Sequence[float]) -> int:
        """How many nodes of `tree`, best first, make most tokens per second; scores: log path probabilities."""
        if not scores:
            return len(tree)
        fixed = self.exposed + self._fixed()
        times = np.array([max(1e-4, fixed + self.step(count)) for count in range(1, len(tree) + 1)])
        return 1 + int(np.argmax(self._expected(tree, scores) / times))

    def _told(self, tokens: float) -> float:
        """Seconds of a step of so many tokens, as the verifier told; what it really takes is `load` times as long."""
        return self.curve.at(tokens) if self.curve else 1.0

    def _tree_step(self) -> float:
        """Seconds of the verifier's engine for a tree as they are now."""
        return self.step(SOME_NODES if self.nodes is None else self.nodes)

    def _fixed(self) -> float:
        """A round's time without drafting and the verifier's engine."""
        return (self.trip or 0.0) + self.queue


@dataclass
class Controller:
    """Tree or stream: whichever promises more tokens per second, with hysteresis. pinned: always this one.

    Beside a stream, trees are drafted for comparison. Beside trees, nothing but the verifier's curve tells how long a
    stream's tokens take, and that may be wrong: so now and then, where it could be the better one, one is tried.
    """

    pace: Pace
    pinned: Mode | None = None
    mode: Mode = "tree"
    switches: int = 0
    trials: int = 0
    trial: int = 0  # tokens that are left of one
    _better: int = 0
    _saved: float = 0.0  # seconds that a trial may cost

    def begin(self) -> Mode:
        """The mode of a new answer: no hysteresis, nothing is under way."""
        self._better = STREAM_TIMES
        return self.choose()

    def choose(self) -> Mode:
        """After every verdict."""
        if self.pinned:
            return self.pinned
        stream, tree = self.pace.stream_rate(), self.pace.tree_rate()
        if stream is None:
            return self.mode
        if self.trial:
            self.trial -= 1
            if not self.trial:
                self._end_trial(stream > MARGIN * tree)
            return self.mode
        now, other = (tree, stream) if self.mode == "tree" else (stream, tree)
        self._better = self._better + 1 if other > MARGIN * now else 0
        if self._better >= (TIMES if self.mode == "tree" else STREAM_TIMES):
            self.mode = "stream" if self.mode == "tree" else "tree"
            self.switches += 1
            self._better = 0
        elif self.mode == "tree" and stream > WORTH_A_TRIAL * tree:
            self._maybe_try()
        return self.mode

    def _maybe_try(self) -> None:
        """Begin a trial if enough was saved for it."""
        self._saved += TRYING * self.pace.round()
        if self._saved > self.pace.trial_cost() * 2 ** min(self.trials, HALVINGS):
            self.mode, self.trial, self._saved = "stream", TRIAL, 0.0
            self.trials += 1

    def _end_trial(self, better: bool) -> None:
        self._better = 0
        if better:
            self.switches += 1
        else:
            self.mode = "tree"
