"""Feature rows on the wire: int8 with one float16 scale per (token, K|V, head).

A block of n rows is the scales [n, 2, heads] float16, then the values [n, 2, heads, head_dim] int8, both
little-endian and row-major. Symmetric: scale = absmax / 127.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RowShape(NamedTuple):
    """heads: the drafter's cross-attention KV heads; head_dim: values per head."""

    heads: int
    head_dim: int

    @property
    def nbytes(self) -> int:
        """Bytes of one packed row."""
        return 2 * self.heads * (self.head_dim + 2)


def pack_rows(rows: NDArray[np.floating]) -> bytes:
    """Quantise and pack rows [n, 2, heads, head_dim]."""
    rows = np.asarray(rows, np.float32)
    absmax = np.abs(rows).max(-1) if rows.size else np.zeros(rows.shape[:3], np.float32)
    scales = (absmax / 127.0).astype("<f2")
    divisor = np.maximum(scales.astype(np.float32), np.float32(6e-8))[..., None]
    values = np.clip(np.rint(rows / divisor), -127, 127).astype(np.int8)
    return scales.tobytes() + values.tobytes()


def unpack_rows(data: bytes | memoryview, shape: RowShape) -> NDArray[np.float32]:
    """The inverse: float32 rows [n, 2, heads, head_dim]. Raises ValueError on a wrong length."""
    count, rest = divmod(len(data), shape.nbytes)
    if rest:
        raise ValueError(f"{len(data)} bytes of rows are no multiple of {shape.nbytes}")
    split = count * 2 * shape.heads * 2
    scales = np.frombuffer(data[:split], "<f2").astype(np.float32).reshape(count, 2, shape.heads, 1)
    values = np.frombuffer(data[split:], np.int8).reshape(count, 2, shape.heads, shape.head_dim)
    return values * scales
