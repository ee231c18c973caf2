"""Whether to continue drafting while waiting for a verdict: tried for a few rounds now and then, and kept if it pays.

It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

#: rounds of a trial, and measured rounds before the first one; after SURE_ROUNDS, all of them longer than usual by the
#: factor HOPELESS, it ends
TRIAL_ROUNDS, SURE_ROUNDS, HOPELESS = 4, 2, 1.25
#: rounds between trials, at least and at most
OFTEN, RARELY = 24, 400
#: share of the time between two trials that the first of them may have lost
TRIAL_SHARE = 0.02
#: rounds outside of trials that a trial is compared with
COMPARED = 8
#: the rounds tried must be shorter by this factor
MARGIN = 1.03


class Round(NamedTuple):
    """A round of trees in seconds, but for `stretch`: the step's time over the advertised one.

    exposed: between a verdict and the next VERIFY. between: of the wait, what was neither the engine nor its queue.
    """

    exposed: float
    between: float
    stretch: float

    def seconds(self, step: float) -> float:
        """step: the advertised time of a step."""
        return self.exposed + self.between + self.stretch * step


@dataclass
class Ahead:
    """on: the current choice. fixed: never try the other one."""

    on: bool = False
    fixed: bool = False
    _until: int = TRIAL_ROUNDS  # rounds until the next trial
    _kept: list[Round] = field(default_factory=list)
    _tried: list[Round] = field(default_factory=list)

    @property
    def trying(self) -> bool:
        """Return whether a trial is under way."""
        return self._until <= 0 and not self.fixed

    @property
    def now(self) -> bool:
        """Return whether this round drafts ahead."""
        return self.on != self.trying

    def measured(self, ahead: bool, measured: Round, step: float) -> Round | None:
        """A round was drafted ahead, or not. step: seconds of an advertised step for a tree as they are.

        Returns what rounds are like from now on, where a trial has ended that showed them to be shorter.
        """
        if ahead != self.now:
            self.given_up()
        elif not self.trying:
            self._until -= 1
            self._kept = [*self._kept, measured][-COMPARED:]
        else:
            self._tried.append(measured)
            if len(self._tried) == TRIAL_ROUNDS or self._hopeless(step):
                return self._ended(step)
        return None

    def given_up(self) -> None:
        """A round cannot be told from others: a trial begins again later."""
        if self.trying:
            self._until, self._tried = TRIAL_ROUNDS, []

    def _hopeless(self, step: float) -> bool:
        best = min(each.seconds(step) for each in self._tried)
        return len(self._tried) >= SURE_ROUNDS and best > HOPELESS * _median(self._kept).seconds(step)

    def _ended(self, step: float) -> Round | None:
        found, usual = _median(self._tried), _median(self._kept).seconds(step)
        lost = len(self._tried) * (found.seconds(step) - usual)
        self._until = max(OFTEN, min(RARELY, math.ceil(lost / (TRIAL_SHARE * usual))))
        better = MARGIN * found.seconds(step) < usual
        if better:
            self.on, self._kept = not self.on, self._tried
        self._tried = []
        return found if better else None


def _median(rounds: Sequence[Round]) -> Round:
    return Round(*map(median, zip(*rounds, strict=True)))
