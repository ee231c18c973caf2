"""Whether to draft on while a verdict is awaited: tried for a few rounds now and then, and kept where it pays.

It hides drafting. But where device and verifier share processors, it slows the very step that is awaited.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

#: rounds of a trial, and measured rounds before the first one
TRIAL_ROUNDS = 4
#: rounds between trials: at least so many, and twice as many after each trial that changed nothing, up to so many
OFTEN, RARELY = 24, 192


@dataclass
class Ahead:
    """on: the way that is kept. fixed: there is no choice, so that nothing is tried."""

    on: bool = False
    fixed: bool = False
    trying: bool = False
    _until: int = TRIAL_ROUNDS  # rounds until the next trial
    _pause: int = OFTEN
    _tried: list[tuple[float, float]] = field(default_factory=list)

    @property
    def now(self) -> bool:
        """Whether this round drafts ahead."""
        return self.on != self.trying

    def kept(self) -> None:
        """A round was measured as rounds are now."""
        self._until -= 1
        self.trying = self._until <= 0 and not self.fixed

    def tried(self, exposed: float, stretch: float) -> tuple[float, float] | None:
        """A round of a trial: seconds of exposed drafting, and the step's time over the advertised one.

        Returns the means of both at the trial's end, for `ended` to be told what they are worth.
        """
        self._tried.append((exposed, stretch))
        if len(self._tried) < TRIAL_ROUNDS:
            return None
        exposures, stretches = zip(*self._tried, strict=True)
        return fmean(exposures), fmean(stretches)

    def ended(self, better: bool) -> None:
        """Whether the rounds tried were the shorter ones."""
        self.on = self.on != better
        self._pause = OFTEN if better else min(2 * self._pause, RARELY)
        self.trying, self._until, self._tried = False, self._pause, []
