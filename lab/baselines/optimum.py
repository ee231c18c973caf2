"""The most that any lossless node rule can accept, as an upper bound (optimal transport, arXiv 2502.18779).

Optimum = 1 + min over token sets H of [p(H) - probability that all candidates lie in H].
"""

from __future__ import annotations

import numpy as np

from lab.baselines.choice import Floats


def optimal_acceptance(p: Floats, q: Floats, count: int) -> float:
    """Return it for `count` independent draws from q: the minimising H is a prefix of the tokens by ascending p / q."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0.0, p / q, np.inf)
    order = np.argsort(ratio, kind="stable")
    gaps = np.cumsum(p[order]) - np.minimum(1.0, np.cumsum(q[order])) ** count
    return 1.0 + min(0.0, float(gaps.min()))
