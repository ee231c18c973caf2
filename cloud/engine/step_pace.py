"""The recent speed of steps: it limits the prompt tokens of a step, and tells when a step counts as hung."""

from __future__ import annotations

from collections import deque

from cloud.engine.tree_budget import LEAST_PREFILL, TIMED_TOKENS, TreeBudget

#: seconds for the prompt tokens of one step: a step can be neither joined nor cancelled
CHUNK_SECONDS = 2.0
#: a step that takes this many times as long as its tokens took lately counts as hung
HUNG = 30.0


class StepPace:
    """Seconds per token: the slower of the last two large steps, or the estimate of `budget` before there are any."""

    def __init__(self, budget: TreeBudget) -> None:
        self._budget = budget
        self._last: deque[float] = deque(maxlen=2)

    def observe(self, tokens: int, seconds: float) -> None:
        """Note the duration of a step."""
        if tokens >= LEAST_PREFILL:
            self._last.append(seconds / tokens)

    def chunk(self, limit: int) -> int:
        """Return the prompt tokens of the next step, at most `limit`: as many as take CHUNK_SECONDS, at least a few."""
        each = self._token_seconds()
        if each is None:
            return min(limit, TIMED_TOKENS[-1])
        return min(limit, max(LEAST_PREFILL, int(CHUNK_SECONDS / max(each, 1e-9))))

    def longest(self, tokens: int) -> float:
        """Return the seconds after which a step of `tokens` tokens counts as hung, even on a slow machine."""
        return HUNG * max(tokens, LEAST_PREFILL) * (self._token_seconds() or 0.0)

    def _token_seconds(self) -> float | None:
        if self._last:
            return max(self._last)
        most = TIMED_TOKENS[-1]
        return None if self._budget.costs is None else self._budget.seconds(most) / most
