"""Learn the row cost of the drafter's engine from the steps that it takes anyway.

If memory bandwidth decides (processors with instructions for dot products, probably phones), eight rows take hardly
longer than one; elsewhere each row takes nearly as long as a step of its own. How many spare rows are worthwhile
depends on it (spare_rows.py).
"""

from __future__ import annotations

#: value until it is known: low enough to save steps if rows are cheap, high enough to lose nothing if they are not
USUAL = 0.3
#: wider steps predict little about those of trees
WIDEST = 16
#: steps of one width before their fastest is trusted
ENOUGH = 3


class RowCost:
    """The row cost of one engine, as a share of the time of a step with one row. fixed: it is not learnt."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._steps = dict[int, int]()
        self._fastest = dict[int, float]()
        self.value = USUAL if fixed is None else fixed

    def took(self, rows: int, seconds: float) -> None:
        """Note the time of a step of `rows` rows.

        The fastest ones count: others waited for a processor, or read more.
        """
        if self._fixed is not None or rows > WIDEST:
            return
        self._steps[rows] = self._steps.get(rows, 0) + 1
        self._fastest[rows] = min(seconds, self._fastest.get(rows, seconds))
        known = sorted(width for width, steps in self._steps.items() if steps >= ENOUGH)
        if not known or known[-1] < 2 * known[0]:  # closer widths differ by chance
            return
        narrow, wide = known[0], known[-1]
        row = max(0.0, (self._fastest[wide] - self._fastest[narrow]) / (wide - narrow))
        one = self._fastest[narrow] - row * (narrow - 1)
        self.value = min(1.0, row / one) if one > 0.0 else 1.0
        if self._fastest[narrow] <= 0.0:  # the clock is too coarse
            self.value = USUAL
