"""A draft tree while it grows: nodes with scores and cache rows, and the part that survives a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from outrider_core.protocol.tree import ROOT, TokenTree

#: probability of a node's likeliest child, roughly
BEST_CHILD = 0.65
#: each node's share of the gain that a step must promise: a further row of a step is not free
NODE_SHARE = 0.15


@dataclass
class Growth:
    """Nodes below the text's last token, parents first. An expanded node has been run: its children are known.

    base: tokens of the text. scores: log-probabilities of the paths to the nodes. slots: the cache row of an expanded
    node, -1 for the others. open: a heap of (-score, node) of the others, and of some that were expanded by another
    way. used: the next free cache row. hung: tokens of children that nodes have before they are expanded.
    """

    base: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    open: list[tuple[float, int]] = field(default_factory=list)
    used: int = 0
    hung: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = self.used or self.base

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """Add children of `parent`; scores are those of the last token of each path alone."""
        if (there := self.hung.get(parent)) in tokens:
            scores = [score for token, score in zip(tokens, scores, strict=True) if token != there]
            tokens = [token for token in tokens if token != there]
        depth, above = (1, 0.0) if parent == ROOT else (self.depths[parent] + 1, self.scores[parent])
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.depths += [depth] * len(tokens)
        self.scores += [above + score for score in scores]
        self.slots += [-1] * len(tokens)
        for node in range(len(self) - len(tokens), len(self)):
            heappush(self.open, (-self.scores[node], node))

    def hang(self, parent: int, run: Sequence[int], score: float) -> None:
        """Add a run of tokens below `parent`, the first one a child already. score: of each of the others."""
        if not run or parent in self.hung:
            return
        at = self.child(parent, run[0])
        if at is None:
            return
        for token in run[1:]:
            self.add(at, [token], [score])
            self.hung[at], at = token, len(self) - 1

    def frontier(self, most: int, depth: int, floor: float = -np.inf) -> list[int]:
        """Take the `most` likeliest nodes above level `depth` that are not expanded yet and score above `floor`."""
        taken: list[int] = []
        too_deep: list[tuple[float, int]] = []
        while self.open and len(taken) < most and -self.open[0][0] > floor:
            entry = heappop(self.open)
            if self.slots[entry[1]] >= 0:
                continue
            if self.depths[entry[1]] < depth:
                taken.append(entry[1])
            else:
                too_deep.append(entry)
        for entry in too_deep:
            heappush(self.open, entry)
        return taken

    def put_back(self, nodes: list[int]) -> None:
        """Return nodes that were not expanded after all."""
        for node in nodes:
            heappush(self.open, (-self.scores[node], node))

    def worth_expanding(self, frontier: list[int], worst: float, gain: float) -> int:
        """Return how many nodes of `frontier`, likeliest first, promise `gain` tokens, and each its share of it; or 0.

        A node promises the gain of its likeliest child, which replaces one of score `worst`.
        """
        promised = np.maximum(0.0, BEST_CHILD * np.exp([self.scores[n] for n in frontier]) - np.exp(worst))
        if not frontier or promised.sum() < gain:
            return 0
        return max(1, int(np.count_nonzero(promised >= NODE_SHARE * gain)))

    def worst_of_best(self, nodes: int, depth: int) -> float:
        """Return the score to exceed for a place among the `nodes` best down to level `depth`; -inf if fewer."""
        scores = np.array(self.scores)[np.array(self.depths) <= depth]
        return (
            float(np.partition(scores, len(scores) - nodes)[len(scores) - nodes]) if len(scores) >= nodes else -np.inf
        )

    def path(self, node: int) -> list[int]:
        """Return the nodes from below the root down to `node`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def text(self, node: int) -> list[int]:
        """Return the tokens from below the root down to `node`."""
        return [self.tokens[each] for each in self.path(node)]

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of `parent` that carries `token`."""
        later = reversed(range(parent + 1, len(self)))
        return next((node for node in later if self.tokens[node] == token and self.parents[node] == parent), None)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes that carry `tokens` from the root down, up to the first that is missing."""
        found: list[int] = []
        for token in tokens:
            at = found[-1] if found else ROOT
            later = range(at + 1, len(self))
            node = next((n for n in later if self.tokens[n] == token and self.parents[n] == at), None)
            if node is None:
                break
            found.append(node)
        return found

    def below(self, path: list[int]) -> tuple[Growth, list[int]]:
        """Return the tree below the last node of `path`, its new root, and the cache rows to keep, in new order.

        The rows of `path` come first, as its tokens now belong to the text. All of `path` must be expanded.
        """
        base = self.base + len(path)
        kept, rows = Growth(base), [self.slots[node] for node in path]
        place = {path[-1]: ROOT}
        level, above = self.depths[path[-1]], self.scores[path[-1]]
        for node in range(path[-1] + 1, len(self)):
            if self.parents[node] not in place:
                continue
            place[node] = len(kept)
            kept.tokens.append(self.tokens[node])
            kept.parents.append(place[self.parents[node]])
            kept.depths.append(self.depths[node] - level)
            kept.scores.append(self.scores[node] - above)
            if self.slots[node] < 0:
                kept.slots.append(-1)
                kept.open.append((-kept.scores[-1], len(kept) - 1))
            else:
                kept.slots.append(self.base + len(rows))
                rows.append(self.slots[node])
        kept.hung = {place[node]: token for node, token in self.hung.items() if node in place}
        heapify(kept.open)
        kept.used = self.base + len(rows)
        return kept, rows

    def best(self, nodes: int, depth: int) -> tuple[TokenTree, list[float]]:
        """Return the `nodes` likeliest nodes down to level `depth` and their scores.

        Best first, so that a verifier that prunes cuts the least likely. Scores fall along a path, so parents are
        included and precede their children.
        """
        shallow = [node for node in range(len(self)) if self.depths[node] <= depth]
        kept = sorted(shallow, key=lambda n: (-self.scores[n], n))[:nodes]
        place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        tree = TokenTree(tuple(self.tokens[n] for n in kept), tuple(place[self.parents[n]] for n in kept))
        return tree, [self.scores[n] for n in kept]
