"""Which arm writes: whichever promises most tokens per second, and now and then another one, to know what it brings."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from edge_runtime.speed.explorer import EVERY, best
from edge_runtime.speed.pace import Pace
from edge_runtime.speed.settled import Arm


@dataclass
class Controller:
    """Chooses with hysteresis, from the measurements of `pace`. pinned: always this arm; trees and chains are one then.

    While streaming, the device drafts trees and chains for comparison. While drafting trees, it knows a stream's time
    per token only from the verifier's curve, which may be wrong, and nothing of chains: so it tries them now and then.
    """

    pace: Pace
    pinned: Arm | None = None
    arm: Arm = Arm.TREE
    switches: int = 0
    trial: int = 0  # steps left of the one under way
    _home: Arm = Arm.TREE  # the arm before it
    _better: int = 0  # steps in which another arm promised more

    def begin(self, unknown: bool = True) -> Arm:
        """The arm of an answer. unknown: nothing tells of it yet; otherwise it goes on, on a new link. There is no
        hysteresis in either case."""
        if not unknown:
            self._better = EVERY
            return self.choose()
        home = self._home if self.trial else self.arm
        self.trial = self._better = 0
        self.pace.forget_answer()
        self.arm = best(self._rates(), home, margin=1.0)
        self.switches += self.arm is not home
        return self.arm

    def choose(self) -> Arm:
        """After every verdict, a step."""
        rates = self._rates()
        if self.trial:
            self.trial -= 1
            if not self.trial:
                self._switch(best(rates, self._home))
                self.switches += self.arm is not self._home
            return self.arm
        other = best(rates, self.arm)
        # a delayed token is followed by a burst: a stream is not left for a few of them
        self._better = self._better + 1 if other is not self.arm else 0
        if self._better >= (EVERY if self.arm is Arm.STREAM and self.arm in rates else 1):
            self.switches += 1
            self._switch(other)
        elif self.arm is not Arm.STREAM:
            self._maybe_try(rates)
        return self.arm

    def compares(self, arm: Arm, more: float = 0.0) -> bool:
        """Return whether to draft for `arm` beside the one in use. more: seconds that it costs besides drafting."""
        rates, pace = self.pace.rates(), self.pace
        if self.arm is Arm.CHAIN:  # the drafter is idle
            return pace.explorer.due(arm, 0.0, 1.0)
        behind = rates[self.arm] / rates[arm] if self.arm in rates and arm in rates else 1.0
        return pace.explorer.due(arm, pace.costs.exposed + more, behind)

    def _rates(self) -> dict[Arm, float]:
        rates = self.pace.rates()
        if self.pinned is Arm.STREAM:
            return {Arm.STREAM: rates.get(Arm.STREAM, inf)}
        if self.pinned:
            rates.pop(Arm.STREAM, None)
        return rates

    def _switch(self, arm: Arm) -> None:
        self.arm, self._better = arm, 0

    def _maybe_try(self, rates: dict[Arm, float]) -> None:
        """Try a stream for a few tokens, or one chain, if it is due."""
        now, pace = rates[self.arm], self.pace
        if self.arm is Arm.TREE and pace.chain.ready:
            if Arm.CHAIN not in rates:
                return self._try(Arm.CHAIN, 1)
            behind = now / rates[Arm.CHAIN]
            if pace.explorer.due(Arm.CHAIN, pace.costs.round(1) * max(0.0, 1 - 1 / behind), behind):
                return self._try(Arm.CHAIN, 1)
        if Arm.STREAM in rates:
            stream = rates[Arm.STREAM]
            cost = pace.costs.round(0) - pace.costs.step(0) + EVERY * max(0.0, 1 / stream - 1 / now)
            if pace.explorer.due(Arm.STREAM, cost, now / stream):
                return self._try(Arm.STREAM, EVERY)
        return None

    def _try(self, arm: Arm, steps: int) -> None:
        self._home, self.trial = self.arm, steps
        self._switch(arm)
