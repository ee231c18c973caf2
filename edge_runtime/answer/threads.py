"""The drafter's thread, with drafting ahead between its jobs, and the understudy's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.targets.understudy import Understudy


class DrafterFailed(RuntimeError):
    """The drafter's engine failed; the message is one line. Events have shown the text verified so far."""


class DrafterThread:
    """A thread that owns the drafter. Any new job ends drafting ahead within one engine step.

    failed: called in that thread with a job's exception.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._pool = ThreadPoolExecutor(1, "drafter")
        self._asked = 0
        self.failed: Callable[[Exception], None] = lambda error: None

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after those that were submitted before."""
        self._asked += 1
        self._pool.submit(self._run, job, self.failed)

    def draft_ahead(self, shape: TreeShape, cancelled: Callable[[], bool], done: Callable[[int, float], None]) -> None:
        """Grow the last tree until `cancelled` or a job waits; `done` gets nodes expanded and seconds."""
        asked = self._asked

        def work() -> None:
            began = time.monotonic()
            nodes = self.drafter.draft_ahead(shape, lambda: self._asked != asked or cancelled())
            done(nodes, time.monotonic() - began)

        self._pool.submit(self._run, work, self.failed)

    @staticmethod
    def _run(job: Callable[[], object], failed: Callable[[Exception], None]) -> None:
        try:
            job()
        except Exception as error:
            failed(error)
        except BaseException as error:  # a panic in Rust is not an Exception; its answer would wait indefinitely
            failed(RuntimeError(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Wait for the running job, and end."""
        self._asked += 1
        self._pool.shutdown(wait=True)


class UnderstudyThread:
    """A thread that owns the understudy; it starts with the first job."""

    def __init__(self, understudy: Understudy) -> None:
        self.understudy = understudy
        self._pool = ThreadPoolExecutor(1, "understudy")
        self._used = False  # since its memory was given back
        self._submitted = self._begun = 0  # number of jobs; each is written by one thread
        self.closed = False  # its result is no longer wanted

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job`, which handles its own errors, after those that were submitted before."""
        self._used = True
        self._submitted += 1
        self._pool.submit(self._run, job)

    @property
    def waits(self) -> bool:
        """Return whether a job waits for the running one."""
        return self._submitted > self._begun

    def _run(self, job: Callable[[], object]) -> None:
        self._begun += 1
        job()

    def unload(self) -> None:
        """Free the understudy's memory once it has no more jobs; it may be loading now."""
        if self._used and not self.closed:
            self.submit(self.understudy.unload)
            self._used = False

    def forget(self) -> None:
        """Forget the texts that its drafter guesses from."""
        if self._used and not self.closed:
            self.submit(self.understudy.forget)

    def close(self) -> None:
        """Wait for the running job, free the understudy's memory, and end."""
        self.closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self.understudy.loaded:
            self.understudy.unload()
