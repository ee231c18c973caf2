"""Calibrate a drafter: find the temperature at which its probabilities tell how often it is right (arXiv 1706.04599).

A drafter learns the target's distribution. But greedy decoding always takes the likeliest token, so the drafter's first
choice is the target's more often than its probability says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: temperatures to try
TEMPERATURES = tuple(round(0.3 + 0.05 * step, 2) for step in range(35))
BINS = 15
#: fewer choices than this make the temperature noise
LEAST_ROWS = 500


class Calibration(NamedTuple):
    """temperature: the one of TEMPERATURES with the least -log p of the target's choices. error, error_before:
    expected calibration errors of the first choice at it and at 1, mean gaps between confidence and accuracy over bins
    of equal width."""

    temperature: float
    error: float
    error_before: float


class Calibrator:
    """Collects a drafter's logits and the target's choices."""

    def __init__(self) -> None:
        self._nats = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
        self._confidence: list[Tensor] = []  # [temperatures, rows]
        self._right: list[Tensor] = []  # [rows]

    def add(self, logits: Tensor, chosen: Tensor) -> None:
        """Add logits [rows, vocab] of the drafter, and chosen [rows], the columns of the target's choices."""
        x = logits.float()
        own, best = x.gather(1, chosen[:, None])[:, 0], x.amax(1)
        confidence = []
        for number, temperature in enumerate(TEMPERATURES):
            total = (x / temperature).logsumexp(1)
            self._nats[number] += (total - own / temperature).sum().double().cpu()
            confidence.append((best / temperature - total).exp().cpu())
        self._confidence.append(torch.stack(confidence))
        self._right.append((own >= best).cpu())

    def result(self) -> Calibration | None:
        """Return the calibration; None if there are too few choices."""
        if sum(map(len, self._right)) < LEAST_ROWS:
            return None
        one, number = TEMPERATURES.index(1.0), int(self._nats.argmin())
        confidence, right = torch.cat(self._confidence, 1), torch.cat(self._right).double()
        errors = [_error(confidence[place].double(), right) for place in (number, one)]
        return Calibration(TEMPERATURES[number], *(round(error, 4) for error in errors))


def _error(confidence: Tensor, right: Tensor) -> float:
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, right - confidence)
    return float(gaps.abs().sum() / len(right))
