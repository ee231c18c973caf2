"""The cost curve of a verifier's steps, advertised in WELCOME: devices choose trees and modes by it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

#: most points of a curve on the wire
MAX_POINTS = 16


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step by its tokens (of all sessions), ascending; straight lines between the points."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        """Return the seconds of a step of `tokens` tokens; beyond the last point the curve is extrapolated linearly."""
        if tokens <= self.tokens[0] or len(self.tokens) == 1:
            return self.seconds[0]
        right = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        x0, x1 = self.tokens[right - 1 : right + 1]
        y0, y1 = self.seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    def pack(self) -> bytes:
        """Return uint32 pairs (tokens, microseconds), little-endian."""
        points = zip(self.tokens, self.seconds, strict=True)
        pairs = [(tokens, min(round(1e6 * took), 2**32 - 1)) for tokens, took in points]
        return np.array(pairs[:MAX_POINTS], "<u4").tobytes()


def unpack_costs(data: bytes) -> CostCurve | None:
    """Invert `CostCurve.pack`; None for bytes that are not an ascending curve of positive times."""
    if not data or len(data) % 8:
        return None
    tokens, micros = np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64).T.tolist()
    if sorted(set(tokens)) != tokens or min(micros) < 1:
        return None
    return CostCurve(tuple(tokens), tuple(1e-6 * micro for micro in micros))
