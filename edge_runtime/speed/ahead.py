"""Whether to continue drafting while waiting for a verdict: a flag of the arm of trees, tried and kept if it pays.

It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_runtime.speed.cost_model import blend
from edge_runtime.speed.explorer import MARGIN, Explorer

#: rounds of a trial
TRIAL_ROUNDS = 3


@dataclass
class Ahead:
    """on: the current choice. fixed: never try the other one. trial: rounds left of a trial of it. rounds: seconds of a
    round without drafting ahead, and with it."""

    on: bool = False
    fixed: bool = False
    trial: int = 0
    rounds: dict[bool, float] = field(default_factory=dict)

    @property
    def now(self) -> bool:
        """Return whether this round drafts ahead."""
        return self.on != bool(self.trial)

    def measured(self, ahead: bool, seconds: float, explorer: Explorer) -> None:
        """A round took so long, drafted ahead or not."""
        if ahead != self.now:
            self.trial = 0
        elif self.trial:
            self.rounds[ahead] = blend(self.rounds.get(ahead), seconds, 1 / (TRIAL_ROUNDS + 1 - self.trial))
            self.trial -= 1
            self.on ^= not self.trial and MARGIN * self.rounds[ahead] < self.rounds[not ahead]
        elif not self.fixed:
            usual = self.rounds[ahead] = blend(self.rounds.get(ahead), seconds)
            other = self.rounds.get(not ahead, usual)
            if explorer.due("ahead", TRIAL_ROUNDS * max(0.0, other - usual), other / usual):
                self.trial = TRIAL_ROUNDS
