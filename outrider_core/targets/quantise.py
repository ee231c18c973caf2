"""Integer weight tables, and the rotation that spreads outliers before rounding. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.weights import Floats, Rows

#: the byte that stands for zero
ZERO = 128
#: outputs quantised at once, few enough to stay in the cache
ROWS_AT_ONCE = 1024
#: inputs whose rounding errors are compensated one by one, before all others are corrected at once
COLUMNS_AT_ONCE = 64
#: added to the moments, as a share of the mean square of an input
DAMPING = 0.01

Doubles = NDArray[np.float64]


def quantise8(weight: Floats | Rows, moments: Doubles | None = None) -> tuple[NDArray[np.int8], Floats]:
    """Quantise float32 [N, K] to (table int8 [N, K], scales float32 [N]); a weight is table * scale of its output.

    moments: sums of x xᵀ over inputs x, float64 [K, K]. With them, weights that are rounded later compensate, as far as
    possible, the errors in the outputs made by those before (GPTQ, arXiv 2210.17323); without, weights are rounded to
    nearest.
    """
    table = np.empty(weight.shape, np.int8)
    scales = np.empty(len(weight), np.float32)
    feedback = Feedback.of(moments)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[start : start + ROWS_AT_ONCE]
        scale = np.abs(rows).max(1) / np.float32(127)
        scale[scale == 0] = 1
        scaled = rows / scale[:, None]
        table[start : start + len(rows)] = np.rint(scaled) if feedback is None else feedback.round(scaled, _whole)
        scales[start : start + len(rows)] = scale
    return table, scales


def as_bytes(table: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return the same weights with ZERO for zero.

    All processors multiply unsigned bytes exactly; x86 without VNNI does not multiply them exactly by signed ones, and
    ONNX Runtime would convert all tables of a graph to this form while it opens.
    """
    return table.view(np.uint8) ^ np.uint8(ZERO)


def _whole(_column: int, values: Doubles) -> Doubles:
    return np.clip(np.rint(values), -127, 127)


class Feedback:
    """The compensation of rounding errors by later weights: GPTQ's triangular factor of the inverse moments."""

    def __init__(self, moments: Doubles) -> None:
        spread = moments.diagonal()
        self._order = np.argsort(-spread, kind="stable")  # the inputs that matter most are rounded first
        damped = moments[np.ix_(self._order, self._order)] + np.eye(len(moments)) * (DAMPING * spread.mean())
        lower = np.linalg.cholesky(damped[::-1, ::-1])  # damped is the product of upper and its transpose
        self._factor = _inverse(lower[::-1, ::-1])

    @classmethod
    def of(cls, moments: Doubles | None) -> Feedback | None:
        """Return None if nothing is known of the inputs."""
        known = moments is not None and np.isfinite(moments).all() and moments.any()
        return cls(moments) if moments is not None and known else None

    def round(self, weight: Floats, nearest: Callable[[int, Doubles], Doubles]) -> Doubles:
        """Round weight [N, K] to storable values. nearest(k, values): the nearest ones to `values` [N] of input k.

        In float64, so that the result does not depend on the number of threads that sum.
        """
        factor, rest = self._factor, np.ascontiguousarray(weight.T[self._order], np.float64)
        rounded = np.empty_like(rest)
        errors = np.empty((COLUMNS_AT_ONCE, rest.shape[1]))
        for start in range(0, len(rest), COLUMNS_AT_ONCE):
            end = min(start + COLUMNS_AT_ONCE, len(rest))
            for column in range(start, end):
                rounded[column] = nearest(int(self._order[column]), rest[column])
                error = errors[column - start]
                error[:] = (rest[column] - rounded[column]) / factor[column, column]
                rest[column + 1 : end] -= factor[column, column + 1 : end, None] * error
            rest[end:] -= factor[start:end, end:].T @ errors[: end - start]
        whole = np.empty_like(rounded)
        whole[self._order] = rounded
        return np.ascontiguousarray(whole.T)


def _inverse(upper: Doubles) -> Doubles:
    """Invert an upper triangular matrix, by halves: a sixth of the time of `np.linalg.inv` for 5,000 rows."""
    size = len(upper)
    if size <= COLUMNS_AT_ONCE:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    inverse = np.zeros_like(upper)
    inverse[:half, :half], inverse[half:, half:] = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    inverse[:half, half:] = -inverse[:half, :half] @ upper[:half, half:] @ inverse[half:, half:]
    return inverse


class Rotation:
    """An orthogonal matrix [size, size] of small entries, so that no channel of a rotated vector stands out.

    A model that computes in rotated coordinates gives the same logits (QuaRot, arXiv 2404.00456): RMS norms without
    gains commute with it, and linear layers absorb it. It is a Hadamard matrix times a cosine transform of the odd part
    of `size`, with signs in front.
    """

    def __init__(self, size: int) -> None:
        power = size & -size
        self.hadamard, odd = hadamard(power), size // power
        self.cosine = _cosine(odd)
        self.signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), size)

    def apply(self, x: Floats) -> Floats:
        """Rotate x [..., size]."""
        power, odd = len(self.hadamard), len(self.cosine)
        blocks = (x * self.signs).reshape(*x.shape[:-1], odd, power) @ self.hadamard
        turned: Floats = np.einsum("ij,...jk->...ik", self.cosine, blocks, optimize=True)
        return turned.reshape(x.shape)


def rotate_blocks(x: Floats, block: int) -> Floats:
    """Multiply each `block` neighbours along x's last axis by a Hadamard matrix."""
    turned: Floats = (x.reshape(*x.shape[:-1], -1, block) @ hadamard(block)).reshape(x.shape)
    return turned


def hadamard_block(size: int) -> int:
    """Return the largest power of two, at most 64, that divides `size` and is smaller; 1 if there is none."""
    power = min(size & -size, 64)
    return power if power < size else power // 2


def hadamard(size: int) -> Floats:
    """Return the orthonormal Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(size))


def _cosine(size: int) -> Floats:
    """Return the orthonormal cosine transform (DCT-II)."""
    index = np.arange(size)
    matrix = np.cos(math.pi * (2 * index + 1) * index[:, None] / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.astype(np.float32)
