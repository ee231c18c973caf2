"""Traversal verification: leaf to root, on whole paths (arXiv 2505.12398)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lab.baselines.choice import Chooser
from lab.baselines.rules import RuleError
from lab.baselines.trees import CandidateTree, How
from lab.baselines.verification import Verdict, check_rows, normalised
from outrider_core.protocol.tree import ROOT


def traverse(tree: CandidateTree, p: NDArray[np.floating], q: NDArray[np.floating], chooser: Chooser) -> Verdict:
    """Verify one round like `verification.verify`; lossless for candidates drawn with or without replacement, in order.

    Leaves are tried in depth-first order. A rejected leaf is removed from the tree, and the rest of its parent's
    distribution and acceptance goes to the later siblings. On a chain this is block verification. Accepts more tokens
    on average than `residual_with_replacement` and `residual_without_replacement`.
    """
    if How.FIXED in tree.how:
        raise RuleError("traversal needs drawn candidates; use sample_and_match for any others")
    check_rows(tree, p, q)
    left = {node: list(tree.children[node + 1]) for node in range(ROOT, len(tree))}
    distributions, drafts = {ROOT: normalised(p[0])}, {}
    accepting = {ROOT: 1.0}
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        if left[node]:
            if node not in drafts:
                drafts[node] = normalised(q[node + 1])
            child = left[node][0]
            token = tree.tokens[child]
            if not drafts[node][token] > 0.0:
                raise RuleError(f"candidate {token} has probability 0 under the distribution it was drawn from")
            accepting[child] = min(1.0, accepting[node] * float(distributions[node][token] / drafts[node][token]))
            distributions[child] = normalised(p[child + 1])
            path.append(child)
        elif node == ROOT or chooser.accept(accepting[node]):
            return Verdict(path, chooser.draw(distributions[node]))
        else:
            path.pop()
            parent = tree.parents[node]
            left[parent].pop(0)
            rest = np.maximum(accepting[parent] * distributions[parent] - drafts[parent], 0.0)
            mass = float(rest.sum())
            if mass > 0.0:
                distributions[parent] = rest / mass
                accepting[parent] = mass / (mass + 1.0 - accepting[parent])
            elif accepting[parent] < 1.0:  # at 1 the distributions are equal and rejecting was a rounding error
                accepting[parent] = 0.0
            if tree.how[node] is How.DISTINCT:
                drafts[parent] = drafts[parent].copy()
                drafts[parent][tree.tokens[node]] = 0.0
                drafts[parent] /= drafts[parent].sum() or 1.0
