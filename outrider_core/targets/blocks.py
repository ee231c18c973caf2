"""Weight tables in blocks of inputs, each with its own scale, for MatMulNBits. Numpy only.

A weight of 8 bits is scale * (byte - 128), one of 4 bits scale * (8 * nibble - zero point). The 16 levels of a 4-bit
block may start anywhere, so a model whose file stores 4 bits in blocks of 32 keeps its weights unchanged.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.quantise import ROWS_AT_ONCE, ZERO, Doubles, Feedback
from outrider_core.targets.weights import Floats

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]

#: inputs that share a scale
BLOCK = 32
#: distance in bytes between two 4-bit levels
LEVEL_BYTES = 8
#: shares of a block's range to try; the one with the least squared error is used
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)


def quantise8_blocks(weight: Floats) -> tuple[Bytes, Halves, Floats]:
    """Quantise float32 [N, K] to (bytes uint8 [N, blocks, BLOCK], scales [N, blocks], float32 factor of the scales)."""
    x = _blocks(weight)
    scales, factor = _halves(np.abs(x).max(-1) / np.float32(127))
    step = _steps(scales, factor)
    values = np.empty(x.shape, np.uint8)
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        values[rows] = np.clip(np.rint(x[rows] / step[rows, :, None]), -ZERO, ZERO - 1) + ZERO
    return values, scales, factor


def quantise4_blocks(weight: Floats, moments: Doubles | None = None) -> tuple[Bytes, Bytes, Halves, Floats]:
    """Quantise float32 [N, K] to (nibbles uint8 [N, blocks, BLOCK / 2], zero points uint8 [N, blocks], scales, factor).

    The lower nibbles hold the first half of a block, the upper ones the second half. moments: see `quantise8`.
    """
    x = _blocks(weight)
    least, most = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    best, chosen = np.full(least.shape, np.inf, np.float32), np.ones(least.shape, np.float32)
    for share in RANGES:
        step, offset = _grid(least * np.float32(share), (most - least) * np.float32(share / (15 * LEVEL_BYTES)))
        error = np.square(_nearest(x, step[..., None], offset[..., None]) - x).sum(-1)
        better = error < best * np.float32(0.999)  # prefer the whole range when a smaller one is not better
        best, chosen = np.where(better, error, best), np.where(better, np.float32(share), chosen)
    scales, factor = _halves((most - least) * chosen / np.float32(15 * LEVEL_BYTES))
    step, offset = _grid(least * chosen, _steps(scales, factor))
    feedback = Feedback.of(moments)
    if feedback is not None:
        x = _blocks(_rounded(weight, feedback, step, offset))
    levels = np.clip(np.rint((x / step[..., None] - offset[..., None]) / LEVEL_BYTES), 0, 15).astype(np.uint8)
    packed: Bytes = levels[..., : BLOCK // 2] | (levels[..., BLOCK // 2 :] << np.uint8(4))
    return packed, (-offset).astype(np.uint8), scales, factor


def _rounded(weight: Floats, feedback: Feedback, step: Floats, offset: Floats) -> Floats:
    rounded = np.empty(weight.shape, np.float32)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)

        def nearest(column: int, values: Doubles, rows: slice = rows) -> Doubles:
            block = column // BLOCK
            return _nearest(values, step[rows, block], offset[rows, block]).astype(np.float64)

        rounded[rows] = feedback.round(weight[rows], nearest)
    return rounded


def _nearest(x: NDArray[np.floating], step: Floats, offset: Floats) -> NDArray[np.floating]:
    """Round x to the nearest values that 4 bits can store."""
    level = np.clip(np.rint((x / step - offset) / LEVEL_BYTES), 0, 15)
    return (level * LEVEL_BYTES + offset) * step


def _grid(least: Floats, step: Floats) -> tuple[Floats, Floats]:
    """Return (value of one byte, bytes from zero to the lowest level) of each block."""
    step = np.where(step > 0, step, np.float32(1))
    return step, np.clip(np.rint(least / step), -ZERO, 0)


def _blocks(weight: Floats) -> Floats:
    """Reshape [N, K] to [N, blocks, BLOCK], padded with zeros."""
    missing = -weight.shape[1] % BLOCK
    padded = np.pad(weight, ((0, 0), (0, missing))) if missing else weight
    return padded.reshape(len(weight), -1, BLOCK)


def _halves(scales: Floats) -> tuple[Halves, Floats]:
    """Return scales as float16, and a power of two to multiply them by, chosen so that no small scale is lost."""
    largest = float(scales.max(initial=0))
    power = 2.0 ** (math.frexp(largest)[1] - 15) if largest else 1.0
    return (scales / np.float32(power)).astype(np.float16), np.array(power, np.float32)


def _steps(scales: Halves, factor: Floats) -> Floats:
    steps: Floats = scales.astype(np.float32) * factor
    return np.where(steps > 0, steps, np.float32(1))
