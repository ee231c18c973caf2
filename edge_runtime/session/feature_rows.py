"""The feature rows that the drafter holds."""

from __future__ import annotations

import numpy as np

from edge_runtime.session.actions import AddRows
from outrider_core.protocol.rows import RowShape, unpack_rows


class RowsSeen:
    """Records for each position of a text whether the drafter holds its feature row."""

    def __init__(self, held: bytes | bytearray = b"") -> None:
        self._held = bytearray(held)  # 1: held

    def up_to(self, length: int) -> RowsSeen:
        """Return the record of the first `length` positions."""
        return RowsSeen(self._held[:length])

    def leading(self) -> int:
        """Return how many of the first positions are held without a gap."""
        gap = self._held.find(0)
        return len(self._held) if gap < 0 else gap

    def add(self, start: int, data: bytes, shape: RowShape, max_context: int, most: int | None = None) -> list[AddRows]:
        """Unpack rows of positions `start` and on, at most `most` of them.

        Returns those that are new to the drafter. Rows that do not unpack or lie outside of 0..`max_context` are
        ignored: rows only ever cost speed.
        """
        try:
            rows = unpack_rows(data, shape)[:most]
        except ValueError:
            return []
        end = start + len(rows)
        if start < 0 or end > max_context:
            return []
        if len(self._held) < end:
            self._held.extend(bytes(end - len(self._held)))
        new = [i for i in range(len(rows)) if not self._held[start + i]]
        if not new:
            return []
        for i in new:
            self._held[start + i] = 1
        return [AddRows(start + np.array(new), rows[new])]
