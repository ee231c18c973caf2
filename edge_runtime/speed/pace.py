"""What the device measured of drafter, link and target, and what follows from it: tree size, when to stop, rates.

A round of tree drafting commits 1 + (sum of the sent nodes' acceptance probabilities) tokens and takes
exposed drafting + round-trip time + step(nodes). A stream commits a token per step(0). Everything below maximises or
compares tokens per second by these two lines. Seconds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_runtime.speed.ahead import Ahead, Round
from edge_runtime.speed.chains import FIRST_TOKENS, Chains
from edge_runtime.speed.pace_config import PaceConfig
from outrider_core.protocol.costs import CostCurve, unpack_costs
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Welcome


def _blend(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)


@dataclass
class Pace:
    """Smoothed measurements of one verifier, its link and the drafter; they outlive answers. Seconds and tokens."""

    curve: CostCurve | None = None  # as WELCOME advertised it; None: a step is taken to last a second, see `slowdown`
    slowdown: float | None = None  # of steps for trees: measured time over advertised time
    token_slowdown: float | None = None  # of steps for single tokens
    rtt: float | None = None  # of a round, without the verifier's engine and queue
    queue: float = 0.0
    exposed: float = 0.0  # drafting between a tree's verdict and the next VERIFY; 0.0: nothing tells of it
    reading: float = 0.0  # between another verdict and an answer's first tree: the drafter reads what is new to it
    drafter_step: float | None = None
    from_scratch: float | None = None  # drafting a tree of which nothing was there
    gap: float | None = None  # between tokens of a stream
    gaps: int = 0  # measurements behind `gap`; a guess is one
    usual_gap: float | None = None  # in the answers so far
    usual_gaps: int = 0  # measurements behind `usual_gap` and `together`
    together: float = 0.0  # share of a stream's tokens that came of one step with the token before
    late: bool = False  # tokens arrive that an outage held back
    compared: float = 0.0  # drafting a tree for comparison
    lost: float = 0.0  # of a stream by it, where device and verifier share processors
    uncompared: int = 0  # streamed tokens since; below 0: so many more than it was entitled to
    tau: float = 2.0  # tokens of a tree round, in this answer
    usual_tau: float = 2.0  # in the answers so far
    trees: int = 0  # measurements behind `usual_tau`
    written: int = 0  # tokens of this answer
    usual_length: float | None = None  # of the answers so far, in tokens
    nodes: float | None = None  # of a tree
    ahead: Ahead = field(default_factory=Ahead)
    chains: Chains = field(default_factory=Chains)  # of the understudy
    config: PaceConfig = field(default_factory=PaceConfig)

    def __post_init__(self) -> None:
        #: accepted nodes by depth: as the drafter predicted them, and as they came
        self.predicted = [self.config.prior] * (self.config.depths + 1)
        self.accepted = list(self.predicted)
        self._losing: float | None = None  # what the stream loses by the tree under way
        self._ending: tuple[bool, Round] | None = (
            None  # the one that ends with the next VERIFY, and whether it drafts ahead
        )

    # --- measurements ---

    def linked(self, welcome: Welcome, rtt: float) -> None:
        """A handshake took `rtt`. Another verifier has other costs; what was measured of the same one stays."""
        curve, self.rtt = unpack_costs(welcome.costs), rtt
        if curve is None or curve != self.curve:
            self.curve, self.slowdown, self.token_slowdown = curve, None, None
            self.gap, self.gaps, self.exposed, self.reading, self._ending = None, 0, 0.0, 0.0, None
            self.usual_gap, self.usual_gaps, self.together = None, 0, 0.0
            self.lost, self._losing = 0.0, None
            self.ahead = Ahead(fixed=self.ahead.fixed)

    def drafted(self, seconds: float, steps: int, from_scratch: bool) -> None:
        """A tree was drafted. from_scratch: nothing of it was there before, and no prompt had to be read."""
        if steps:
            self.drafter_step = self._smoothed(self.drafter_step, seconds / steps)
        if from_scratch:
            self.from_scratch = self._smoothed(self.from_scratch, seconds)

    def verified(
        self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], wait: float, engine: float, queue: float
    ) -> None:
        """A tree's verdict came after `wait`: `path` was accepted; engine, queue: the verifier's own part of it."""
        between, tokens = max(0.0, wait - engine - queue), 1 + len(tree)
        measured = Round(0.0, between, engine / self._advertised(tokens)) if engine > 0 else None
        self._ending = (self.drafts_ahead(), measured) if measured else None
        if not self.ahead.trying:
            self._stepped(tokens, engine)
            self.rtt = self._smoothed(self.rtt, between)
        self.queue = self._smoothed(self.queue, queue)
        self.uncompared = 0
        self.written += 1 + len(path)
        self._learn(tree, scores, path, self.config.smoothing, self.config.usual_smoothing)

    def chain_verified(
        self, tokens: int, accepted: int, wait: float, engine: float, queue: float, ended: bool = False
    ) -> None:
        """The verdict on a chain of `tokens` of the understudy came after `wait`: the first `accepted` were right.
        ended: behind them the answer has ended, and nothing is known of the others."""
        self._ending = None
        self._stepped(1 + tokens, engine)
        self.rtt = self._smoothed(self.rtt, max(0.0, wait - engine - queue))
        self.queue = self._smoothed(self.queue, queue)
        self.uncompared = 0
        self.written += 1 + accepted
        self.chains.verified(accepted if ended else tokens, accepted)

    def streamed(self, gap: float, engine: float, overdue: bool, beside: bool = False, same_step: bool = False) -> None:
        """A streamed token came `gap` after the one before it. Tokens delayed by an outage are ignored.

        same_step: it came of one step with the one before, as where the verifier foresees what the text repeats.
        beside: a tree for comparison was drafted meanwhile; what the step lost by that is not part of the gap.
        """
        self._ending, losing = None, 0.0
        self.written += 1
        if same_step:
            pass  # it has told its time
        elif beside and self.token_slowdown is not None:
            losing = engine - self.step(0)
            self._losing = (self._losing or 0.0) + losing
        else:
            self._stepped(1, engine)
            if self._losing is not None:
                self.lost = _blend(self.lost, max(0.0, self._losing), self.config.comparison_smoothing)
                self._losing = None
        self.late = overdue or (self.late and (same_step or gap < engine / 2))
        if not self.late:
            self.gaps += 1
            self.usual_gaps += 1
            gap = max(0.0, gap - max(0.0, losing))
            self.gap = _blend(self.gap, gap, max(self.config.token_smoothing, 1 / self.gaps))
            usual = max(self.config.usual_token_smoothing, 1 / self.usual_gaps)
            self.usual_gap = _blend(self.usual_gap, gap, usual)
            self.together = _blend(self.together, float(same_step), usual)

    def foreseen(self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], seconds: float) -> None:
        """Of a tree drafted in `seconds` beside a stream, for comparison, `path` came true."""
        config = self.config
        self._learn(tree, scores, path, config.comparison_smoothing, config.usual_comparison_smoothing)
        self.compared = self._smoothed(self.compared, seconds)
        self.exposed = min(self.exposed or seconds, seconds)

    def tried(
        self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], drafting: float, engine: float
    ) -> None:
        """A tree was drafted in place of single tokens and run, to see what it brings: all that it took is lost to
        them."""
        lost = drafting + max(0.0, engine - self.step(0))
        self.lost = max(lost, _blend(self.lost, lost, self.config.comparison_smoothing))
        self.foreseen(tree, scores, path, drafting)
        self._stepped(1 + len(tree), engine)
        self.written += 1 + len(path)

    def prepared(self, seconds: float) -> None:
        """`seconds` passed between a verdict and an answer's first tree, or the first behind a stream: no round."""
        self._ending = None
        self.ahead.given_up()
        self.reading = max(seconds, self._smoothed(self.reading, seconds))

    def waited(self, exposed: float) -> None:
        """`exposed` seconds passed between a verdict and the next VERIFY: a round ends."""
        ended, self._ending = self._ending, None
        if not self.ahead.trying:
            self.exposed = self._smoothed(self.exposed, exposed)
        if ended is None or not self._much_to_hide():
            self.ahead.given_up()
            return
        ahead, measured = ended
        step = self._advertised(1 + self._tree_nodes())
        if better := self.ahead.measured(ahead, measured._replace(exposed=exposed), step):
            self.exposed, self.rtt, self.slowdown = better

    def _learn(
        self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], weight: float, usual: float
    ) -> None:
        """Learn from what came of a tree. tau is what its nodes promise, calibrated: that varies less than luck."""
        prior, fading, depths = self.config.prior, self.config.fading, self.config.depths
        self.nodes = _blend(self.nodes, len(tree), weight)
        if len(scores) != len(tree) or not scores:
            self._brought(1 + len(path), weight, usual)
            return
        for depth in range(1, depths + 1):
            self.predicted[depth] = prior + fading * (self.predicted[depth] - prior)
            self.accepted[depth] = prior + fading * (self.accepted[depth] - prior)
        for depth, score in zip(tree.depths, scores, strict=True):
            self.predicted[min(depth, depths)] += float(np.exp(score))
        for depth in range(1, len(path) + 1):
            self.accepted[min(depth, depths)] += 1
        self._brought(float(self._expected(tree, scores)[-1]), weight, usual)

    def _brought(self, tokens: float, weight: float, usual: float) -> None:
        self.trees += 1
        self.tau = _blend(self.tau, tokens, weight)
        self.usual_tau = _blend(self.usual_tau, tokens, max(usual, 1 / (self.config.prior + self.trees)))

    def forget_answer(self) -> None:
        """A new answer begins, of which nothing is known."""
        self.tau = self.usual_tau
        if self.uneven:
            self.gap = self.usual_gap
        self.reading *= self.config.reading_fading
        if self.written:
            self.usual_length = _blend(self.usual_length, self.written, self.config.length_smoothing)
            self.written = 0

    def _expected(self, tree: TokenTree, scores: Sequence[float]) -> NDArray[np.float64]:
        """Tokens that the first 1, 2, ... nodes of `tree` promise, as far as promises were kept so far."""
        ratio = np.minimum(self.config.most_correction, np.array(self.accepted) / np.array(self.predicted))
        depths = np.minimum(np.array(tree.depths), self.config.depths)
        tokens: NDArray[np.float64] = 1 + np.cumsum(np.minimum(1.0, np.exp(scores) * ratio[depths]))
        return tokens

    def _smoothed(self, old: float | None, new: float) -> float:
        return _blend(old, new, self.config.smoothing)

    def _stepped(self, tokens: int, engine: float) -> None:
        """A step took `engine` seconds. The slowdowns of trees and of single tokens rise and fall together, but each
        keeps a level of its own: where the curve is wrong for one, the other must not be judged by it."""
        if engine <= 0:
            return
        now = engine / self._advertised(tokens)
        own, other = (self.slowdown, self.token_slowdown) if tokens > 1 else (self.token_slowdown, self.slowdown)
        new = self._smoothed(own, now)
        other = other if own is None or other is None else other * new / own
        before = self.step(0)
        self.slowdown, self.token_slowdown = (new, other) if tokens > 1 else (other, new)
        if tokens > 1 and self.gap is not None and self.usual_gap is not None:
            # no stream tells at present how long its tokens take
            longer = (1 - self.together) * (self.step(0) - before)
            self.gap = max(self.config.least_seconds, self.gap + longer)
            self.usual_gap = max(self.config.least_seconds, self.usual_gap + longer)
            self.gaps = 1  # the next one tells more than this guess

    # --- what follows ---

    def step(self, nodes: float) -> float:
        """Seconds of the verifier's engine for a tree of `nodes` nodes; 0: for a token of a stream."""
        own, other = (self.slowdown, self.token_slowdown) if nodes else (self.token_slowdown, self.slowdown)
        return (own or other or (1.0 if self.curve else 0.0)) * self._advertised(1 + nodes)

    def tree_rate(self) -> float:
        """Tokens per second of tree drafting."""
        return self.tau / self.round()

    def usual_tree_rate(self) -> float:
        """Tokens per second of an answer of usual length in trees, with what the drafter has to read first."""
        reading = self.reading / self.usual_length if self.usual_length else 0.0
        return 1 / (1 / self.tree_rate() + reading)

    def draft_rate(self) -> float:
        """Tokens per second of trees or of the understudy's chains, whichever are faster."""
        return max(self.tree_rate(), self._chain()[1])

    def usual_draft_rate(self) -> float:
        """The same, of an answer of usual length in trees."""
        return max(self.usual_tree_rate(), self._chain()[1])

    def chain(self, going_on: bool) -> int:
        """Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree.

        going_on: the last one was a chain too; leaving them takes the margin, and so does coming to them.
        """
        length, rate = self._chain()
        margin = 1 / self.config.margin if going_on else self.config.margin
        if length and rate > margin * self.tree_rate():
            self.chains.chosen()
            return length
        return FIRST_TOKENS if self.chains.try_now() else 0

    def _chain(self) -> tuple[int, float]:
        """(length, tokens per second) of the understudy's best chain; 0, 0 where nothing is known of them."""
        return self.chains.best(self._between(), self.step) if self.chains.known else (0, 0.0)

    def round(self) -> float:
        """Seconds of a round of tree drafting."""
        return max(self.config.least_seconds, self._fixed() + self._tree_step())

    def stream_rate(self) -> float | None:
        """Tokens per second of a stream, or None where nothing is known."""
        if self.gap is not None:
            return 1 / max(self.config.least_seconds, self.gap)
        return 1 / (step + self.queue) if (step := self.step(0)) else None

    @property
    def uneven(self) -> bool:
        """Whether a stream's steps bring as many tokens as the text allows, so that an answer has a rate of its own."""
        return self.together >= self.config.uneven

    def trial_cost(self) -> float:
        """Seconds that a short stream costs in place of trees: it must be asked for, and may be slower."""
        stream = self.stream_rate() or math.inf
        return self._fixed() + self.config.trial_tokens * max(0.0, 1 / stream - 1 / self.draft_rate())

    def compare_every(self, streamed: int) -> int:
        """Tokens of a stream between trees drafted beside it for comparison: each costs the device time and energy.

        streamed: tokens of this answer's streams so far.
        """
        stream = self.stream_rate()
        if stream is None:
            return self.config.compare_every
        config = self.config
        ahead = max(1.0, stream / self.draft_rate())
        rarer = ahead * ahead * ahead
        every = min(config.compare_rarely, math.floor(config.compare_every * rarer))
        cost = self.lost if streamed <= config.early_tokens else max(self.lost, self.compared)
        paid = cost * stream / config.comparison_share
        return max(every, math.ceil(max(paid, min(config.compare_seldom, rarer * paid))))

    def compares(self, streamed: int, first: bool) -> bool:
        """Return whether to draft a tree for comparison, after `streamed` tokens of this answer's streams.

        first: nothing else tells of this answer yet, so it may come early, as long as the average is kept: tokens are
        counted over answers.
        """
        self.uncompared += 1
        every = self.compare_every(streamed)
        early = first and streamed >= self.config.compare_every and self.uncompared >= 0
        if self.uncompared < every and not early:
            return False
        self.uncompared = min(0, self.uncompared - every)
        return True

    def drafts_ahead(self) -> bool:
        """Return whether to draft on while the next verdict is awaited."""
        return self.ahead.now and self._much_to_hide()

    def _much_to_hide(self) -> bool:
        """Return whether drafting is enough of a round to be hidden."""
        drafting = self.from_scratch
        if drafting is None:
            return False
        return drafting >= self.config.ahead_share * (drafting + self._between() + self._tree_step())

    def gain(self) -> float:
        """Accepted tokens that one more drafting step must promise to be worth its time."""
        return min(self.config.most_gain, max(self.config.least_gain, self.tree_rate() * (self.drafter_step or 0.0)))

    def worth_drafting(self) -> int:
        """Nodes to draft of the next tree, so that there is a choice of what to send."""
        return max(self.config.least_nodes, math.ceil(self.config.spare * self._tree_nodes()))

    def worth_sending(self, tree: TokenTree, scores: Sequence[float]) -> int:
        """Return how many nodes of `tree`, best first, make most tokens per second; scores: log path probabilities."""
        if not scores:
            return len(tree)
        fixed = self._fixed()
        least = self.config.least_seconds
        times = np.array([max(least, fixed + self.step(count)) for count in range(1, len(tree) + 1)])
        return 1 + int(np.argmax(self._expected(tree, scores) / times))

    def _advertised(self, tokens: float) -> float:
        """Seconds of a step of `tokens` tokens as the verifier advertised; it really takes `slowdown` times as long."""
        return self.curve.at(tokens) if self.curve else 1.0

    def _tree_step(self) -> float:
        """Seconds of the verifier's engine for a tree as they are now."""
        return self.step(self._tree_nodes())

    def _tree_nodes(self) -> float:
        """Nodes of a tree as they are now."""
        return self.config.first_nodes if self.nodes is None else self.nodes

    def _fixed(self) -> float:
        """A round's time without the verifier's engine."""
        return self.exposed + self._between()

    def _between(self) -> float:
        """A round's time without drafting and the verifier's engine."""
        return (self.rtt or 0.0) + self.queue
