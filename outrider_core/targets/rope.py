"""Rotary positions: tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rope:
    """Rotary positions. kind: "default", "linear", "llama3", "yarn" or "longrope"; options: the kind's own numbers."""

    theta: float
    kind: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)

    def tables(self, positions: int, dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (cosines, sines) of positions 0 to `positions` - 1, each float32 [positions, dim / 2]."""
        inverse, gain = self.inverse_frequencies(dim)
        angles = np.arange(positions, dtype=np.float64)[:, None] * inverse
        return (np.cos(angles) * gain).astype(np.float32), (np.sin(angles) * gain).astype(np.float32)

    def inverse_frequencies(self, dim: int) -> tuple[NDArray[np.float64], float]:
        """Return (radians per position of dim / 2 pairs, factor of cosines and sines)."""
        base = 1.0 / self.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "default":
            return base, 1.0
        if self.kind == "linear":
            return base / float(self.options["factor"]), 1.0
        if self.kind == "longrope":
            return base / np.array(self.options["short_factor"], np.float64), self._long_gain()
        if self.kind == "llama3":
            return self._llama3(base), 1.0
        return self._yarn(base, dim)

    def _llama3(self, base: NDArray[np.float64]) -> NDArray[np.float64]:
        factor, low, high = (float(self.options[n]) for n in ("factor", "low_freq_factor", "high_freq_factor"))
        context = float(self.options["original_max_position_embeddings"])
        turns = context * base / (2 * math.pi)  # turns of the circle within the trained context
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        scaled: NDArray[np.float64] = (1 - share) * base / factor + share * base
        return scaled

    def _yarn(self, base: NDArray[np.float64], dim: int) -> tuple[NDArray[np.float64], float]:
        """Compute YaRN, arXiv 2309.00071, as `transformers` does."""
        options = self.options
        factor, context = float(options["factor"]), float(options["original_max_position_embeddings"])
        fast, slow = float(options.get("beta_fast") or 32), float(options.get("beta_slow") or 1)

        def bound(turns: float) -> float:
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = bound(fast), bound(slow)
        if options.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
        inverse = base / factor * ramp + base * (1 - ramp)
        return inverse, self._yarn_gain(factor)

    def _yarn_gain(self, factor: float) -> float:
        def scale(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        given, top, bottom = (self.options.get(n) for n in ("attention_factor", "mscale", "mscale_all_dim"))
        if given is not None:
            return float(given)
        return scale(float(top)) / scale(float(bottom)) if top and bottom else scale(1.0)

    def _long_gain(self) -> float:
        given, factor = self.options.get("attention_factor"), float(self.options["factor"])
        if given is not None:
            return float(given)
        trained = float(self.options["original_max_position_embeddings"])
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0

    @property
    def longest(self) -> int:
        """Positions for which its tables are right. Longer texts use other LongRoPE factors from their start."""
        return int(self.options["original_max_position_embeddings"]) if self.kind == "longrope" else 1 << 24
