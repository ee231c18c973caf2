"""One thread for work that would hold up the event loop, such as tokenizing, and the accounts in turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider_core.targets.memory import give_back

#: a call of so many seconds took memory that is worth giving back
LONG_SECONDS = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class QueuedCall:
    future: Future[Any]
    call: Callable[[], Any]
    cancelled: Callable[[], bool]

    def settle(self) -> None:
        """Run it, unless it is not wanted any more. A panic in Rust, which is no Exception, becomes one."""
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
    """One thread (tokenizers are not safe for several) that takes one call of each account in turn.

    An account that queues many long texts waits behind itself. How many it may queue is the caller's to bound. What
    long texts took of the machine's memory is given back once none is waiting.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[QueuedCall]] = {}
        self._longest = 0.0  # seconds of a call since memory was given back

    def submit(self, account: str, call: Callable[[], T], cancelled: Callable[[], bool] = lambda: False) -> Future[T]:
        """Queue `call`, from any thread. It is skipped if its future, or the caller, is cancelled before its turn."""
        future: Future[T] = Future()
        with self._lock:
            try:
                self._executor.submit(self._take_turn)  # a turn for each call: none can be left behind
            except RuntimeError:  # closed
                future.cancel()
            else:
                self._waiting.setdefault(account, deque()).append(QueuedCall(future, call, cancelled))
        return future

    async def run(self, account: str, call: Callable[[], T]) -> T:
        """Return the result of `call`. Raises what it raises."""
        return await asyncio.wrap_future(self.submit(account, call))

    def close(self) -> None:
        """End the thread after the call under way, and cancel all others."""
        with self._lock:
            self._executor.shutdown(wait=False, cancel_futures=True)
            dropped = [each.future for queue in self._waiting.values() for each in queue]
            self._waiting.clear()
        for future in dropped:
            future.cancel()

    def _take_turn(self) -> None:
        """Run one call of the account whose turn it is."""
        with self._lock:
            if not self._waiting:  # closed
                return
            account, queue = next(iter(self._waiting.items()))
            call = queue.popleft()
        began = time.monotonic()
        call.settle()
        self._longest = max(self._longest, time.monotonic() - began)
        with self._lock:
            if queue := self._waiting.pop(account, deque()):
                self._waiting[account] = queue  # behind the other accounts'
            waiting = bool(self._waiting)
        if self._longest > LONG_SECONDS and not waiting:
            self._longest = 0.0
            give_back()
