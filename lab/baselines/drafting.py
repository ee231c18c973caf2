"""Grow candidate trees level by level, and forests of hedges for a root that is not known yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lab.baselines.choice import Chooser, Floats
from lab.baselines.sampling import Draw
from lab.baselines.trees import CandidateTree, How, Siblings
from outrider_core.protocol.tree import ROOT

#: (tree so far, nodes of its newest level or range(ROOT, 0) for the root) -> distributions [nodes, vocab] after each of
#: them
LevelDistribution = Callable[[CandidateTree, range], Floats]
#: (tree with a level just drafted, the nodes above that level, their q [nodes, vocab]) -> continue?
Proceed = Callable[[CandidateTree, range, Floats], bool]


class Draft(NamedTuple):
    """q [rows, vocab]: row 0 is the distribution after the root, row 1 + i after node i; the last level has no rows.

    Row 0 of a forest of seeds is zero: the drafter drew none of them.
    """

    tree: CandidateTree
    q: Floats


def grow(
    level_distribution: LevelDistribution,
    profile: Sequence[int],
    draw: Draw,
    chooser: Chooser,
    seeds: Sequence[int] = (),
    proceed: Proceed | None = None,
) -> Draft:
    """Grow a tree with profile[d] children below every node of level d (arXiv 2401.06706), breadth-first.

    level_distribution runs the drafter on one level at a time; its rows are distributions, warped as the candidates
    should be drawn. If `seeds` are given, those distinct tokens are the first level, at most profile[0] of them.
    `proceed` is called after every level but the last one; the level just drafted is kept in any case.
    """
    if len(seeds) > (profile[0] if profile else 0) or len(set(seeds)) < len(seeds):
        raise ValueError(f"{len(seeds)} seeds, not distinct or more than the first level of {tuple(profile)}")
    tree, distributions = CandidateTree(), list[Floats]()
    frontier = range(ROOT, 0)
    for level, count in enumerate(profile):
        first = len(tree)
        if level == 0 and seeds:
            tree = tree.grown(frontier, [Siblings(tuple(seeds), (How.FIXED,) * len(seeds))])
            frontier = range(first, len(tree))
            continue
        q = np.asarray(level_distribution(tree, frontier), np.float64)
        if q.ndim != 2 or len(q) != len(frontier):
            raise ValueError(f"distributions {q.shape} for {len(frontier)} nodes")
        distributions.append(q)
        expanded = frontier
        tree = tree.grown(expanded, [draw(row, count, chooser) for row in q])
        frontier = range(first, len(tree))
        if level + 1 < len(profile) and proceed is not None and not proceed(tree, expanded, q):
            break
    vocab = distributions[0].shape[1] if distributions else 0
    if seeds:
        distributions.insert(0, np.zeros((1, vocab)))
    return Draft(tree, np.concatenate(distributions) if distributions else np.zeros((0, vocab)))


def surviving(forest: Draft, token: int) -> Draft:
    """Return the part of a forest of hedges below the seed `token`, once the target has drawn it.

    Lossless, unlike choosing among seeds by their continuations (`multiseed`): the target alone decides the token, and
    the candidates below it are the drafter's draws in any case. Without such a seed the tree is empty.
    """
    tree = forest.tree
    roots = [node for node in tree.children[0] if tree.tokens[node] == token]
    place = dict.fromkeys(roots[:1], ROOT)
    kept = list[int]()
    for node, parent in enumerate(tree.parents):
        if parent in place:
            place[node] = len(kept)
            kept.append(node)
    rows = [1 + node for node in [*roots[:1], *kept] if 1 + node < len(forest.q)]
    below = CandidateTree(
        tuple(tree.tokens[n] for n in kept),
        tuple(place[tree.parents[n]] for n in kept),
        tuple(tree.how[n] for n in kept),
    )
    return Draft(below, forest.q[rows])
