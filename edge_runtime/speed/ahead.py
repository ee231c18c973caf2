"""Whether to continue drafting while waiting for a verdict: a flag of the arm of trees, tried and kept if it pays.

It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from edge_runtime.speed.explorer import EVERY, MARGIN, Explorer

#: rounds of a trial
TRIAL_ROUNDS = 3


@dataclass
class Ahead:
    """on: the current choice. fixed: never try the other one. trying: a trial of it is under way. Seconds."""

    on: bool = False
    fixed: bool = False
    trying: bool = False
    _lost: float = 0.0  # by the last trial ...
    _behind: float = 1.0  # ... and how many times as long its rounds were
    _kept: list[float] = field(default_factory=list)
    _tried: list[float] = field(default_factory=list)

    @property
    def now(self) -> bool:
        """Return whether this round drafts ahead."""
        return self.on != self.trying

    def measured(self, ahead: bool, seconds: float, explorer: Explorer) -> None:
        """A round took so long, drafted ahead or not."""
        if ahead != self.now:
            self.given_up()
        elif not self.trying:
            self._kept = [*self._kept, seconds][-EVERY:]
            self.trying = not self.fixed and explorer.due("ahead", self._lost, self._behind)
        else:
            self._tried.append(seconds)
            if len(self._tried) == TRIAL_ROUNDS:
                self._ended(median(self._tried), median(self._kept))

    def given_up(self) -> None:
        """A round cannot be told from others: a trial begins again later."""
        self.trying, self._tried = False, []

    def _ended(self, found: float, usual: float) -> None:
        self._lost, self._behind = TRIAL_ROUNDS * max(0.0, found - usual), found / usual
        if MARGIN * found < usual:
            self.on, self._kept = not self.on, self._tried
        self.given_up()
