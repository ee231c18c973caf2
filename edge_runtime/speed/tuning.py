"""Choices for one answer, made from measurements: tree or stream, the tree's size, what else to draft.

Pure: times are passed in. This module reports an answer's measurements to `edge_runtime.speed.pace`, which keeps and
weighs them, and asks it for choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from edge_runtime.speed.chains import FIRST_TOKENS, MOST_TOKENS
from edge_runtime.speed.controller import Controller, Mode
from edge_runtime.speed.pace import Pace
from edge_runtime.speed.settled import RequestKind, Settled, StreamClock
from outrider_core.drafting.drafter import Draft, TreeShape
from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree
from outrider_core.protocol.wire import Welcome

#: the largest trees where no others are asked for: as many nodes as a frame of 256 bytes holds
LARGEST = TreeShape(nodes=48)


class TreeSize(NamedTuple):
    """Nodes and levels of a tree, at most. gain: as of `TreeShape`; None: that of the largest."""

    nodes: int
    depth: int
    gain: float | None


@dataclass(frozen=True)
class _Comparison:
    """A tree or a chain for comparison alone, below the first `base` tokens; drafting it took `seconds`."""

    draft: Draft
    base: int
    seconds: float


@dataclass
class Tuning:
    """Choices of one answer. controller: measurements and mode, which outlive it.

    largest: bounds of every tree. shaping: draft and send less where that brings more tokens per second. ahead: draft
    on while a verdict is awaited; None: where it makes rounds shorter.
    """

    controller: Controller = field(default_factory=lambda: Controller(Pace()))
    largest: TreeShape = LARGEST
    shaping: bool = True
    ahead: bool | None = None

    def __post_init__(self) -> None:
        self.pace.ahead.fixed = self.ahead is not None
        self._verdict_at: float | None = None  # the last one's time, until a tree is sent
        self._behind_tree = False  # it was on a tree; behind others, the drafter reads what is new to it
        self._comparison: _Comparison | None = None  # whose outcome is not known yet
        self._drafting = self._beside = False  # a tree for comparison is under way; was since the last token
        self._untold = True  # what trees bring in this answer is known from others alone
        self.pace.chains.ready = False
        self._chained = False  # the last tree was the understudy's chain
        self._chain_next = True  # that is what is to be compared next, if it can be
        self._comparing_chain = False  # one for comparison is under way
        self._barren = False  # the understudy found nothing to draft in this answer

    @property
    def pace(self) -> Pace:
        return self.controller.pace

    # --- what was measured ---

    def linked(self, welcome: Welcome, rtt: float) -> None:
        """A handshake took `rtt` seconds."""
        self.pace.linked(welcome, rtt)

    def drafted(self, draft: Draft, seconds: float, wanted: bool) -> None:
        """Drafting `draft` took `seconds`. Before a first tree the drafter had something to read. wanted: it was not
        given up."""
        if draft.chain:
            self._barren |= wanted and not draft.tree
            self.pace.chains.drafted(draft.steps, seconds)
        else:
            self.pace.drafted(seconds, draft.steps, from_scratch=self._behind_tree and not draft.ahead)

    def asked(self, now: float, chain: bool = False) -> None:
        """A drafted tree was sent: since the last verdict, reading and drafting was all that happened."""
        if self._verdict_at is not None and not chain:
            (self.pace.waited if self._behind_tree else self.pace.prepared)(now - self._verdict_at)
        self._verdict_at = None  # one that is sent again, behind an outage, tells nothing

    def answered(self, settled: Settled, now: float) -> None:
        """A verdict came. One that is late says nothing of the link."""
        self._verdict_at, self._behind_tree = now, False
        wait, engine, queue = settled.wait, settled.engine, settled.queue
        if settled.kind is RequestKind.STREAM:
            # the first token had to be asked for; those of its step say nothing without it
            begun, running = settled.clock is not StreamClock.SILENT, settled.clock is StreamClock.RUNNING
            if begun and (running or not settled.same_step):
                self.pace.streamed(wait, engine, settled.late, self._beside, settled.same_step)
                self._beside = self._drafting
        elif settled.drafted:
            chain = settled.kind is RequestKind.CHAIN
            self._untold, self._behind_tree = False, not chain
            if settled.late:
                return
            if chain:
                sent, accepted = len(settled.tree), len(settled.accepted)
                self.pace.chain_verified(sent, accepted, wait, engine, queue, settled.ended)
            else:
                self.pace.verified(settled.tree, settled.scores, settled.accepted, wait, engine, queue)

    def compared(self, draft: Draft, base: int, seconds: float) -> None:
        """A tree for comparison, empty if it tells nothing, below the first `base` tokens; it took `seconds`."""
        self._comparison = _Comparison(draft, base, seconds) if draft.chain or draft.tree else None
        self._drafting = self._comparing_chain = False
        if draft.chain:
            self.pace.chains.drafted(draft.steps, seconds)

    def committed(self, tokens: list[int]) -> None:
        """The text is `tokens` now. What came of the tree for comparison is measured once it is known."""
        if self._comparison is None:
            return
        draft = self.worth_sending(self._comparison.draft)
        path = foreseen(draft.tree, tokens[self._comparison.base :])
        if path is not None and draft.chain:
            self.pace.chains.verified(len(draft.tree), len(path))
        elif path is not None:
            self.pace.foreseen(draft.tree, draft.scores, path, self._comparison.seconds)
        if path is not None:
            self._comparison = None

    def understudy_failed(self) -> None:
        """It drafts nothing more, and not what was asked for."""
        self.pace.chains.ready = False
        if self._comparing_chain:
            self._drafting = self._comparing_chain = False

    # --- what follows ---

    def begin(self) -> Mode:
        """The mode of an answer, or of its rest on a new link."""
        return self.controller.begin(unknown=self._untold)

    def choose(self, drafts: bool) -> Mode:
        """The mode after a verdict. drafts: the understudy can draft."""
        self._offer(drafts)
        return self.controller.choose()

    def tree_size(self, nodes: int, depth: int) -> TreeSize:
        """Of the next tree, where the session has room for `nodes` and `depth` levels."""
        nodes, depth = min(self.largest.nodes, nodes), min(self.largest.depth, depth)
        if not self.shaping:
            return TreeSize(nodes, depth, None)
        return TreeSize(min(nodes, self.pace.worth_drafting()), depth, self.pace.gain())

    def chain(self, limit: int, room: int, ready: bool, alone: bool = False) -> int:
        """Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree. limit: that the
        verifier takes. room: that the session has. ready: the understudy can draft. alone: there is no drafter. Where
        nothing is shaped, trees alone are drafted, or chains alone."""
        self._offer(ready)
        self.pace.chains.most = limit
        room = min(limit, room)
        length = min(room, self.pace.chain(self._chained)) if room > 1 else 0
        if alone and ready and not self.shaping and not self._barren:
            length = min(room, self.largest.depth, MOST_TOKENS)
        self._chained = length > 0
        return length

    def _offer(self, ready: bool) -> None:
        """Record whether chains are available. ready: the understudy can draft."""
        self.pace.chains.ready = ready and self.shaping and not self._barren

    def beside_chain(self) -> TreeSize | None:
        """A chain is drafted: now and then a tree too, of this size, so that what trees bring stays known."""
        if self._comparison or self._drafting or not self.pace.chains.compares():
            return None
        self._drafting = True
        return self.tree_size(MAX_NODES, self.largest.depth)

    def worth_sending(self, draft: Draft) -> Draft:
        """Return what of a draft is sent."""
        if draft.chain:
            return draft
        count = self.pace.worth_sending(draft.tree, draft.scores) if self.shaping else len(draft.tree)
        tree = draft.tree.pruned(count, MAX_NODES)
        return replace(draft, tree=tree, scores=draft.scores[: len(tree)])

    def drafts_ahead(self, chain: bool = False) -> bool:
        """Whether to draft on while a verdict is awaited. chain: on one of the understudy, which costs the drafter
        nothing."""
        return (chain or self.pace.drafts_ahead()) if self.ahead is None else self.ahead

    def comparison(self, streamed: int, drafts: bool = False) -> TreeSize | int | None:
        """`streamed` tokens into an answer's streams: the size of a tree to draft beside them now and then, so that tau
        stays known. Where the mode is pinned, nothing needs to know it. drafts: the understudy can draft; every second
        comparison is a chain of its then: its tokens."""
        if self.controller.pinned or not self.pace.compares(streamed, first=self._untold):
            return None
        self._drafting = self._beside = True
        self._offer(drafts)
        if self.pace.chains.ready and self._chain_next:
            self._chain_next, self._comparing_chain = False, True
            return FIRST_TOKENS
        self._chain_next = True
        self._untold = False
        return self.tree_size(MAX_NODES, self.largest.depth)


def foreseen(tree: TokenTree, tokens: list[int]) -> list[int] | None:
    """The path of `tree` that `tokens`, below its root, took; None while they have not left it."""
    path, node = list[int](), ROOT
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            return path
        path.append(child)
        node = child
    return None
