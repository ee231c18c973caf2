"""The device on which tests marked `gpu` run the target: `make test-gpu` runs the same tests on CUDA."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cpu"))
#: why nothing can run on it here; None where it can
MISSING = "torch sees no CUDA device here" if DEVICE.type == "cuda" and not torch.cuda.is_available() else None
#: how far float64 logits there are from a CPU's: rotary angles are float32, whose cosines differ in the last bit
EXACT = 1e-10 if DEVICE.type == "cpu" else 1e-5
