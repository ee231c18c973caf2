"""Integer weight tables, and the rotation that spreads outliers before anything is rounded. Numpy only."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.weights import Floats

#: outputs quantised at once, so that what is worked on stays in the cache
ROWS_AT_ONCE = 1024


def quantise8(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """weight float32 [N, K] -> (table int8 [N, K], scales float32 [N]); a weight is table * scale of its output."""
    table = np.empty(weight.shape, np.int8)
    scales = np.empty(len(weight), np.float32)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[start : start + ROWS_AT_ONCE]
        scale = np.abs(rows).max(1) / np.float32(127)
        scale[scale == 0] = 1
        table[start : start + len(rows)] = np.rint(rows / scale[:, None])
        scales[start : start + len(rows)] = scale
    return table, scales


class Rotation:
    """An orthogonal matrix [size, size] whose entries are all small, so that no channel of a rotated vector stands out.

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
        """x [..., size] in rotated coordinates."""
        power, odd = len(self.hadamard), len(self.cosine)
        blocks = (x * self.signs).reshape(*x.shape[:-1], odd, power) @ self.hadamard
        turned: Floats = np.einsum("ij,...jk->...ik", self.cosine, blocks, optimize=True)
        return turned.reshape(x.shape)


def rotate_blocks(x: Floats, block: int) -> Floats:
    """Each `block` neighbours of x's last axis times a Hadamard matrix."""
    turned: Floats = (x.reshape(*x.shape[:-1], -1, block) @ hadamard(block)).reshape(x.shape)
    return turned


def hadamard_block(size: int) -> int:
    """The largest power of two, at most 64, of which `size` is a multiple other than itself; 1 where there is none."""
    power = min(size & -size, 64)
    return power if power < size else power // 2


def hadamard(size: int) -> Floats:
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(size))


def _cosine(size: int) -> Floats:
    """The orthonormal cosine transform (DCT-II)."""
    index = np.arange(size)
    matrix = np.cos(math.pi * (2 * index + 1) * index[:, None] / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.astype(np.float32)
