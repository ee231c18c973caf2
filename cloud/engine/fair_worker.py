"""Threads for work that would block the event loop or the engine, such as tokenizing; accounts take turns."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider_core.targets.memory import give_back

#: a call of this many seconds took memory that is worth giving back
LONG_SECONDS = 0.1
#: nice value of low-priority threads: each gets a tenth of what others get
BEHIND = 10

T = TypeVar("T")


@dataclass(frozen=True)
class QueuedCall:
    future: Future[Any]
    call: Callable[[], Any]
    cancelled: Callable[[], bool]

    def settle(self) -> None:
        """Run it, unless it was cancelled. A panic in Rust becomes an Exception."""
        if self.cancelled():
            self.future.cancel()
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.call())
        except Exception as error:
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(RuntimeError(f"{type(error).__name__} in the worker's thread"))


class FairWorker:
    """Threads that take one call of each account in turn, and never two of one account at once.

    An account that queues many long texts delays itself alone. The caller limits how many it may queue. Memory that
    long texts took is given back once none is waiting. threads: one, if the calls are not safe for several accounts at
    once. behind: they have lower priority than the process's other threads.
    """

    def __init__(self, name: str, threads: int = 1, behind: bool = False) -> None:
        self._executor = ThreadPoolExecutor(threads, name, _give_way if behind else None)
        self._lock = threading.Lock()
        #: waiting calls by account; each account here has a turn to come
        self._waiting: dict[str, deque[QueuedCall]] = {}
        self._longest = 0.0  # seconds of the longest call since memory was given back

    def submit(self, account: str, call: Callable[[], T], cancelled: Callable[[], bool] = lambda: False) -> Future[T]:
        """Queue `call`, from any thread. It is skipped if its future, or the caller, is cancelled before its turn."""
        future: Future[T] = Future()
        queued = QueuedCall(future, call, cancelled)
        with self._lock:
            if account in self._waiting:
                self._waiting[account].append(queued)
            else:
                try:
                    self._executor.submit(self._take_turn, account)
                    self._waiting[account] = deque([queued])
                except RuntimeError:  # closed
                    future.cancel()
        return future

    async def run(self, account: str, call: Callable[[], T]) -> T:
        """Return the result of `call`. Raises its exceptions."""
        return await asyncio.wrap_future(self.submit(account, call))

    def close(self) -> None:
        """End the threads after the running calls, and cancel all others."""
        with self._lock:
            self._executor.shutdown(wait=False, cancel_futures=True)
            dropped = [each.future for queue in self._waiting.values() for each in queue]
            self._waiting.clear()
        for future in dropped:
            future.cancel()

    def _take_turn(self, account: str) -> None:
        """Run the account's next call; its next turn comes after those of the others."""
        with self._lock:
            if account not in self._waiting:  # closed
                return
            call = self._waiting[account].popleft()
        began = time.monotonic()
        call.settle()
        self._longest = max(self._longest, time.monotonic() - began)
        with self._lock:
            if self._waiting.get(account):
                self._executor.submit(self._take_turn, account)
            else:
                self._waiting.pop(account, None)
            waiting = bool(self._waiting)
        if self._longest > LONG_SECONDS and not waiting:
            self._longest = 0.0
            give_back()


def _give_way() -> None:
    """Lower the calling thread's priority, on systems where threads have one."""
    if hasattr(os, "setpriority"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND)
