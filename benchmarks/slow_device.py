"""A drafter's engine whose steps take at least a stated time, to stand for a slower device with cores of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from outrider_core.drafting.engines import Engine, Floats


@dataclass(frozen=True)
class SlowEngine:
    """`engine` with steps of at least `seconds`. The wait takes no processor time from the target beside it."""

    engine: Engine
    seconds: float

    def step(self, *inputs: Any) -> tuple[Floats, Floats, Floats]:
        """See Engine.step."""
        end = time.perf_counter() + self.seconds
        outputs = self.engine.step(*inputs)
        time.sleep(max(0.0, end - time.perf_counter()))
        return outputs
