"""What one row more costs in a step of the drafter, learnt from the steps that it takes anyway.

Where the weights' way through memory decides (processors with instructions for dot products, probably phones), eight
rows take hardly longer than one; elsewhere a row takes nearly a time of its own. What is worth a row depends on it
(spare_rows.py).
"""

from __future__ import annotations

#: until it is known: low enough to save steps where rows are cheap, high enough to lose nothing where they are dear
USUAL = 0.3
#: wider steps say little of those of trees
WIDEST = 16
#: steps of a width behind which the fastest of them is believed
ENOUGH = 3


class RowCost:
    """Of one engine, as a share of the time that a step of one row takes. fixed: it is not learnt."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._steps = dict[int, int]()
        self._fastest = dict[int, float]()
        self.value = USUAL if fixed is None else fixed

    def took(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long. The fastest ones count: others waited for a processor, or read more."""
        if self._fixed is not None or rows > WIDEST:
            return
        self._steps[rows] = self._steps.get(rows, 0) + 1
        self._fastest[rows] = min(seconds, self._fastest.get(rows, seconds))
        known = sorted(width for width, steps in self._steps.items() if steps >= ENOUGH)
        if not known or known[-1] < 2 * known[0]:  # of two that are nearer, chance would decide
            return
        narrow, wide = known[0], known[-1]
        row = max(0.0, (self._fastest[wide] - self._fastest[narrow]) / (wide - narrow))
        one = self._fastest[narrow] - row * (narrow - 1)
        self.value = min(1.0, row / one) if one > 0.0 else 1.0
        if self._fastest[narrow] <= 0.0:  # by a clock that is too coarse
            self.value = USUAL
