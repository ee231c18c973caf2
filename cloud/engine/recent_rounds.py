"""What rounds brought and waited for lately. WELCOME says it, so that a new device begins right."""

from __future__ import annotations

import time
from math import inf
from statistics import fmean

from cloud.engine.outcome import StepOutcome
from cloud.engine.tree_budget import SMOOTHING

#: steps of streams that are told of together: from fewer an account could read what another one's text repeats, and
#: a new device's text is none of theirs
STREAM_STEPS = 200
#: after so many seconds without another one, earlier waiting times say nothing any more
IDLE_SECONDS = 5.0


class RecentRounds:
    """Learns from every step. Any thread may read. stream_tokens: of a stream's step, on average over the last complete
    STREAM_STEPS steps with streams of any session; 0.0: so many have not run yet."""

    def __init__(self) -> None:
        self.stream_tokens, self._untold = 0.0, list[float]()  # tokens of a stream's step, since it was last set
        self._queue, self._ended = 0.0, -inf  # when its last round ended, by time.perf_counter()

    @property
    def queue_seconds(self) -> float:
        """How long a round waited for the engine between its arrival and its step, smoothed; 0.0 if none has run for a
        while."""
        return 0.0 if self._idle(time.perf_counter()) else self._queue

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step, before it is answered."""
        if streams := [1 + len(path.accepted) for _, request, path in outcome.rounds() if not request.is_drafted]:
            self._untold.append(fmean(streams))
            if len(self._untold) == STREAM_STEPS:
                self.stream_tokens, self._untold = fmean(self._untold), []
        # the later steps of a stream wait for no message, and so for hardly anything
        arrived = [each for _, each, _ in outcome.rounds() if not (each.unready or each.generated)]
        if not arrived:
            return
        if self._idle(outcome.began):
            self._queue = 0.0
        self._queue += SMOOTHING * (fmean(map(outcome.queue_seconds, arrived)) - self._queue)
        self._ended = outcome.began + outcome.seconds

    def _idle(self, now: float) -> bool:
        return now - self._ended > IDLE_SECONDS
