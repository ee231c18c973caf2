"""Target-initialised multi-candidate decoding as published (arXiv 2409.10644). It is NOT lossless.

The target draws several seeds for its next token, the drafter continues each, and the seed with the longest accepted
continuation becomes output. That favours tokens that are easy to continue. Two more steps change the distribution:
siblings are accepted independently of each other, and after a rejected first draft the next seeds come from p instead
of the residual, which matters even for one seed. Its lossless counterpart is one root, the token that was drawn
(`verification.verify`), with further seeds as hedges (`drafting.surviving`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.baselines.choice import Chooser, Floats
from lab.baselines.drafting import Draft
from lab.baselines.sampling import draw_distinct, draw_top
from lab.baselines.verification import check_rows, normalised
from outrider_core.protocol.tree import ROOT


class LossyError(RuntimeError):
    """A lossy method was used without lossy=True."""


class SeededVerdict(NamedTuple):
    """path: nodes that become output, the winning seed first; seed_distribution [vocab]: of the next seeds."""

    path: list[int]
    seed_distribution: Floats


def draw_seeds(distribution: Floats, count: int, chooser: Chooser, greedy: bool = False) -> tuple[int, ...]:
    """Draw `count` distinct tokens from the target's distribution [vocab]; greedy: its most likely ones."""
    return (draw_top if greedy else draw_distinct)(distribution, count, chooser).tokens


def verify_multiseed(
    forest: Draft, p: NDArray[np.floating], chooser: Chooser, *, lossy: bool = False, greedy: bool = False
) -> SeededVerdict:
    """Run one round on a forest grown below seeds (`drafting.grow` with `seeds`); refuses to run without lossy=True.

    Seeds count as accepted. Every drafted node is accepted with probability p / q of its token on its own (greedy: if
    it is the target's most likely one), the longest accepted path wins, the first of equals. p [nodes + 1, vocab]
    as in `verification.verify`; for greedy the target's softmax, as the next seeds are its most likely tokens.
    """
    if not lossy:
        raise LossyError(
            "multi-seed verification changes the output's distribution; pass lossy=True to use it all the same"
        )
    tree, q = forest
    check_rows(tree, p, q)
    if not len(tree):
        raise ValueError("a forest needs at least one seed")
    ends: dict[int, int] = {}  # accepted node -> length of its path
    for node, parent in enumerate(tree.parents):
        if parent == ROOT:
            ends[node] = 1
        elif parent in ends:
            distribution, token = p[parent + 1], tree.tokens[node]
            if (
                token == distribution.argmax()
                if greedy
                else chooser.accept(float(distribution[token] / q[parent + 1, token]))
            ):
                ends[node] = ends[parent] + 1
    longest = max(ends.values())
    end = min((node for node, length in ends.items() if length == longest), key=lambda n: _seed(tree.parents, n))
    distribution = normalised(p[end + 1])
    stopped = bool(tree.children[end + 1])
    if stopped and longest > 1 and not greedy:
        rest = np.maximum(distribution - normalised(q[end + 1]), 0.0)
        distribution = normalised(rest) if rest.sum() > 0.0 else distribution
    path = [end]
    while tree.parents[path[-1]] != ROOT:
        path.append(tree.parents[path[-1]])
    return SeededVerdict(path[::-1], distribution)


def _seed(parents: tuple[int, ...], node: int) -> int:
    while parents[node] != ROOT:
        node = parents[node]
    return node
