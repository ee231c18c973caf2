"""Weight tables in ONNX Runtime's MatMulNBits layout, in numpy: symmetric scales, one for each output and block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.weights import Floats

#: inputs that share one scale
BLOCK = 32
#: outputs quantised at once, so that what is worked on stays in the cache
ROWS_AT_ONCE = 1024


def quantise8(weight: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """weight float32 [N, K] -> (table uint8 [N, K / BLOCK, BLOCK], scales float32 [N, K / BLOCK]).

    A value is (table - 128) * scale. The largest weight of a block maps to -128, the longer end of the range. K is
    padded with zeros to whole blocks.
    """
    outputs, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    table = np.full((outputs, blocks, BLOCK), 128, np.uint8)
    scales = np.ones((outputs, blocks), np.float32)
    for start in range(0, outputs, ROWS_AT_ONCE):
        rows = weight[start : start + ROWS_AT_ONCE]
        padded = np.zeros((len(rows), blocks * BLOCK), np.float32)
        padded[:, :inputs] = rows
        values = padded.reshape(len(rows), blocks, BLOCK)
        peak = np.take_along_axis(values, np.abs(values).argmax(-1, keepdims=True), -1)
        scale = peak / np.float32(-128)
        scale[scale == 0] = 1
        table[start : start + len(rows)] = np.clip(np.rint(values / scale), -128, 127) + 128
        scales[start : start + len(rows)] = scale[..., 0]
    return table, scales


def dequantise8(table: NDArray[np.uint8], scales: Floats, inputs: int) -> Floats:
    """The inverse: float32 [N, inputs]."""
    values: Floats = (table.astype(np.float32) - 128) * scales[..., None]
    return np.ascontiguousarray(values.reshape(len(table), -1)[:, :inputs])
