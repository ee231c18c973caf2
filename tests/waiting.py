"""How tests wait: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds after which whatever a test waits for counts as hung. This ends a test that would never end and measures
#: nothing: on a machine with ten busy processes for each core, what takes five seconds takes a minute.
HANG = 300.0


def until(condition: Callable[[], object]) -> bool:
    """Wait until `condition()` holds; return whether it did before HANG."""
    end = time.monotonic() + HANG
    while not (holds := bool(condition())) and time.monotonic() < end:
        time.sleep(0.01)
    return holds
