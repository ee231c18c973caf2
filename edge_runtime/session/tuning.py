"""One answer's part in the choices: what is measured of it goes to the controller, which keeps and weighs it; by that,
the tree's size and what else to draft are chosen. Pure: times are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edge_runtime.session.settled import Settled
from edge_runtime.speed.arms import FIRST_TOKENS, MOST_TOKENS, Arm
from edge_runtime.speed.controller import Controller
from outrider_core.drafting.drafter import Draft, TreeShape
from outrider_core.protocol.tree import MAX_NODES

#: the largest trees where no others are asked for: as many nodes as a frame of 256 bytes holds
LARGEST = TreeShape(nodes=48)
#: nodes and levels of a tree, at most, and its gain as of `TreeShape`; None: that of the largest
TreeSize = tuple[int, int, float | None]


@dataclass
class Tuning:
    """Choices of one answer. controller: measurements and arm, which outlive it.

    largest: bounds of every tree. shaping: draft and send less where that brings more tokens per second. ahead: draft
    on while a verdict is awaited; None: where it makes rounds shorter.
    """

    controller: Controller = field(default_factory=Controller)
    largest: TreeShape = LARGEST
    shaping: bool = True
    ahead: bool | None = None

    def __post_init__(self) -> None:
        self.controller.ahead.fixed = self.ahead is not None
        self._verdict_at: float | None = None  # the last one's time, until a tree is sent
        self._behind_tree = False  # it was on a tree; behind others, the drafter reads what is new to it
        self._comparing: Arm | None = None  # is being drafted for, for comparison
        #: what was drafted for comparison, below the text's first tokens, in seconds; its outcome is not known yet
        self._compared: tuple[Arm, Draft, int, float] | None = None
        self._untold = True  # what trees bring in this answer is known from others alone
        self._barren = False  # the understudy found nothing to draft in this answer
        self.controller.chain.ready = False  # it has to read the text first

    # --- what was measured ---

    def drafted(self, arm: Arm, draft: Draft, seconds: float, wanted: bool) -> None:
        """Drafting `draft` took `seconds`. wanted: it was not given up. A tree that is not behind another tells nothing
        of a step: the drafter had to read first."""
        if arm is Arm.CHAIN:
            self._barren |= wanted and not draft.tree
            self.controller.chain.drafted(draft.steps, seconds)
        elif self._behind_tree:
            self.controller.tree.drafted(seconds, draft.steps)

    def asked(self, arm: Arm, now: float) -> None:
        """What was drafted was sent: since the last verdict, reading and drafting was all that happened."""
        if self._verdict_at is not None and arm is Arm.TREE:
            if self._behind_tree:
                self.controller.waited(now - self._verdict_at)
            else:
                self.controller.prepared()
        self._verdict_at = None  # one that is sent again, behind an outage, tells nothing

    def answered(self, settled: Settled, now: float) -> None:
        """A verdict came. A late one says nothing of the way."""
        self._verdict_at, self._behind_tree = now, False
        wait, engine = settled.wait, settled.engine
        if settled.drafted:
            self._untold, self._behind_tree = False, settled.arm is Arm.TREE
        if settled.arm is Arm.STREAM and not settled.asked_for:
            self.controller.streamed(wait, engine, settled.same_step)
        elif settled.late:
            return
        elif settled.arm is Arm.STREAM:
            if not (settled.after_open or settled.same_step):  # the text was read first; it waited for nothing
                self.controller.costs.waited(wait - engine)
        elif settled.arm is Arm.CHAIN and settled.drafted:
            sent, accepted = len(settled.tree), len(settled.accepted)
            self.controller.chain_verified(sent, accepted, wait, engine, settled.ended)
        elif settled.drafted:
            self.controller.verified(settled.tree, settled.scores, settled.accepted, wait, engine)

    def compared(self, draft: Draft, base: int, seconds: float) -> None:
        """What was drafted for comparison, empty if it tells nothing, below the first `base` tokens, in `seconds`."""
        arm, self._comparing = self._comparing or Arm.TREE, None
        self._compared = (arm, draft, base, seconds) if draft.tree else None
        if arm is Arm.CHAIN:
            self.controller.chain.drafted(draft.steps, seconds)

    def committed(self, tokens: list[int]) -> None:
        """The text is `tokens` now. What came of the tree for comparison is measured once it is known."""
        if self._compared is None:
            return
        arm, draft, base, seconds = self._compared
        draft = self.worth_sending(arm, draft)
        path = draft.tree.foreseen(tokens[base:])
        if path is None:
            return
        if arm is Arm.CHAIN:
            self.controller.chain.verified(len(draft.tree), len(path))
        else:
            self.controller.foreseen(draft.tree, draft.scores, path, seconds)
        self._compared = None

    def understudy_failed(self) -> None:
        """It drafts nothing more, and not what was asked for."""
        self.controller.chain.ready = False
        if self._comparing is Arm.CHAIN:
            self._comparing = None

    # --- what follows ---

    def begin(self) -> Arm:
        """The arm of an answer, or of its rest on a new link."""
        return self.controller.begin(unknown=self._untold)

    def choose(self, drafts: bool) -> Arm:
        """The arm after a verdict. drafts: the understudy can draft."""
        self._offer(drafts)
        return self.controller.choose()

    def tree_size(self, nodes: int, depth: int) -> TreeSize:
        """Of the next tree, where the session has room for `nodes` and `depth` levels."""
        nodes, depth = min(self.largest.nodes, nodes), min(self.largest.depth, depth)
        if not self.shaping:
            return nodes, depth, None
        trees = self.controller.tree
        return min(nodes, trees.worth_drafting()), depth, trees.gain(self.controller.costs)

    def chain(self, limit: int, room: int, ready: bool, alone: bool = False) -> int:
        """Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree. limit: that the
        verifier takes. room: that the session has. ready: the understudy can draft. alone: there is no drafter. Where
        nothing is shaped, trees alone are drafted, or chains alone."""
        self._offer(ready)
        chain, room = self.controller.chain, min(limit, room)
        chain.most = limit
        if alone and ready and not self.shaping and not self._barren:
            return min(room, self.largest.depth, MOST_TOKENS) if room > 1 else 0
        if room < 2 or not chain.ready or self.controller.arm is not Arm.CHAIN:
            return 0
        return min(room, FIRST_TOKENS if self.controller.trial else chain.best(self.controller.costs)[0])

    def _offer(self, ready: bool) -> None:
        """Record whether chains are available. ready: the understudy can draft."""
        self.controller.chain.ready = ready and self.shaping and not self._barren

    def worth_sending(self, arm: Arm, draft: Draft) -> Draft:
        """Return what of a draft is sent."""
        if arm is Arm.CHAIN:
            return draft
        count, trees = len(draft.tree), self.controller.tree
        if self.shaping:
            count = trees.worth_sending(draft.tree, draft.scores, self.controller.costs)
        tree = draft.tree.pruned(count, MAX_NODES)
        return replace(draft, tree=tree, scores=draft.scores[: len(tree)])

    def drafts_ahead(self, arm: Arm) -> bool:
        """Whether to draft on while a verdict is awaited: on a chain of the understudy, that costs the drafter
        nothing."""
        return (arm is Arm.CHAIN or self.controller.ahead.now) if self.ahead is None else self.ahead

    def comparison(self, drafts: bool = False) -> tuple[Arm, TreeSize] | None:
        """What to draft for comparison beside a stream or a chain now, and its size; None: nothing. Where the arm is
        pinned, nothing needs to know it. drafts: the understudy can draft."""
        controller = self.controller
        if controller.pinned or self._comparing or controller.arm is Arm.TREE:
            return None
        self._offer(drafts)
        if controller.arm is Arm.STREAM and controller.chain.ready and controller.compares(Arm.CHAIN):
            self._comparing = Arm.CHAIN
            return Arm.CHAIN, (FIRST_TOKENS, FIRST_TOKENS, None)
        if controller.compares(Arm.TREE):
            self._comparing, self._untold = Arm.TREE, False
            return Arm.TREE, self.tree_size(MAX_NODES, self.largest.depth)
        return None
