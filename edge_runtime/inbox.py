"""What an answer waits for: link events and finished jobs of the drafter."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.link import LinkEvent
from edge_runtime.session import Session
from edge_runtime.worker import DrafterFailed
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.tree import ROOT, TokenTree


@dataclass(frozen=True)
class Drafted:
    """A drafter job is done: a tree, or one token written alone and its probability.

    seconds: since it was asked for; working: of these, in the drafter.
    """

    session: Session
    result: Draft | tuple[int, float]
    version: int
    seconds: float
    working: float


@dataclass(frozen=True)
class Shadow:
    """A tree for comparison alone, below the first `base` tokens; it took `working` seconds."""

    session: Session
    draft: Draft
    base: int
    working: float

    def foreseen(self, tree: TokenTree, committed: list[int]) -> list[int] | None:
        """The path of `tree`, what of it would be sent, that came true; None while all that came is in it."""
        path, node = list[int](), ROOT
        for token in committed[self.base :]:
            child = tree.child(node, token)
            if child is None:
                return path
            path.append(child)
            node = child
        return None


#: what an answer waits for
News = LinkEvent | Drafted | Shadow | DrafterFailed
