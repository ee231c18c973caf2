"""Trees of a known distribution and curves of known steps, for tests of what is measured and chosen."""

from __future__ import annotations

import random

import numpy as np

from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import Welcome

#: seconds of steps: a CPU, where nodes are dear, and a GPU, where they cost nothing for long
CPU = CostCurve((1, 8, 32, 64, 128), (0.012, 0.015, 0.024, 0.045, 0.09))
GPU = CostCurve((1, 64, 128), (0.025, 0.026, 0.032))


def welcome(curve: CostCurve | None) -> Welcome:
    """Of a verifier whose streams brought a token a step."""
    return Welcome(1, "t", "d", 100, 2048, 255, 255, "", curve.pack() if curve else b"", stream_tokens=100)


class Drafts:
    """Trees with a known distribution: a node's probability, and whether the drafter overrates itself by `boast`."""

    def __init__(self, sure: float, boast: float = 1.0, seed: int = 0) -> None:
        self.rng, self.boast = random.Random(seed), boast
        self.probabilities = [sure, 0.5 * (1 - sure), 0.2 * (1 - sure)]  # of a node's three children

    def tree(self, nodes: int) -> tuple[TokenTree, list[float], list[float]]:
        """(tree of the likeliest nodes, claimed log path probabilities, true path probabilities)."""
        tokens, parents, true, depths = [], [], [], []
        open_ = [(p, ROOT, 0, token) for token, p in enumerate(self.probabilities)]
        while len(tokens) < nodes:
            best = max(open_)
            open_.remove(best)
            p, parent, depth, token = best
            tokens.append(token)
            parents.append(parent)
            true.append(p)
            depths.append(depth + 1)
            open_ += [(p * q, len(tokens) - 1, depth + 1, child) for child, q in enumerate(self.probabilities)]
        claimed = [float(np.log(min(1.0, p * self.boast**depth))) for p, depth in zip(true, depths, strict=True)]
        return TokenTree(tuple(tokens), tuple(parents)), claimed, true

    def walk(self, tree: TokenTree) -> list[int]:
        node, path = ROOT, list[int]()
        while True:
            token = self.rng.choices(range(4), [*self.probabilities, 1 - sum(self.probabilities)])[0]
            child = tree.child(node, token) if token < 3 else None
            if child is None:
                return path
            node = child
            path.append(node)
