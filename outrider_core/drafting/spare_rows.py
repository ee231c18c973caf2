"""Fill the spare rows of a drafter's step with likely continuations.

If memory bandwidth decides, a step of few rows takes nearly as long as one of a tree's breadth. So beside the nodes
that it expands, a step runs tokens that probably follow them, before that is known: lookup's guesses, or the drafter's
likeliest token after the same token before. If such a token becomes a child, it is expanded already and its level costs
no step; otherwise a row of the step and the cache is lost. How likely a token must be depends on the row cost. A tree
that is drafted to its end (a gain of 0) stays the same; others may end a little earlier or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log
from typing import NamedTuple

import numpy as np

from outrider_core.drafting.engines import MASKED, Floats, Ints
from outrider_core.drafting.lookup import Guess

#: how often the likeliest next token of a token is the same again, roughly
SEEN_RATE = 0.4
#: paths less likely than this never get a row
FAINTEST = 0.03
#: nor does one below this multiple of the row's cost; less than 1, because a correct row would have been run anyway
FAINTEST_SHARE = 0.65


class SpareRow(NamedTuple):
    """A token, and the row that it follows: one of the nodes that the step expands, or an earlier spare row."""

    token: int
    above: int


class _Path(NamedTuple):
    score: float
    token: int
    above: int
    path: list[int]


#: predicts the next token of a path
Predict = Callable[[list[int]], Guess | None]


def least_score(row_cost: float) -> float:
    """Return the least log-probability of a path that is worth a row; row_cost: see `RowCost`."""
    return log(max(FAINTEST, FAINTEST_SHARE * row_cost))


def spare_rows(
    paths: Sequence[list[int]], scores: Sequence[float], most: int, depth: int, predict: Predict, least: float
) -> list[SpareRow]:
    """Choose the tokens of `most` spare rows, likeliest first, so that every row comes after the one that it follows.

    paths, scores: tokens from below the root down to each node that the step expands, and their log-probabilities.
    depth: tokens at this level and below are not expanded. least: log-probability that a path must exceed.
    """
    rows = list[SpareRow]()
    follow = partial(_next, depth=depth, predict=predict, least=least)
    waiting = [follow(path, score, row) for row, (path, score) in enumerate(zip(paths, scores, strict=True))]
    while len(rows) < most:
        best = max((each for each in waiting if each), key=lambda each: each.score, default=None)
        if best is None:
            break
        waiting.remove(best)
        rows.append(SpareRow(best.token, best.above))
        row = len(paths) + len(rows) - 1
        waiting.append(follow([*best.path, best.token], best.score, row))
    return rows


def _next(path: list[int], score: float, above: int, depth: int, predict: Predict, least: float) -> _Path | None:
    """Return the row that may follow row `above`, at the end of `path`."""
    if len(path) + 1 >= depth or (guess := predict(path)) is None:
        return None
    score += log(guess.rate)
    return _Path(score, guess.token, above, path) if score > least else None


def with_spare_rows(
    tokens: Ints, positions: Ints, mask: Floats, nodes: int, spare: Sequence[SpareRow]
) -> tuple[Ints, Ints, Floats]:
    """Return a step's tokens [n], positions [n] and mask [n, past + n], extended by spare rows.

    nodes: how many of the rows, the last ones, are nodes that the step expands. A spare row sees what the row above it
    sees, and itself.
    """
    if not spare:
        return tokens, positions, mask
    count, past = len(tokens), mask.shape[1] - len(tokens)
    size = count + len(spare)
    places = np.concatenate([positions, np.zeros(len(spare), np.int64)])
    wide = np.full((size, past + size), MASKED, np.float32)
    wide[:count, : past + count] = mask
    for row, (_, above) in enumerate(spare, count):
        over = count - nodes + above
        wide[row] = wide[over]
        wide[row, past + row] = 0.0
        places[row] = places[over] + 1
    return np.concatenate([tokens, np.array([each.token for each in spare], np.int64)]), places, wide
