"""Random decisions behind one small interface, so that the distribution of a procedure can be sampled or enumerated.

Drafting and verification take a `Chooser`. `RandomChooser` decides with numpy's generator; `distribution_of` runs the
same code once per combination of decisions and adds up their probabilities: the exact distribution of whatever it
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Outcome = TypeVar("Outcome", bound=Hashable)


class Chooser(Protocol):
    """Takes every random decision of a procedure."""

    def accept(self, probability: float) -> bool:
        """Return True with `probability`; 1 and above is always, 0 and below is never."""

    def draw(self, weights: Floats) -> int:
        """Return an index of weights [n] (non-negative, not all zero, need not sum to 1), as likely as its share."""


class RandomChooser:
    """Decides at random."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def accept(self, probability: float) -> bool:
        return self.generator.random() < probability  # strictly: the generator may return exactly 0

    def draw(self, weights: Floats) -> int:
        mass = _checked(weights).cumsum()
        at = int(np.searchsorted(mass, self.generator.random() * mass[-1], side="right"))  # never one of weight 0
        return min(at, int(np.searchsorted(mass, mass[-1])))  # the product may round up to the whole mass


class _Branch:
    """Follows `script`, then takes the first possible decision and notes the `others`."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.weight = script, 1.0
        self.taken: list[int] = []
        self.others: list[list[int]] = []

    def accept(self, probability: float) -> bool:
        likely = min(1.0, max(0.0, probability))
        return bool(self._take(np.array([1.0 - likely, likely])))

    def draw(self, weights: Floats) -> int:
        return self._take(_checked(weights))

    def _take(self, weights: Floats) -> int:
        possible = np.flatnonzero(weights).tolist()
        if len(self.taken) < len(self.script):
            index = self.script[len(self.taken)]
        else:
            index = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(index)
        self.weight *= float(weights[index] / weights.sum())
        return index


def distribution_of(procedure: Callable[[Chooser], Outcome]) -> dict[Outcome, float]:
    """Return the exact distribution of the results of `procedure`: outcome -> probability.

    The procedure runs once per leaf of its decision tree, so it must depend on nothing but its chooser.
    """
    distribution: dict[Outcome, float] = {}
    pending: list[list[int]] = [[]]
    while pending:
        branch = _Branch(pending.pop())
        outcome = procedure(branch)
        distribution[outcome] = distribution.get(outcome, 0.0) + branch.weight
        pending += branch.others
    return distribution


def _checked(weights: Floats) -> Floats:
    weights = np.asarray(weights, np.float64)  # running sums over a large vocabulary would err in float32
    if not (weights.min() >= 0.0 and 0.0 < weights.sum() < np.inf):
        raise ValueError("weights must be finite, not negative and not all zero")
    return weights
