"""Progress reports while the 8-bit copy of a target is built."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cloud.telemetry import log

#: seconds between lines of the log
LOG_SECONDS = 5.0
MAKING = "making an 8-bit copy of the target, once"
WAITING = "another process makes the 8-bit copy of the target; waiting for it"


class BuildProgress(Protocol):
    """Reports the progress of the build."""

    def step(self, done: int, steps: int) -> None:
        """Report that `done` of `steps` steps are done."""

    def waiting(self) -> None:
        """Report that another process builds this copy, and this one waits."""


class LogLines:
    """`BuildProgress` in the verifier's log."""

    def __init__(self) -> None:
        self._logged = 0.0

    def step(self, done: int, steps: int) -> None:
        """See BuildProgress.step."""
        if done == steps or time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            log.info(MAKING, steps=f"{done} of {steps}")

    def waiting(self) -> None:
        """See BuildProgress.waiting."""
        log.info(WAITING)


class Bar:
    """`BuildProgress` as a bar on a terminal, and as a line if `console` is not one. Use it as a context manager.

    else_shown: shown on a terminal while nothing is built; "" for nothing.
    """

    def __init__(self, console: Console, else_shown: str = "") -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._console, self._else_shown, self._reported = console, else_shown, False
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(else_shown, total=None)

    def __enter__(self) -> Bar:
        if self._else_shown and self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar.live.is_started:  # else rich writes an empty line if there is no terminal
            self._bar.stop()

    def step(self, done: int, steps: int) -> None:
        """See BuildProgress.step."""
        if not self._reported:
            self._reported = True
            if self._console.is_terminal:
                self._bar.start()
            else:
                self._console.print(MAKING)
        if done < steps:
            self._bar.update(self._task, description=MAKING, completed=done, total=steps)
        elif self._else_shown:
            self._bar.update(self._task, description=self._else_shown, total=None)
        elif self._bar.live.is_started:
            self._bar.stop()

    def waiting(self) -> None:
        """See BuildProgress.waiting."""
        self._console.print(WAITING)
