"""Walk a candidate tree from the root by a node rule: accepted path and bonus token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.baselines.choice import Chooser, Floats
from lab.baselines.rules import Rule
from lab.baselines.trees import CandidateTree
from outrider_core.protocol.tree import ROOT


class Verdict(NamedTuple):
    """path: accepted nodes from the root down; bonus: the token after them."""

    path: list[int]
    bonus: int


def verify(
    tree: CandidateTree, p: NDArray[np.floating], q: NDArray[np.floating] | None, rule: Rule, chooser: Chooser
) -> Verdict:
    """Verify one round; path and bonus have the target's distribution if the rule's conditions hold.

    p [nodes + 1, vocab]: the target's distributions, row 0 after the root, row 1 + i after node i. q: the drafter's, in
    the same rows, at least for every node with children; None for a rule that reads no q. Raises RuleError, and
    ValueError for missing rows.
    """
    check_rows(tree, p, q)
    path: list[int] = []
    node = ROOT
    while tree.children[node + 1]:
        distribution = None if q is None else normalised(q[node + 1])
        token, child = rule(normalised(p[node + 1]), distribution, tree.siblings(node), chooser)
        if child is None:
            return Verdict(path, token)
        node = tree.children[node + 1][child]
        path.append(node)
    return Verdict(path, chooser.draw(normalised(p[node + 1])))


def check_rows(tree: CandidateTree, p: NDArray[np.floating], q: NDArray[np.floating] | None) -> None:
    """Raise ValueError if a row that a walk may need is missing."""
    inner = 1 + max(tree.parents, default=-2)
    if len(p) != len(tree) + 1 or (q is not None and len(q) <= inner):
        raise ValueError(f"p has {len(p)} rows, q {len(p if q is None else q)}, for a tree of {len(tree)} nodes")


def normalised(distribution: NDArray[np.floating]) -> Floats:
    """Return a distribution [vocab] in float64 that sums to 1."""
    exact: Floats = distribution.astype(np.float64)
    return exact / exact.sum()
