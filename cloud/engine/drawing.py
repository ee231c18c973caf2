"""Draw the target's tokens from rows of logits in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cloud.engine.acceptance import NO_TOKEN, Chances
from outrider_core.protocol.constraint import Adjustment, adjusted
from outrider_core.protocol.sampling import Sampling, draw

Floats = NDArray[np.float32] | NDArray[np.float64]


class HostLogits:
    """`cloud.engine.runner.Logits` in memory: values float [n, vocab]."""

    def __init__(self, values: Floats) -> None:
        self.values = values

    def draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """See Logits.draw."""
        changes = adjustments or [None] * len(rows)
        return [self._draw(*each) for each in zip(rows, samplings, positions, changes, strict=True)]

    def chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """See Logits.chances."""
        return [self._chances(row, token, top) for row, token in zip(rows, tokens, strict=True)]

    def _chances(self, row: int, token: int, top: int) -> Chances:
        x = self.values[row].astype(np.float64)
        x -= x.max()
        x -= np.log(np.exp(x).sum())
        best = np.argpartition(-x, min(top, len(x) - 1))[:top] if top else np.empty(0, np.int64)
        best = best[np.lexsort((best, -x[best]))]
        return [(each, float(x[each])) for each in (token, *best.tolist())]

    def _draw(self, row: int, sampling: Sampling, position: int, adjustment: Adjustment | None) -> int:
        logits: NDArray[np.floating] = self.values[row]
        if adjustment is not None:
            logits = adjusted(logits, adjustment)
        # the largest is not finite if any of them is NaN, or if no token is allowed
        return draw(logits, sampling, position) if np.isfinite(logits.max()) else NO_TOKEN
