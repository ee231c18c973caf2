"""Weights of a drafter in blocks of 4 or 8 bits, as a bundle stores them. Numpy only.

The layout is that of ONNX Runtime's MatMulNBits, so that one table serves the LM head and, read row by row, the token
embedding: an embedding tied to the head is stored once. Scales are symmetric, one per output and block of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
#: inputs that share one scale; smaller blocks are closer to float32 and larger on disk
BLOCKS = {4: 32, 8: 64}
#: most bits of quantised embedding rows outside the draft vocabulary
RARE_BITS = 4
#: shares of a block's largest weight to try as its range; the one with the least squared error is used
RANGES = (1.0, 0.93, 0.86, 0.79, 0.72)
#: rows quantised at once: few enough to stay in the cache and to bound the memory of a 128k-row table
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Profile:
    """Number formats of the device half's weights.

    quant: "fp32", "fp16", "int8" or "int4" (linears). embedding_bits: 32, 16, 8 or 4 (embedding and LM head; if values
    are quantised, the rows of tokens that the device never drafts take `RARE_BITS`, as they are rare).
    """

    quant: str
    embedding_bits: int

    @property
    def bits(self) -> int:
        return BITS[self.quant]


def packed_bytes(weights: int, bits: int) -> int:
    """Return the bytes of `weights` values in `bits`, and of their float32 scales."""
    return weights * bits // 8 + (weights * 4 // BLOCKS[bits] if bits in BLOCKS else 0)


def rare_bits(bits: int) -> int:
    """Return the bits of the embedding outside the draft vocabulary."""
    return min(bits, RARE_BITS) if bits in BLOCKS else bits


def quantise(weight: Floats, bits: int) -> tuple[Bytes, Floats]:
    """Quantise float32 [N, K] to (packed uint8 [N, blocks, block * bits / 8], scales float32 [N, blocks]).

    Values are stored with an offset of 2^(bits - 1), two 4-bit values a byte, the even one low. The largest
    weight of a block maps to the lower end of the range (which reaches one step further than the upper one), and
    ranges a little smaller than it are tried too. The last block is padded with zeros.
    """
    block, blocks = BLOCKS[bits], -(-weight.shape[1] // BLOCKS[bits])
    packed = np.empty((len(weight), blocks, block * bits // 8), np.uint8)
    scales = np.empty((len(weight), blocks), np.float32)
    for first in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        packed[rows], scales[rows] = _quantise(weight[rows], bits, block)
    return packed, scales


def _quantise(weight: Floats, bits: int, block: int) -> tuple[Bytes, Floats]:
    half = 2 ** (bits - 1)
    padded = np.pad(weight.astype(np.float32), ((0, 0), (0, -weight.shape[1] % block)))
    x = padded.reshape(len(weight), -1, block)
    peak = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best_scale, best_error = np.zeros_like(peak), np.full_like(peak, np.inf)
    for share in RANGES if bits < 8 else RANGES[:1]:
        scale = peak * np.float32(-share / half)
        scale[scale == 0] = 1
        error = np.square(np.clip(np.rint(x / scale), -half, half - 1) * scale - x).sum(-1, keepdims=True)
        better = error < best_error
        best_scale, best_error = np.where(better, scale, best_scale), np.where(better, error, best_error)
    values = (np.clip(np.rint(x / best_scale), -half, half - 1) + half).astype(np.uint8)
    packed = values if bits == 8 else values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    return packed, best_scale[..., 0]


def dequantise(packed: Bytes, scales: Floats, inputs: int) -> Floats:
    """Invert `quantise`: float32 [N, inputs]."""
    bits = 8 if packed.shape[-1] == BLOCKS[8] else 4
    values: NDArray[Any] = packed
    if bits == 4:
        values = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(*packed.shape[:-1], -1)
    floats = (values.astype(np.float32) - np.float32(2 ** (bits - 1))) * scales[..., None]
    return floats.reshape(len(packed), -1)[:, :inputs]


def places(ids: NDArray[Any], vocabulary: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return (place int32 [vocab], tokens that are not drafted): a drafted token's row is its place in `ids`."""
    others = np.setdiff1d(np.arange(vocabulary), ids)
    place = np.empty(vocabulary, np.int32)
    place[ids], place[others] = np.arange(len(ids)), np.arange(len(ids), vocabulary)
    return place, others
