"""A session's share of a step, and the blocks of the pool that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree

#: rows of the KV pool that are stored together, head by head
POOL_BLOCK = 64


@dataclass(frozen=True)
class Part:
    """A session's tokens in a step: `chain`, which follows the `past` rows of its prefix, then a tree.

    base: first pool row of the session's extent. wanted: whether logits of the chain's last token and of the tree's
    nodes are needed. sampling: how tokens are drawn from all of these, if nothing else changes the draws.
    """

    base: int
    past: int
    chain: tuple[int, ...]
    tree: TokenTree = field(default_factory=TokenTree)
    wanted: bool = True
    sampling: Sampling | None = None

    def __len__(self) -> int:
        return len(self.chain) + len(self.tree)
