"""What the device measured of drafter, link and target, and each arm's tokens per second by it. Seconds throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edge_runtime.speed.ahead import Ahead
from edge_runtime.speed.arms import PRIOR_STEPS, ChainArm, StreamArm, TreeArm
from edge_runtime.speed.cost_model import LEAST_SECONDS, CostModel, blend
from edge_runtime.speed.explorer import Explorer
from edge_runtime.speed.settled import Arm
from outrider_core.protocol.costs import unpack_costs
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Welcome


@dataclass
class Pace:
    """Measurements of one verifier, its link and the drafter; they outlive answers."""

    costs: CostModel = field(default_factory=CostModel)
    tree: TreeArm = field(default_factory=TreeArm)
    chain: ChainArm = field(default_factory=ChainArm)
    stream: StreamArm = field(default_factory=StreamArm)
    ahead: Ahead = field(default_factory=Ahead)
    explorer: Explorer = field(default_factory=Explorer)

    def __post_init__(self) -> None:
        #: whether the round that ends with the next VERIFY drafts ahead, and the seconds that it took so far
        self._ending: tuple[bool, float] | None = None

    # --- measurements ---

    def linked(self, welcome: Welcome, rtt: float) -> None:
        """A handshake took `rtt`. Another verifier has other costs; what was measured of the same one stays."""
        curve = unpack_costs(welcome.costs)
        self.costs = replace(self.costs, rtt=rtt)
        if curve is None or curve != self.costs.curve:
            drafting = PRIOR_STEPS * (self.tree.step or 0.0)
            self.costs = CostModel(curve, rtt=rtt, queue=welcome.queue_us / 1e6, exposed=drafting)
            self.stream, self.ahead, self._ending = StreamArm(), Ahead(fixed=self.ahead.fixed), None
        self.stream.told(welcome.stream_tokens / 100)

    def verified(
        self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], wait: float, engine: float, queue: float
    ) -> None:
        """A tree's verdict came after `wait`: `path` was accepted; engine, queue: the verifier's own part of it."""
        self._ending = (self.ahead.now, max(LEAST_SECONDS, wait - queue)) if engine > 0 else None
        if not self.ahead.trial:
            self._round(1 + len(tree), wait, engine, queue)
        self.explorer.passed(wait)
        self.tree.learn(tree, scores, path)

    def chain_verified(
        self, tokens: int, accepted: int, wait: float, engine: float, queue: float, ended: bool = False
    ) -> None:
        """The verdict on a chain of `tokens` of the understudy came after `wait`: the first `accepted` were right.
        ended: behind them the answer has ended, and nothing is known of the others."""
        self._ending = None
        self._round(1 + tokens, wait, engine, queue)
        self.explorer.passed(wait)
        self.chain.verified(accepted if ended else tokens, accepted)

    def streamed(self, gap: float, engine: float, overdue: bool, same_step: bool = False) -> None:
        """A streamed token came `gap` after the one before it.

        same_step: it came of one step with the one before, as where the verifier foresees what the text repeats.
        """
        self._ending = None
        if not same_step:  # that has told its time
            self.costs.stepped(1, engine)
        if not overdue:
            self.explorer.passed(gap)
        self.stream.came(gap, engine, overdue, same_step)

    def foreseen(self, tree: TokenTree, scores: Sequence[float], path: Sequence[int], seconds: float) -> None:
        """Of a tree drafted in `seconds` for comparison, `path` came true."""
        self.tree.learn(tree, scores, path)
        if not self.ahead.on:
            self.costs.exposed = blend(self.costs.exposed, seconds)

    def prepared(self) -> None:
        """What passed between a verdict and an answer's first tree, or the first behind a stream, is no round's."""
        self._ending, self.ahead.trial = None, 0

    def waited(self, exposed: float) -> None:
        """`exposed` seconds passed between a verdict and the next VERIFY: a round ends."""
        if not self.ahead.trial:
            self.costs.exposed = blend(self.costs.exposed, exposed)
        if self._ending is None:
            return self.prepared()
        ahead, seconds = self._ending
        self._ending = None
        return self.ahead.measured(ahead, seconds + exposed, self.explorer)

    def forget_answer(self) -> None:
        """A new answer begins, of which nothing is known."""
        self.tree.tau, self.stream.first = self.tree.usual_tau, self.stream.usual

    def _round(self, tokens: int, wait: float, engine: float, queue: float) -> None:
        self.costs.stepped(tokens, engine)
        self.costs.rtt = blend(self.costs.rtt, max(0.0, wait - engine - queue))
        self.costs.waited(queue)

    # --- what follows ---

    def rates(self) -> dict[Arm, float]:
        """Tokens per second of each arm of which anything is known."""
        rates = {Arm.TREE: self.tree.rate(self.costs)}
        if self.chain.known:
            rates[Arm.CHAIN] = self.chain.best(self.costs)[1]
        if stream := self.stream.rate(self.costs):
            rates[Arm.STREAM] = stream
        return rates
