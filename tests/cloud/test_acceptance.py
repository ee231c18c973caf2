"""The walk: descends on equality, asks only for what it visits, stops at end of answer and context."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cloud.engine.acceptance import AcceptedPath, RootedTree, accept_paths
from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import FINISH_EOS, FINISH_LENGTH, FINISH_NONE

#          node: 0  1  2  3  4
TREE = TokenTree((7, 8, 9, 3, 9), (-1, -1, 1, 2, 0))


class Rows:
    """Logits whose argmax is given per row; remembers which were asked for."""

    def __init__(self, *best: int) -> None:
        self.best, self.asked = best, list[int]()

    def __call__(
        self, rows: list[int], samplings: list[Sampling], positions: list[int], adjustments: list[None]
    ) -> list[int]:
        assert adjustments == [None] * len(rows)
        self.asked += rows
        return [draw(self._logits(row), *how) for row, *how in zip(rows, samplings, positions, strict=True)]

    def _logits(self, row: int) -> NDArray[np.float64]:
        logits = np.zeros(12)
        logits[self.best[row]] = 5.0
        return logits


@pytest.mark.parametrize(
    ("best", "limit", "want", "asked"),
    [
        ((5, 0, 0, 0, 0, 0), 100, AcceptedPath([], 5, FINISH_NONE), [0]),
        ((8, 0, 9, 1, 0, 0), 100, AcceptedPath([1, 2], 1, FINISH_NONE), [0, 2, 3]),
        ((8, 0, 9, 3, 0, 0), 100, AcceptedPath([1, 2], 3, FINISH_EOS), [0, 2, 3]),  # node 3 holds it, yet it ends
        ((7, 9, 0, 0, 0, 6), 100, AcceptedPath([0, 4], 6, FINISH_NONE), [0, 1, 5]),
        ((8, 0, 9, 1, 0, 0), 12, AcceptedPath([1], 9, FINISH_LENGTH), [0, 2]),
        ((8, 0, 9, 1, 0, 0), 11, AcceptedPath([], 8, FINISH_LENGTH), [0]),
        ((3, 0, 9, 1, 0, 0), 11, AcceptedPath([], 3, FINISH_EOS), [0]),
    ],
)
def test_accepted_path(best: tuple[int, ...], limit: int, want: AcceptedPath, asked: list[int]) -> None:
    rows = Rows(*best)
    assert accept_paths(rows, [RootedTree(TREE, Sampling(), 10, 0)], {3}, limit) == [want]
    assert rows.asked == asked


def test_all_trees_go_down_together() -> None:
    """Rows of the second tree lie behind the first's; each level is asked for once."""
    rows = Rows(8, 0, 9, 1, 0, 0, 7, 9, 0, 0, 0, 6)
    drafts = [RootedTree(TREE, Sampling(), 10, 0), RootedTree(TREE, Sampling(), 20, 6)]
    assert accept_paths(rows, drafts, {3}, 100) == [
        AcceptedPath([1, 2], 1, FINISH_NONE),
        AcceptedPath([0, 4], 6, FINISH_NONE),
    ]
    assert rows.asked == [0, 6, 2, 7, 3, 11]
    assert accept_paths(rows, [], {3}, 100) == []


def test_draws_are_keyed_by_absolute_position() -> None:
    sampling = Sampling(temperature=1.0, seed=9)
    flat = np.zeros(12)
    tokens = [draw(flat, sampling, position) for position in range(20, 24)]
    assert len(set(tokens)) > 1

    def flat_draw(rows: list[int], samplings: list[Sampling], positions: list[int], _: list[None]) -> list[int]:
        return [draw(flat, *how) for how in zip(samplings, positions, strict=True)]

    found = accept_paths(flat_draw, [RootedTree(TokenTree.chain(tokens[:3]), sampling, 20, 0)], (), 100)
    assert found == [AcceptedPath([0, 1, 2], tokens[3], FINISH_NONE)]
