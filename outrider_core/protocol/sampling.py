"""Draw tokens from the target's logits, and decode plainly by that rule.

Both ends use these functions: the verifier to decide, the device to rank candidates and to write offline. Greedy
decoding is the case without noise. The draw depends on (logits, parameters, seed, position) and on nothing else: no
draft tree, batch or outage can change it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from outrider_core.protocol.noise import gumbel_noise


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """Sampling parameters under the names users know. temperature 0 is greedy.

    temperature >= 0; top_k = 0 keeps every token; top_p in (0, 1]; min_p in [0, 1] relative to the most
    likely token; seed: 63 bits.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def log_probs(logits: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float64]:
    """Return the distribution tokens are drawn from: float64 log-probabilities [vocab], -inf if cut off.

    Temperature first, then top-k, then top-p, then min-p, each on what the one before left. For greedy
    parameters: the log-softmax at temperature 1.
    """
    x: NDArray[np.float64] = logits.astype(np.float64)
    x = x - x.max()  # before the division, so that a tiny temperature gives -inf and never inf - inf
    if not sampling.greedy:
        with np.errstate(over="ignore"):
            x /= sampling.temperature
    x -= np.log(np.exp(x).sum())
    if sampling.greedy:
        return x
    cut = -np.inf
    if 0 < sampling.top_k < len(x):
        cut = max(cut, float(np.partition(x, -sampling.top_k)[-sampling.top_k]))
    if sampling.top_p < 1.0:
        total = float(np.exp(x[x >= cut]).sum())
        # rarer tokens together have less than half of the mass that top-p cuts off: only the others are sorted
        rare = float(np.log(total * (1 - sampling.top_p) / (2 * len(x))))
        likely = np.flatnonzero(x >= max(cut, rare))
        order = likely[np.argsort(-x[likely], kind="stable")]
        mass = np.cumsum(np.exp(x[order]))
        reached = mass >= min(sampling.top_p * total, mass[-1])  # rounding may miss it by a little
        cut = max(cut, float(x[order[int(np.argmax(reached))]]))
    if sampling.min_p > 0.0:
        cut = max(cut, float(x.max() + np.log(sampling.min_p)))
    if cut == -np.inf:
        return x
    x = np.where(x >= cut, x, -np.inf)
    x -= np.log(np.exp(x).sum())
    return x


def draw(logits: NDArray[np.floating], sampling: Sampling, position: int) -> int:
    """Draw the token at absolute index `position`: argmax of log p + Gumbel noise; ties go to the lowest id."""
    if sampling.greedy:
        return int(np.argmax(logits))
    return int(np.argmax(log_probs(logits, sampling) + gumbel_noise(sampling.seed, position, len(logits))))
