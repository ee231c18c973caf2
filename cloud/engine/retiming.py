"""Time steps again while the verifier is idle: the machine may have been busy when it started."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from cloud.engine.kvpool import GRANULE, KVPool
from cloud.engine.runner import ModelRunner
from cloud.engine.tree_budget import TreeBudget, fastest_curve, timed_step

#: sizes whose step should take longer than this are not timed again: requests that come meanwhile wait for it
LONGEST_WAIT = 0.5
#: runs of each size; the fastest was disturbed least
RUNS = 2
OWNER = b"timing"  # no session's id is as short


class Retiming:
    """Updates the cost curve of `budget`, one size a call, then the costs common to all sizes.

    Free rows of the pool are used; those of sessions stay as they are.
    """

    def __init__(
        self, runner: ModelRunner, pool: KVPool, budget: TreeBudget, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._runner, self._pool, self._budget, self._clock = runner, pool, budget, clock
        self._runs: dict[int, deque[float]] = {}
        self._due, self._took = list[int](), dict[int, float]()
        self._ratio = 1.0  # time of the last size, as a multiple of that in `budget`

    def tick(self) -> None:
        """Time the next size, or do nothing if steps were never timed or the pool has no room."""
        costs = self._budget.costs
        if costs is None:
            return
        if not self._due:
            self._due, self._ratio, self._took = list(costs.curve.tokens), 1.0, {}
        tokens = self._due[0]
        if not self._pool.fits(OWNER, GRANULE + tokens):
            if GRANULE + tokens > self._pool.rows:
                self._due.pop(0)
            return
        self._due.pop(0)
        if self._ratio * costs.at(tokens) <= LONGEST_WAIT:
            self._took[tokens] = self._time(tokens)
            self._ratio = self._took[tokens] / costs.at(tokens)
        if not self._due and self._took:
            self._runner.rest()
            for size, seconds in self._took.items():
                self._runs.setdefault(size, deque(maxlen=RUNS)).append(seconds)
            known = dict(zip(costs.curve.tokens, costs.curve.seconds, strict=True))
            known |= {size: min(runs) for size, runs in self._runs.items()}
            self._budget.costs, self._budget.slowdown = replace(costs, curve=fastest_curve(known)), 1.0
            self._budget.choose()

    def _time(self, tokens: int) -> float:
        self._pool.reserve(OWNER, GRANULE + tokens, set())
        base = self._pool.extent(OWNER).base
        try:
            return min(timed_step(self._runner, base, GRANULE, tokens, self._clock) for _ in range(RUNS))
        finally:
            self._pool.release(OWNER)
