"""The feature rows of one conversation on a device, which the drafter's cross-attention reads."""

from __future__ import annotations

import numpy as np

from outrider_core.drafting.engines import Floats, Ints
from outrider_core.protocol.rows import RowShape


class FeatureRows:
    """Rows by position; the newest ones without a gap are read.

    null_row: [2 (K, V), kv_heads, head_dim], read before the text's rows; None: the drafter has none.
    """

    def __init__(self, shape: RowShape, max_context: int, null_row: Floats | None = None) -> None:
        # The row of position p is stored at p + 1; the slot before the first visible row takes the null row, so that
        # cross-attention reads one slice and nothing is copied.
        self.keys = np.zeros((1 + max_context, *shape), np.float32)
        self.values = np.zeros_like(self.keys)
        self.filled = np.zeros(max_context, bool)
        self.null_row = null_row

    def add(self, positions: Ints, rows: Floats) -> None:
        """Add rows [n, 2, kv_heads, head_dim] of the tokens at `positions` [n]."""
        self.keys[positions + 1], self.values[positions + 1] = rows[:, 0], rows[:, 1]
        self.filled[positions] = True

    def keep(self, length: int) -> None:
        """Forget the rows of positions `length` and above."""
        self.filled[length:] = False

    def visible(self) -> tuple[Floats, Floats]:
        """Return keys and values [m, kv_heads, head_dim] that cross-attention reads: the null row and the newest rows.

        Rows count back to the first gap (the verifier sends the newest first). A drafter without a null row reads one
        row of zeros until the first row arrives. Both are views.
        """
        filled = np.flatnonzero(self.filled)
        start = end = 0
        if len(filled):
            end = int(filled[-1]) + 1
            gaps = np.flatnonzero(~self.filled[:end])
            start = int(gaps[-1]) + 1 if len(gaps) else 0
            if self.null_row is None:
                return self.keys[start + 1 : end + 1], self.values[start + 1 : end + 1]
        self.keys[start], self.values[start] = (0.0, 0.0) if self.null_row is None else self.null_row
        return self.keys[start : end + 1], self.values[start : end + 1]
