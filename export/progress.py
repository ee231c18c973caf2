"""Progress of long work: a bar on a terminal, or a line now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: seconds between lines without a terminal
LOG_EVERY = 30.0


class Meter:
    """Use as `with Meter("train", total) as meter: meter.update(done, "820 tokens/s")`."""

    def __init__(self, name: str, total: int, quiet: bool = False) -> None:
        self.name, self.total, self.done, self.note = name, total, 0, ""
        self._quiet = quiet  # another process reports
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=self._console,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=total, note="")
        self._logged = time.monotonic()

    def __enter__(self) -> Meter:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()
        else:
            self._log()

    def update(self, done: int, note: str, total: int | None = None) -> None:
        """Show `done` of `total`; by default of the last total."""
        self.done, self.note, self.total = done, note, total or self.total
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, total=self.total, note=note)
        elif time.monotonic() - self._logged > LOG_EVERY:
            self._log()

    def _log(self) -> None:
        self._logged = time.monotonic()
        if not self._quiet:
            print(f"{self.name} {self.done}/{self.total} {self.note}", flush=True)
