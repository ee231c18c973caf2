"""Keyed Gumbel noise, specified bit for bit, so that every port and replica draws the same token.

All arithmetic on `h`, `k` and the inputs is modulo 2**32. `fmix32` is MurmurHash3's finaliser.

    k = fmix32(seed_low + 0x9E3779B9)
    k = fmix32(k ^ seed_high)
    k = fmix32(k ^ fmix32(position + 0x7F4A7C15))
    h = fmix32(k ^ fmix32(token + 0x9E3779B9))
    u = (h + 0.5) / 2**32            float64, never 0 or 1
    g = -ln(-ln(u))                  float64

`position` is the absolute index of the token being drawn. Vectors: `outrider_core/protocol/vectors/noise.json`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFFFFFF


def fmix32(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's 32-bit finaliser, elementwise on uint32."""
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _fmix32_int(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B & _MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


@lru_cache(maxsize=4)
def _mixed_tokens(vocab: int) -> NDArray[np.uint32]:
    return fmix32(np.arange(vocab, dtype=np.uint32) + np.uint32(0x9E3779B9))


def noise_key(seed: int, position: int) -> int:
    """The 32-bit key of one position under a 64-bit `seed`."""
    k = _fmix32_int((seed & _MASK) + 0x9E3779B9 & _MASK)
    k = _fmix32_int(k ^ (seed >> 32 & _MASK))
    return _fmix32_int(k ^ _fmix32_int(position + 0x7F4A7C15 & _MASK))


def gumbel_noise(seed: int, position: int, vocab: int) -> NDArray[np.float64]:
    """Standard Gumbel noise [vocab] for every token id at `position`."""
    return _gumbel(fmix32(_mixed_tokens(vocab) ^ np.uint32(noise_key(seed, position))))


def gumbel_noise_at(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """The same noise for the given token ids only (any shape)."""
    mixed = fmix32(np.asarray(tokens).astype(np.uint32) + np.uint32(0x9E3779B9))
    return _gumbel(fmix32(mixed ^ np.uint32(noise_key(seed, position))))


def _gumbel(h: NDArray[np.uint32]) -> NDArray[np.float64]:
    u: NDArray[np.float64] = (h.astype(np.float64) + 0.5) / 4294967296.0
    return -np.log(-np.log(u))
