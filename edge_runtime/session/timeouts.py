"""Time limits of the device. Seconds on any monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RoundTimer:
    """Time until a reply is overdue: smoothed round time plus four deviations (as TCP does, RFC 6298)."""

    floor: float = 0.25
    ceiling: float = 3.0
    first: float = 2.0  # before any measurement
    smoothed: float | None = None
    deviation: float = 0.0

    def add(self, seconds: float) -> None:
        if self.smoothed is None:
            self.smoothed, self.deviation = seconds, seconds / 2
            return
        self.deviation += 0.25 * (abs(seconds - self.smoothed) - self.deviation)
        self.smoothed += 0.125 * (seconds - self.smoothed)

    def timeout(self) -> float:
        if self.smoothed is None:
            return self.first
        return min(self.ceiling, max(self.floor, self.smoothed + 4 * self.deviation))


@dataclass(frozen=True)
class Patience:
    """Limits in seconds.

    open: extra time for a verdict right after OPEN, when the server may have to prefill the whole conversation;
    connect: wait of a new answer for a first link; silence: time past the deadline before a silent link is replaced;
    offline: wait of an answer for the target once offline writing has stopped.
    """

    open: float = 3.0
    connect: float = 1.0
    silence: float = 1.0
    offline: float = 300.0
