"""Feature rows on the wire: 4 bits a value, with one float16 scale per (token, K|V, head).

A block of n rows is the scales [n, 2, heads] float16, then the values [n, 2, heads, ceil(head_dim / 2)] bytes, both
little-endian and row-major. A byte holds two values of a head, the first in its low half, -7..7 in two's complement.
Symmetric: scale = absmax / 7. Half the bytes of int8 for about a hundredth of the accepted tokens (`docs/design.md`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: the largest value of a row, in scales
LARGEST = 7
#: divides rows whose scale is 0: about the smallest positive number of a float16
LEAST_DIVISOR = 6e-8


class RowShape(NamedTuple):
    """heads: the drafter's cross-attention KV heads; head_dim: values per head."""

    heads: int
    head_dim: int

    @property
    def scale_bytes(self) -> int:
        """Bytes of one row's scales."""
        return 2 * self.heads * 2

    @property
    def value_bytes(self) -> int:
        """Bytes of one row's values."""
        return 2 * self.heads * (self.head_dim + 1 >> 1)

    @property
    def nbytes(self) -> int:
        """Bytes of one packed row."""
        return self.scale_bytes + self.value_bytes


#: shape without a drafter, for which no rows travel
NO_ROWS = RowShape(1, 1)


def pack_rows(rows: NDArray[np.floating]) -> bytes:
    """Quantise and pack rows [n, 2, heads, head_dim]."""
    rows = np.asarray(rows, np.float32)
    absmax = np.abs(rows).max(-1) if rows.size else np.zeros(rows.shape[:3], np.float32)
    scales = np.minimum(absmax / LARGEST, np.finfo(np.float16).max).astype("<f2")
    divisor = np.maximum(scales.astype(np.float32), np.float32(LEAST_DIVISOR))[..., None]
    values = np.clip(np.rint(rows / divisor), -LARGEST, LARGEST).astype(np.int8).view(np.uint8) & 15
    values = np.pad(values, [(0, 0)] * 3 + [(0, values.shape[-1] % 2)])
    return scales.tobytes() + (values[..., ::2] | values[..., 1::2] << 4).tobytes()


def unpack_rows(data: bytes | memoryview, shape: RowShape) -> NDArray[np.float32]:
    """Unpack float32 rows [n, 2, heads, head_dim]. Raises ValueError on a wrong length."""
    count, rest = divmod(len(data), shape.nbytes)
    if rest:
        raise ValueError(f"{len(data)} bytes of rows are not a multiple of {shape.nbytes}")
    split = count * shape.scale_bytes
    scales = np.frombuffer(data[:split], "<f2").astype(np.float32).reshape(count, 2, shape.heads, 1)
    width = shape.head_dim + 1 >> 1
    pairs = np.frombuffer(data[split:], np.int8).reshape(count, 2, shape.heads, width, 1)
    values = np.concatenate([pairs << 4 >> 4, pairs >> 4], -1)  # shifts of int8 keep the sign
    return values.reshape(count, 2, shape.heads, 2 * width)[..., : shape.head_dim] * scales
