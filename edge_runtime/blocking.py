"""`EdgeRuntime` for programs without an event loop: the same calls, but they block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar, Unpack

from edge_runtime.context import FittedMessages
from edge_runtime.events import Event, Finished
from edge_runtime.link.transport import LinkMaker
from edge_runtime.options import AnswerKeywords, Pinned, RuntimeKeywords
from edge_runtime.runtime import EdgeRuntime

Result = TypeVar("Result")


class BlockingRuntime:
    """Runs an `EdgeRuntime` in a thread of its own; enter it before use.

        with BlockingRuntime.from_bundle("build/bundle", "127.0.0.1:8765") as runtime:
            for event in runtime.generate("Why is the sky blue?"):
                print(event.verified, event.provisional)

    One answer at a time. Other threads may call `record`, `pause` and `proceed` while an answer is in progress.
    """

    def __init__(self, runtime: EdgeRuntime) -> None:
        self.runtime = runtime
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="outrider", daemon=True)
        self._answer: asyncio.Task[None] | None = None  # on its way
        self._left: asyncio.Task[None] | None = None  # its iterator was abandoned

    @classmethod
    def from_bundle(
        cls,
        folder: str | Path,
        server: str | LinkMaker | None = None,
        *,
        pinned: Pinned | None = None,
        **options: Unpack[RuntimeKeywords],
    ) -> BlockingRuntime:
        """Open a bundle; arguments and errors as in `EdgeRuntime.from_bundle`."""
        return cls(EdgeRuntime.from_bundle(folder, server, pinned=pinned, **options))

    def __enter__(self) -> BlockingRuntime:
        self._thread.start()
        self._call(self.runtime.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close as `EdgeRuntime.close` does; cancel an unfinished answer. A second call does nothing."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def generate(
        self, prompt: str | list[dict[str, Any]] | list[int], **options: Unpack[AnswerKeywords]
    ) -> EventIterator:
        """Answer as `EdgeRuntime.generate` does. Leaving the loop early, also by Ctrl-C, cancels the answer."""
        return EventIterator(self, self.runtime.generate(prompt, **options))

    def answer(self, prompt: str | list[dict[str, Any]] | list[int], **options: Unpack[AnswerKeywords]) -> Finished:
        """Return the end of an answer to `prompt`, without events. Options as in `generate`."""
        *_, finished = self.generate(prompt, **options)
        assert isinstance(finished, Finished)
        return finished

    def fit_messages(
        self,
        messages: list[dict[str, Any]],
        reserve: int = 256,
        tools: Sequence[dict[str, Any]] = (),
        least: int | None = None,
    ) -> FittedMessages:
        """See `EdgeRuntime.fit_messages`."""
        return self.runtime.fit_messages(messages, reserve, tools, least)

    def resume(self, record: dict[str, Any]) -> EventIterator:
        """See `EdgeRuntime.resume`."""
        return EventIterator(self, self.runtime.resume(record))

    def record(self) -> dict[str, Any] | None:
        """See `EdgeRuntime.record`."""

        async def read() -> dict[str, Any] | None:
            return self.runtime.record()

        return self._call(read())

    def pause(self) -> None:
        """See `EdgeRuntime.pause`."""
        self._call(self.runtime.pause())

    def proceed(self) -> None:
        """See `EdgeRuntime.proceed`."""
        self._call(self.runtime.proceed())

    def forget(self) -> None:
        """See `EdgeRuntime.forget`."""

        async def forget() -> None:
            self.runtime.forget()

        self._call(forget())

    def network_changed(self) -> None:
        """See `EdgeRuntime.network_changed`."""

        async def change() -> None:
            self.runtime.network_changed()

        self._call(change())

    @property
    def link_error(self) -> str:
        """See `EdgeRuntime.link_error`: why there is no connection."""
        return self.runtime.link_error

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this runtime is not entered, or is closed; write: with BlockingRuntime(...) as runtime")
        return asyncio.run_coroutine_threadsafe(self._behind_left(work), self._loop).result()

    async def _behind_left(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work` once an answer whose iterator was abandoned has ended."""
        if self._left:
            await self._cancel(self._left)
        return await work

    def _leave(self, answer: asyncio.Task[None]) -> None:
        """Cancel an answer without waiting for its end. From any thread, including this runtime's own."""
        self._left = answer
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the answer with it
            self._loop.call_soon_threadsafe(answer.cancel)

    async def _begin(
        self,
        stream: AsyncGenerator[Event, None],
        events: SimpleQueue[Event | None],
    ) -> asyncio.Task[None]:
        """Put `stream` into `events`, with None at its end."""

        async def pump() -> None:
            async with contextlib.aclosing(stream):
                async for event in stream:
                    events.put(event)

        if self._answer:
            raise RuntimeError("an answer is on its way: read it to its end, or close its iterator")
        self._answer = asyncio.create_task(pump())
        self._answer.add_done_callback(lambda _: events.put(None))
        return self._answer

    async def _cancel(self, answer: asyncio.Task[None]) -> None:
        """End that answer, but no other one that may have begun meanwhile."""
        answer.cancel()
        await asyncio.wait([answer])
        self._answer = None if self._answer is answer else self._answer
        self._left = None if self._left is answer else self._left

    async def _close(self) -> None:
        if self._answer:
            await self._cancel(self._answer)
        await self.runtime.close()


class EventIterator(Iterator[Event]):
    """Events of one answer, which begins when the first one is requested."""

    def __init__(self, runtime: BlockingRuntime, stream: AsyncGenerator[Event, None]) -> None:
        self._runtime, self._stream = runtime, stream
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._answer: asyncio.Task[None] | None = None
        self._over = False

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        if self._answer is None:
            self._answer = self._runtime._call(self._runtime._begin(self._stream, self._events))
        try:
            if (event := self._events.get()) is not None:
                return event
        except BaseException:  # Ctrl-C
            self.close()
            raise
        self.close()
        if not self._answer.cancelled():
            self._answer.result()  # raises what the answer raised
        raise StopIteration

    def close(self) -> None:
        """Cancel the answer if it is not over, and wait for its end."""
        over, self._over = self._over, True
        if self._answer is not None and not over and self._runtime._thread.is_alive():
            self._runtime._call(self._runtime._cancel(self._answer))

    def __del__(self) -> None:
        # the garbage collector may run in any thread, the runtime's own included: so nothing is awaited here
        if self._answer is not None and not self._over:
            self._runtime._leave(self._answer)
