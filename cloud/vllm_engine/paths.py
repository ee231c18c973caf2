"""Lay out a step's trees as requests that vLLM can run: one for each root-to-leaf path, with no attention mask.

Pool row r is slot r % B of block 1 + r // B; vLLM reserves block 0. A tree's first path runs in the session's own
blocks. Every other path shares the full blocks before the tree, and has its own scratch blocks from the block in which
the tree begins. vLLM writes all keys and values of a layer before it reads any, so paths may even share blocks that the
first one fills in the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.part import Part

Ints = NDArray[np.int64]


class PathRequest(NamedTuple):
    """A request that lives for one step: `tokens` run after `past` others, in these blocks.

    rows: each token's row of the step. A token that several paths run has the same row in all of them. copied: (source,
    target) if a block's first tokens must be copied before it runs.
    """

    past: int
    tokens: Ints
    rows: Ints
    blocks: list[int]
    copied: tuple[int, int] | None

    def slots(self, block: int) -> Ints:
        """Return the slots of the tokens' keys and values."""
        at = np.arange(self.past, self.past + len(self.tokens))
        return np.array(self.blocks)[at // block] * block + at % block


@dataclass
class Layout:
    """The requests of some parts in a step.

    wanted: rows whose logits are needed, by part, the root first; depths: the depth of each below its root. elsewhere:
    slots of tree nodes that are not in the pool row of their number, by that row. rows, scratch: numbers of rows and of
    scratch blocks in use.
    """

    requests: list[PathRequest] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    elsewhere: dict[int, int] = field(default_factory=dict)
    rows: int = 0
    scratch: int = 0

    def add(self, other: Layout) -> None:
        """Append another layout, which `PathLayout.of` made to follow this one."""
        self.requests += other.requests
        self.wanted += other.wanted
        self.depths += other.depths
        self.elsewhere |= other.elsewhere
        self.rows, self.scratch = other.rows, other.scratch


class PathLayout:
    """Lays parts out. block: slots of a block. first_scratch: number of the first scratch block.

    positions: tokens of the longest sequence. Nodes further down are never drawn from; they do not run, and the root's
    logits stand in for theirs.
    """

    def __init__(self, block: int, first_scratch: int, positions: int) -> None:
        self.block, self.first_scratch, self._positions = block, first_scratch, positions

    def of(self, part: Part, rows: int, scratch: int) -> Layout:
        """Return the requests of a part, the first path first; `rows` and `scratch` blocks are in use already."""
        size, chain, tree = self.block, np.array(part.chain, np.int64), part.tree
        first = part.past + len(chain)  # position of the tree's first level
        depth = max(0, self._positions - first)
        kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
        node_row = np.full(len(tree), rows + len(chain) - 1)
        node_row[kept] = np.arange(len(kept)) + rows + len(chain)
        layout = Layout(rows=rows + len(chain) + len(kept), scratch=scratch)
        if part.wanted:
            layout.wanted = [rows + len(chain) - 1, *node_row.tolist()]
            layout.depths = [0, *tree.depths]
        tokens = np.concatenate([chain, np.array(tree.tokens, np.int64)])
        all_rows = np.concatenate([np.arange(rows, rows + len(chain)), node_row])
        own = range(1 + part.base // size, 1 + _blocks(part.base + first + len(tree), size))
        seen = set[int]()
        for path in _paths(tree, depth):
            begin, blocks, copied, at = part.past, list(own), None, size + part.base + first
            if seen:
                shared = first // size
                count = _blocks(first % size + len(path), size)
                start = self.first_scratch + layout.scratch
                layout.scratch += count
                begin, blocks = max(part.past, shared * size), [*own[:shared], *range(start, start + count)]
                copied = (own[shared], start) if begin > shared * size else None
                at = start * size + first % size
            index = np.array([*range(begin - part.past, len(chain)), *(len(chain) + node for node in path)])
            count = _blocks(first + len(path), size)
            layout.requests.append(PathRequest(begin, tokens[index], all_rows[index], blocks[:count], copied))
            for slot, node in enumerate(path, at):
                place = part.base + first + node
                if node not in seen and slot != place + size:
                    layout.elsewhere[place] = slot
            seen.update(path)
        return layout


def scratch_blocks(nodes: int, block: int) -> int:
    """Return the most scratch blocks that any tree of this many nodes needs."""

    def most(paths: int) -> int:  # at worst each begins at the end of a block, and none is longer than what is left
        longest = nodes + 1 - paths
        return paths * _blocks(block - 1 + longest, block)

    return max((most(paths) for paths in range(1, nodes + 1)), default=0)


def _paths(tree: TokenTree, depth: int) -> Iterator[Sequence[int]]:
    """Yield the nodes of each root-to-leaf path of the first `depth` levels; one empty path if there are none.

    The first path takes first children. The row of any other accepted node has to be moved, as its number differs from
    its depth.
    """
    if not len(tree) or not depth:
        yield ()
        return
    first, node = list[int](), ROOT
    while len(first) < depth and (below := tree.children[node + 1]):
        first.append(node := min(below.values()))
    yield first
    for leaf in range(len(tree)):
        ends = tree.depths[leaf] == depth or (tree.depths[leaf] < depth and not tree.children[leaf + 1])
        if ends and leaf != first[-1]:
            yield tree.path(leaf)


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)
