"""Candidate trees and their topology-aware causal masks (arXiv 2401.06706; sliced: arXiv 2409.10644).

Node numbering is the product's (`outrider_core.protocol.tree`): the root is implicit and parents come before children,
so any prefix of the node list is a tree too and every prefix's mask is a leading principal submatrix of the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_core.protocol.tree import ROOT, TreeError

Bools = NDArray[np.bool_]


class How(Enum):
    """The origin of a node, which decides what a node rule may assume."""

    FIXED = "chosen without chance, such as the most likely ones"
    INDEPENDENT = "drawn from q, with replacement"
    DISTINCT = "drawn from q without the earlier siblings"


class Siblings(NamedTuple):
    """The candidates below one node, in the order of their draws."""

    tokens: tuple[int, ...]
    how: tuple[How, ...]


@dataclass(frozen=True)
class CandidateTree:
    """tokens[i] is node i's token id, parents[i] its parent node or ROOT, how[i] its origin.

    Unlike `outrider_core.protocol.tree.TokenTree`, siblings may carry the same token: a rule for candidates drawn with
    replacement needs every draw.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    how: tuple[How, ...] = ()
    children: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)  # of ROOT, of node 0, ...

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.how):
            raise TreeError(f"{len(self.tokens)} tokens, {len(self.parents)} parents, {len(self.how)} origins")
        children: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise TreeError(f"node {node} has parent {parent}; parents must come before their children")
            children[parent + 1].append(node)
        object.__setattr__(self, "children", tuple(map(tuple, children)))

    def __len__(self) -> int:
        return len(self.tokens)

    def siblings(self, parent: int) -> Siblings:
        """Return the children of `parent` (a node or ROOT)."""
        nodes = self.children[parent + 1]
        return Siblings(tuple(self.tokens[n] for n in nodes), tuple(self.how[n] for n in nodes))

    def text(self, node: int) -> tuple[int, ...]:
        """Return the token ids from the root's child down to `node`; () for ROOT."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(tokens[::-1])

    def grown(self, parents: Sequence[int], groups: Sequence[Siblings]) -> CandidateTree:
        """Return this tree with groups[i] below parents[i]."""
        below = [parent for parent, group in zip(parents, groups, strict=True) for _ in group.tokens]
        return CandidateTree(
            self.tokens + tuple(token for group in groups for token in group.tokens),
            self.parents + tuple(below),
            self.how + tuple(how for group in groups for how in group.how),
        )

    def prefix(self, nodes: int) -> CandidateTree:
        """Return the first `nodes` nodes: a slice by budget.

        The order is that of the draws, not of the tokens, so the rules stay exact. A tree sorted by its tokens'
        probabilities would lose sampled candidates depending on their tokens, which only sample-and-match tolerates.
        """
        return CandidateTree(self.tokens[:nodes], self.parents[:nodes], self.how[:nodes])

    def mask(self) -> Bools:
        """Return bool [nodes, nodes]: each node sees its ancestors and itself."""
        return ancestor_mask(self.parents)


def ancestor_mask(parents: Sequence[int]) -> Bools:
    """Return bool [n, n] for any parents-first list: row i is its parent's row and node i."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def behind_context(mask: Bools, context: int) -> Bools:
    """Return bool [rows, context + columns]: every node also sees all `context` tokens, the root included."""
    return np.pad(mask, ((0, 0), (context, 0)), constant_values=True)


class LevelTree:
    """The full tree of a profile, children per level such as (4, 2, 2, 1), breadth-first; its mask is built once.

    Levels count from 1, the root's children. Node i of level d, counted from that level's first node, has its child c
    at place i * profile[d] + c of level d + 1. Shallower trees are slices: `mask`, `rows` and `positions` return views.
    A draft with fewer children somewhere uses `CandidateTree.mask` instead.
    """

    def __init__(self, profile: Sequence[int]) -> None:
        if not profile or min(profile) < 1:
            raise TreeError(f"a profile needs at least one child on each level, not {tuple(profile)}")
        self.profile = tuple(profile)
        widths = np.cumprod(self.profile).tolist()
        self.ends = (0, *np.cumsum(widths).tolist())  # ends[d]: number of nodes up to level d
        parents = [ROOT] * widths[0]
        for level in range(2, len(widths) + 1):
            for parent in self.level(level - 1):
                parents += [parent] * self.profile[level - 1]
        self.parents = tuple(parents)
        self._mask = ancestor_mask(self.parents)
        self._depths = self._mask.sum(1, dtype=np.int64)
        for array in (self._mask, self._depths):
            array.setflags(write=False)

    def level(self, level: int) -> range:
        """Return the nodes of a level."""
        return range(self.ends[level - 1], self.ends[level])

    def mask(self, depth: int) -> Bools:
        """Return bool [n, n], a read-only view: the mask among the nodes of the first `depth` levels."""
        return self._mask[: self.ends[depth], : self.ends[depth]]

    def rows(self, level: int) -> Bools:
        """Return bool [nodes of the level, nodes up to it], a read-only view: the mask of this level's step."""
        return self._mask[self.ends[level - 1] : self.ends[level], : self.ends[level]]

    def positions(self, depth: int, context: int) -> NDArray[np.int64]:
        """Return int64 [n]: absolute positions of the nodes of the first `depth` levels after `context` tokens."""
        return self._depths[: self.ends[depth]] + (context - 1)
