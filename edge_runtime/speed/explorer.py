"""The one rule for what is not in use: when to try it, or to draft it for comparison; and the one for choosing.

Whatever it is, it waits for EVERY steps (verdicts), and for more with the cube of what it is behind; and until what it
is expected to lose is paid for: SHARE of the time may be lost to all of it together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_runtime.speed.arms import Arm

#: an arm must promise this many times the tokens per second of the one in use
MARGIN = 1.05
#: steps between two explorations of one thing, where it is as good as what is in use, and tokens of a stream tried
EVERY = 8
#: share of the time that may be lost to exploring
SHARE = 0.03


def best(rates: Mapping[Arm, float], now: Arm, margin: float = MARGIN) -> Arm:
    """Return the fastest arm, or `now` unless another one is faster by the margin. rates: tokens per second."""
    fastest = max(rates, key=lambda arm: rates[arm])
    return fastest if rates[fastest] > margin * rates.get(now, 0.0) else now


@dataclass
class Explorer:
    """saved: seconds that may be lost at present. waited: steps since the last exploration of each thing."""

    saved: float = 0.0
    waited: dict[str, int] = field(default_factory=dict)

    def passed(self, seconds: float) -> None:
        """A step took `seconds`."""
        self.saved += SHARE * seconds

    def lost(self, seconds: float) -> None:
        """What was explored took `seconds` more than its cost was said to be."""
        self.saved -= max(0.0, seconds)

    def due(self, what: str, cost: float, behind: float) -> bool:
        """Return whether to explore `what` after this step. cost: seconds expected to be lost. behind: what is in use
        brings so many times as much."""
        self.waited[what] = self.waited.get(what, 0) + 1
        rarer = max(1.0, behind) ** 3
        if self.waited[what] < EVERY * rarer or self.saved < cost * rarer:
            return False
        self.saved -= cost
        self.waited[what] = 0
        return True
