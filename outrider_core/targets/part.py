"""What one session has computed in a step, and the blocks of the pool that it lies in."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree

#: rows of the KV pool that lie together, head by head
POOL_BLOCK = 64


@dataclass(frozen=True)
class Part:
    """One session's tokens in a step: `chain` in a row behind the `past` rows of its prefix, then a tree.

    base: first pool row of the session's extent. wanted: whether logits of the chain's last token and of the tree's
    nodes are needed. sampling: by which tokens are drawn from all of these, if nothing else changes the draws.
    """

    base: int
    past: int
    chain: tuple[int, ...]
    tree: TokenTree = field(default_factory=TokenTree)
    wanted: bool = True
    sampling: Sampling | None = None

    def __len__(self) -> int:
        return len(self.chain) + len(self.tree)
