"""Feature rows, which the drafter's cross-attention reads for verified tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_core.protocol.rows import NO_ROWS, RowShape

#: rows of a stream that are computed and sent together: one at a time they slow a small target down
STREAMED_ROWS = 8
#: a device that lacks more rows than these, without having requested any, is sent the newest alone
MOST_LACKING = 64


class NoServerHalf:
    """`cloud.engine.runner.FeatureProducer` without a drafter, or without keys and values.

    Its rows are zeros, and are not sent.
    """

    shape: RowShape = NO_ROWS
    layers: tuple[int, ...] = ()

    def rows(self, kv: Any, positions: Sequence[int]) -> NDArray[np.float32]:
        """See FeatureProducer.rows; kv is not read."""
        return np.zeros((len(positions), 2, *NO_ROWS), np.float32)


class PackedRows:
    """Packed rows (`outrider_core.protocol.rows`) of positions start..start+len-1.

    A row is packed once and kept packed, so that it is sent the same every time.
    """

    def __init__(self, shape: RowShape, start: int = 0) -> None:
        self.shape, self.start = shape, start
        self._scales, self._values = bytearray(), bytearray()

    def __len__(self) -> int:
        return len(self._scales) // self.shape.scale_bytes

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self)

    def append(self, packed: bytes) -> None:
        """Add a packed block of rows after the last."""
        split = len(packed) // self.shape.nbytes * self.shape.scale_bytes
        self._scales += packed[:split]
        self._values += packed[split:]

    def truncate(self, stop: int) -> None:
        """Drop the rows of positions `stop` and above."""
        count = max(0, stop - self.start)
        del self._scales[count * self.shape.scale_bytes :]
        del self._values[count * self.shape.value_bytes :]

    def block(self, start: int, stop: int) -> bytes:
        """Return positions start..stop-1 as one packed block."""
        begin, end = start - self.start, stop - self.start
        scales = self._scales[begin * self.shape.scale_bytes : end * self.shape.scale_bytes]
        return bytes(scales + self._values[begin * self.shape.value_bytes : end * self.shape.value_bytes])

    def copy(self, start: int, stop: int) -> PackedRows:
        """Copy positions start..stop-1, for use in another thread."""
        copy = PackedRows(self.shape, start)
        copy.append(self.block(start, stop))
        return copy
