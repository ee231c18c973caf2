"""What was measured of drafter, link and target, and which arm writes by it: whichever promises most tokens per second,
and now and then another one, to know what it brings. Seconds throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from edge_runtime.speed.ahead import Ahead
from edge_runtime.speed.arms import PRIOR_STEPS, Arm, ChainArm, StreamArm, TreeArm
from edge_runtime.speed.cost_model import LEAST_SECONDS, OUTLIER, CostModel, blend
from edge_runtime.speed.explorer import EVERY, Explorer, best
from outrider_core.protocol.costs import unpack_costs
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Welcome


@dataclass
class Controller:
    """Measures one verifier, its link and the drafter, and chooses with hysteresis; it outlives answers. pinned: always
    this arm; trees and chains are one then. trial: steps left of the one under way.

    While streaming, the device drafts trees and chains for comparison. While drafting trees, it knows a stream's time
    per token only from the verifier's curve, which may be wrong, and nothing of chains: so it tries them now and then.
    """

    costs: CostModel = field(default_factory=CostModel)
    tree: TreeArm = field(default_factory=TreeArm)
    chain: ChainArm = field(default_factory=ChainArm)
    stream: StreamArm = field(default_factory=StreamArm)
    ahead: Ahead = field(default_factory=Ahead)
    explorer: Explorer = field(default_factory=Explorer)
    pinned: Arm | None = None
    arm: Arm = Arm.TREE
    trial: int = 0
    _home: Arm = Arm.TREE  # the arm before it
    _better: int = 0  # steps in which another arm promised more
    #: whether the round that ends with the next VERIFY drafts ahead, and the seconds that it took so far
    _ending: tuple[bool, float] | None = None

    # --- measurements ---

    def linked(self, welcome: Welcome, rtt: float) -> None:
        """A handshake took `rtt`. Another verifier has other costs; those of the same one's steps stay."""
        curve, queue = unpack_costs(welcome.costs), welcome.queue_us / 1e6
        self.costs = replace(self.costs, rtt=rtt, queue=queue, rounds=0)
        if curve is None or curve != self.costs.curve:
            drafting = PRIOR_STEPS * (self.tree.step or 0.0)
            self.costs = CostModel(curve, rtt=rtt, queue=queue, exposed=drafting)
            self.stream, self.ahead, self._ending = StreamArm(), Ahead(fixed=self.ahead.fixed), None
        self.stream.told(welcome.stream_tokens / 100)

    def verified(
        self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], wait: float, engine: float
    ) -> None:
        """A tree's verdict came after `wait`: `path` was accepted; engine: the verifier's own part of it."""
        self._ending = (self.ahead.now, max(LEAST_SECONDS, wait)) if engine > 0 else None
        self.explorer.passed(wait)
        if not self.ahead.trial:
            self.costs.measured(1 + len(tree), wait, engine)
        self.tree.learn(tree, scores, path)

    def chain_verified(self, tokens: int, accepted: int, wait: float, engine: float, ended: bool = False) -> None:
        """The verdict on a chain of `tokens` of the understudy came after `wait`: the first `accepted` were right.
        ended: behind them the answer has ended, and nothing is known of the others."""
        self._ending = None
        self.explorer.passed(wait)
        self.costs.measured(1 + tokens, wait, engine)
        self.chain.verified(accepted if ended else tokens, accepted)

    def streamed(self, gap: float, engine: float, same_step: bool = False) -> None:
        """A streamed token came `gap` after the one before it.

        same_step: it came of one step with the one before, as where the verifier foresees what the text repeats.
        """
        self._ending = None
        self.explorer.passed(gap)
        if not same_step:  # that has told its time
            self.costs.stepped(1, engine)
        self.stream.came(gap, engine, same_step)

    def foreseen(self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], seconds: float) -> None:
        """Of a tree drafted in `seconds` for comparison, `path` came true."""
        self.tree.learn(tree, scores, path)
        if not self.ahead.on:
            self.costs.exposed = blend(self.costs.exposed, self.tree.usual(seconds, PRIOR_STEPS))

    def waited(self, exposed: float) -> None:
        """`exposed` seconds passed between a verdict and the next VERIFY: a round ends."""
        ending, self._ending = self._ending, None
        exposed = max(self.tree.usual(exposed, PRIOR_STEPS), min(exposed, OUTLIER * self.costs.exposed))
        if not self.ahead.trial:
            self.costs.exposed = blend(self.costs.exposed, exposed)
        if ending:
            self.ahead.measured(ending[0], ending[1] + exposed, self.explorer)
        else:
            self.ahead.trial = 0

    def prepared(self) -> None:
        """What passed between a verdict and an answer's first tree, or the first behind a stream, is no round's."""
        self._ending, self.ahead.trial = None, 0

    # --- choices ---

    def begin(self, unknown: bool = True) -> Arm:
        """The arm of an answer. unknown: nothing tells of it yet; otherwise it goes on, on a new link. There is no
        hysteresis in either case."""
        if not unknown:
            self._better = EVERY
            return self.choose()
        home = self._home if self.trial else self.arm
        self.trial = self._better = 0
        self.tree.tau, self.stream.first = self.tree.usual_tau, self.stream.usual
        self.arm = best(self._allowed(), home, margin=1.0)
        return self.arm

    def choose(self) -> Arm:
        """After every verdict, a step."""
        rates = self._allowed()
        if self.trial:
            self.trial -= 1
            if not self.trial:
                self._switch(best(rates, self._home))
            return self.arm
        other = best(rates, self.arm)
        # a delayed token is followed by a burst: a stream is not left for a few of them
        self._better = self._better + 1 if other is not self.arm else 0
        if self._better >= (EVERY if self.arm is Arm.STREAM and self.arm in rates else 1):
            self._switch(other)
        elif self.arm is not Arm.STREAM:
            self._maybe_try(rates)
        return self.arm

    def compares(self, arm: Arm, more: float = 0.0) -> bool:
        """Return whether to draft for `arm` beside the one in use. more: seconds that it costs besides drafting."""
        if self.arm is Arm.CHAIN:  # the drafter is idle
            return self.explorer.due(arm, 0.0, 1.0)
        rates = self.rates()
        behind = rates[self.arm] / rates[arm] if self.arm in rates and arm in rates else 1.0
        return self.explorer.due(arm, self.costs.exposed + more, behind)

    def rates(self) -> dict[Arm, float]:
        """Tokens per second of each arm of which anything is known."""
        rates = {Arm.TREE: self.tree.rate(self.costs)}
        if self.chain.ready and self.chain.most > 1 and self.chain.token is not None:
            rates[Arm.CHAIN] = self.chain.best(self.costs)[1]
        if stream := self.stream.rate(self.costs):
            rates[Arm.STREAM] = stream
        return rates

    def _allowed(self) -> dict[Arm, float]:
        rates = self.rates()
        if self.pinned is Arm.STREAM:
            return {Arm.STREAM: rates.get(Arm.STREAM, inf)}
        if self.pinned:
            rates.pop(Arm.STREAM, None)
        return rates

    def _switch(self, arm: Arm) -> None:
        self.arm, self._better = arm, 0

    def _maybe_try(self, rates: dict[Arm, float]) -> None:
        """Try one chain, or a stream for a few tokens, if it is due."""
        costs, now = self.costs, rates[self.arm]
        if self.arm is Arm.TREE and self.chain.ready:
            chain = rates.get(Arm.CHAIN)
            lost = costs.round(1) * max(0.0, 1 - chain / now) if chain else 0.0
            if not chain or self.explorer.due(Arm.CHAIN, lost, now / chain):
                return self._try(Arm.CHAIN, 1)
        stream = rates.get(Arm.STREAM)
        if not (stream or self.stream.tokens or self.pinned):
            return self._try(Arm.STREAM, EVERY)
        if stream:
            lost = costs.round(0) - costs.step(0) + EVERY * max(0.0, 1 / stream - 1 / now)
            if self.explorer.due(Arm.STREAM, lost, now / stream):
                return self._try(Arm.STREAM, EVERY)
        return None

    def _try(self, arm: Arm, steps: int) -> None:
        self._home, self.trial = self.arm, steps
        self._switch(arm)
