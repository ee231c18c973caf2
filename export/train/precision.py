"""Choose the number format for training a drafter: the one that this machine multiplies faster."""

from __future__ import annotations

import time
from typing import Literal

import torch
from torch.nn import functional

#: shape of a product like most of a training step: tokens, inputs, outputs
PRODUCT = (512, 576, 1536)
REPEATS = 5
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


def training_dtype(device: str) -> Dtype:
    """Return "bfloat16", or "float32" on a CPU that multiplies it faster, as those without AVX-512 do."""
    if device != "cpu":
        return "bfloat16"
    return min(DTYPES, key=lambda name: _seconds(getattr(torch, name)))


def _seconds(dtype: torch.dtype) -> float:
    """Time several products and return the fastest; the first one also sets up."""
    tokens, inputs, outputs = PRODUCT
    x, weight = torch.ones(tokens, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    took = []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        functional.linear(x, weight)
        took.append(time.perf_counter() - begun)
    return min(took[1:])
