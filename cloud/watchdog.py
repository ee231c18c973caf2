"""Notices an engine thread that hangs in a step."""

from __future__ import annotations

import time

#: a step that takes longer counts as hung
HUNG_SECONDS = 120.0


class Watchdog:
    """Written by the engine thread, read by any other."""

    def __init__(self) -> None:
        self.busy = False
        self._began = time.monotonic()

    def begin(self) -> None:
        """Work begins, or goes on with the next step."""
        self.busy, self._began = True, time.monotonic()

    def end(self) -> None:
        """Work is over."""
        self.busy = False

    @property
    def hung(self) -> bool:
        """Whether the present work has taken longer than HUNG_SECONDS."""
        return self.busy and time.monotonic() - self._began > HUNG_SECONDS
