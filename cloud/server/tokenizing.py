"""Tokenizing beside the event loop, one text at a time and the accounts in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from outrider_core.targets.memory import give_back

#: a call of so many seconds took memory that is worth giving back
LONG_SECONDS = 0.1

T = TypeVar("T")


class FairWorker:
    """One thread (tokenizers are not safe for several) that takes one call of each account in turn.

    An account that queues many long texts waits behind itself. How many it may queue is the caller's to bound. What
    long texts took of the machine's memory is given back once none is waiting.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._waiting: dict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}
        self._runner: asyncio.Task[None] | None = None

    async def run(self, account: str, call: Callable[[], T]) -> T:
        """The result of `call`. Raises what it raises."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append((future, call))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        loop, longest = asyncio.get_running_loop(), 0.0
        while self._waiting:
            account = next(iter(self._waiting))
            queue = self._waiting.pop(account)
            future, call = queue.popleft()
            if queue:
                self._waiting[account] = queue  # behind the other accounts'
            if future.cancelled():
                continue
            began = loop.time()
            try:
                result = await loop.run_in_executor(self._executor, partial(_call, call))
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)
            longest = max(longest, loop.time() - began)
        if longest > LONG_SECONDS:
            await loop.run_in_executor(self._executor, give_back)


def _call(call: Callable[[], T]) -> T:
    """The result of `call`. A panic in the tokenizer's Rust, which is no Exception, becomes one."""
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__} in the worker's thread") from error
