"""Distributions of target and drafter, and draws of candidates from the drafter's (arXiv 2401.06706).

The warping is the product's (`outrider_core.protocol.sampling`), so that every method is compared under the same
distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lab.baselines.choice import Chooser, Floats
from lab.baselines.trees import How, Siblings
from outrider_core.protocol.sampling import Sampling, log_probs

#: (q [vocab], number of candidates wanted, chooser) -> candidates
Draw = Callable[[Floats, int, Chooser], Siblings]


def target_distribution(logits: NDArray[np.floating], sampling: Sampling) -> Floats:
    """Return p [rows, vocab] of logits [rows, vocab]; greedy: all mass on the likeliest token, lowest id on ties."""
    if sampling.greedy:
        distribution = np.zeros(logits.shape)
        distribution[np.arange(len(logits)), logits.argmax(-1)] = 1.0
        return distribution
    return draft_distribution(logits, sampling)


def draft_distribution(logits: NDArray[np.floating], sampling: Sampling) -> Floats:
    """Return q [rows, vocab] of logits [rows, vocab]; greedy: the softmax at temperature 1, to rank candidates by."""
    rows = [np.exp(log_probs(row, sampling)) for row in logits]
    return np.stack(rows) if rows else np.zeros(logits.shape)


def draw_independent(q: Floats, count: int, chooser: Chooser) -> Siblings:
    """Make `count` draws with replacement; a token may come more than once."""
    return Siblings(tuple(chooser.draw(q) for _ in range(count)), (How.INDEPENDENT,) * count)


def draw_distinct(q: Floats, count: int, chooser: Chooser) -> Siblings:
    """Make `count` draws without replacement, or take all tokens of positive probability if there are fewer."""
    left = q.copy()
    tokens: list[int] = []
    for _ in range(min(count, int(np.count_nonzero(q)))):
        tokens.append(chooser.draw(left))
        left[tokens[-1]] = 0.0
    return Siblings(tuple(tokens), (How.DISTINCT,) * len(tokens))


def draw_top(q: Floats, count: int, chooser: Chooser) -> Siblings:
    """Return the `count` most likely tokens, best first: the limit of drawing without replacement at temperature 0.

    They are not drawn. The released MCSD code takes softmax over their logits for the distribution they were drawn
    from; with a target at temperature > 0 that changes the output's distribution. They are marked FIXED, and residual
    rules refuse them.
    """
    best = np.argsort(-q, kind="stable")[: min(count, np.count_nonzero(q))]
    return Siblings(tuple(best.tolist()), (How.FIXED,) * len(best))


def draw_mixed(q: Floats, count: int, chooser: Chooser) -> Siblings:
    """Return the `count` - 1 most likely tokens, then one draw from the rest of q (for `rules.mixed`)."""
    fixed = draw_top(q, count - 1, chooser)
    rest = q.copy()
    rest[list(fixed.tokens)] = 0.0
    drawn = draw_distinct(rest, 1, chooser)
    return Siblings(fixed.tokens + drawn.tokens, fixed.how + drawn.how)


def drawing(sampling: Sampling, replacement: bool) -> Draw:
    """Return MCSD's choice: draws with or without replacement; for greedy parameters the top 1 or the top k."""
    if not sampling.greedy:
        return draw_independent if replacement else draw_distinct
    if replacement:  # every draw would be the same token
        return lambda q, count, chooser: draw_top(q, 1, chooser)
    return draw_top
