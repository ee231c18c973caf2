"""Draft trees: tokens with parents, hanging below the committed sequence's last token (the root).

The root is implicit. Nodes are numbered 0..n-1, parents always before children; ROOT (-1 in memory, 255 on
the wire) marks children of the root.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT = -1
#: a parent is one byte on the wire and 255 means the root
MAX_NODES = 255


class TreeError(ValueError):
    """A list of tokens and parents is not a valid tree."""


@dataclass(frozen=True)
class TokenTree:
    """tokens[i] is node i's token id, parents[i] its parent node or ROOT."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    children: tuple[dict[int, int], ...] = field(init=False, repr=False, compare=False)
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise TreeError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if len(self.tokens) > MAX_NODES:
            raise TreeError(f"{len(self.tokens)} nodes, at most {MAX_NODES}")
        children: list[dict[int, int]] = [{} for _ in range(len(self.tokens) + 1)]
        depths: list[int] = []
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not ROOT <= parent < node:
                raise TreeError(f"node {node} has parent {parent}; parents must come before their children")
            if token in children[parent + 1]:
                raise TreeError(f"node {node} repeats token {token} under parent {parent}")
            children[parent + 1][token] = node
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        object.__setattr__(self, "children", tuple(children))
        object.__setattr__(self, "depths", tuple(depths))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Make a tree of one path from the root."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def pruned(self, nodes: int, depth: int) -> TokenTree:
        """Return the first `nodes` nodes of at most `depth` levels; parents are included, as they come first."""
        kept = [node for node in range(len(self)) if self.depths[node] <= depth][: max(0, nodes)]
        if len(kept) == len(self):
            return self
        place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        return TokenTree(tuple(self.tokens[n] for n in kept), tuple(place[self.parents[n]] for n in kept))

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of `parent` (a node or ROOT) that carries `token`, or None."""
        return self.children[parent + 1].get(token)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to `node`; [] for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def foreseen(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the path that `tokens`, below the root, took through the tree; None while they have not left it."""
        path, node = list[int](), ROOT
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                return path
            path.append(child)
            node = child
        return None

    def ancestor_bits(self) -> list[int]:
        """Per node a bit set over nodes: itself and its ancestors (bit i = node i)."""
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append((0 if parent == ROOT else bits[parent]) | 1 << node)
        return bits

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Yield the token sequences of all root-to-leaf paths."""
        for node in range(len(self)):
            if not self.children[node + 1]:
                yield tuple(self.tokens[n] for n in self.path(node))
