"""Notices an engine thread that hangs in a step."""

from __future__ import annotations

import time


class Watchdog:
    """Written by the engine thread, read by any other. seconds: a step that takes longer may count as hung."""

    def __init__(self, seconds: float) -> None:
        self.busy, self.seconds = False, seconds
        self._began, self._longest = time.monotonic(), 0.0

    def start(self, longest: float = 0.0) -> None:
        """Note the start of work, or of its next step. longest: seconds it may take on this machine."""
        self._longest = longest
        self.busy, self._began = True, time.monotonic()

    def end(self) -> None:
        """Note the end of the work."""
        self.busy = False

    @property
    def hung(self) -> bool:
        """Return whether the present work has taken too long."""
        return self.busy and time.monotonic() - self._began > max(self.seconds, self._longest)
