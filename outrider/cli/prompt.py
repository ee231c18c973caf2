"""Standard input: lines typed while an event loop runs, Ctrl-C, and reading all of it at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from io import TextIOWrapper
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

from outrider_core.cache import cache_dir

try:
    import readline
except ImportError:  # Windows, where the terminal edits lines by itself
    readline = None  # type: ignore[assignment]

#: lines kept for the next start
HISTORY_LINES = 1000


class Interrupted(Exception):
    """Ctrl-C at the prompt."""


@contextlib.contextmanager
def interrupts() -> Iterator[asyncio.Event]:
    """Yield an event that Ctrl-C sets while the context is open."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, event.set)
    try:
        yield event
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


class Keyboard:
    """Reads lines in the main thread for a coroutine that runs in another: readline and Ctrl-C need the main thread.

    stopped: an event that Ctrl-C sets while no line is being read.
    """

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self._wanted: SimpleQueue[tuple[str, asyncio.Future[str]] | None] = SimpleQueue()
        # a byte for every entry of the queue and every signal: one that arrives just before the main thread waits is
        # not overlooked, as it would be by a lock
        self._waking, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading = False
        self._on_terminal = all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout))
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # invalid bytes do not end a chat
        self._history = _open_history() if self._on_terminal else None

    def run(self, work: Callable[[Keyboard], Coroutine[Any, Any, int]]) -> int:
        """Run `work` on an event loop in another thread, and return its result. Call it in the main thread."""
        result: Future[int] = Future()

        async def begin() -> int:
            self._loop = asyncio.get_running_loop()
            return await work(self)

        def work_beside() -> None:
            try:
                result.set_result(asyncio.run(begin()))
            except BaseException as error:
                result.set_exception(error)
            finally:
                self._want(None)

        before = signal.signal(signal.SIGINT, self._interrupted)
        bell = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        try:
            Thread(target=work_beside, name="outrider-chat", daemon=True).start()
            while (wanted := self._next_wanted()) is not None:
                self._answer(*wanted)
            return result.result()
        finally:
            signal.set_wakeup_fd(bell)
            signal.signal(signal.SIGINT, before)

    def _want(self, wanted: tuple[str, asyncio.Future[str]] | None) -> None:
        """Have the main thread read a line, or end."""
        self._wanted.put(wanted)
        self._bell.send(b"\0")

    def _next_wanted(self) -> tuple[str, asyncio.Future[str]] | None:
        while True:
            self._waking.recv(1)
            with contextlib.suppress(Empty):  # it was a signal, and its handler has run
                return self._wanted.get_nowait()

    async def next(self, prompt: str) -> str:
        """Return the next line without its end. Raises EOFError at the end of input, Interrupted on Ctrl-C."""
        if self.stopped.is_set():
            self.stopped.clear()
            raise Interrupted
        line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._want((prompt, line))
        return await line

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._reading or self._loop is None:
            self._reading = False
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self.stopped.set)

    def _answer(self, prompt: str, line: asyncio.Future[str]) -> None:
        try:
            self._reading = True
            settle = partial(line.set_result, self._read(prompt))
            self._reading = False
        except KeyboardInterrupt:
            settle = partial(line.set_exception, Interrupted())
        except (EOFError, OSError):  # a lost terminal counts as the end of input
            settle = partial(line.set_exception, EOFError())
        self._reading = False
        assert self._loop
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle)

    def _read(self, prompt: str) -> str:
        if self._on_terminal:
            line = input(prompt)
            if self._history:
                self._history(line)
            return line
        print(prompt, end="", file=sys.stderr, flush=True)
        data = b""
        while not data.endswith(b"\n") and (byte := _read_input(1)):
            data += byte
        if not data:
            raise EOFError
        return data.decode(sys.stdin.encoding, errors="replace").rstrip("\r\n")


def _open_history() -> Callable[[str], None] | None:
    """Load the lines of earlier starts; return a function that adds one. They are in the cache, for this user alone."""
    if readline is None or os.environ.get("OUTRIDER_NOHISTORY"):
        return None
    with contextlib.suppress(OSError):  # an unwritable home: only lines of this start are remembered
        path = cache_dir() / "history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
        readline.set_history_length(HISTORY_LINES)
        readline.read_history_file(path)
        known = readline.get_current_history_length()

        def keep(line: str) -> None:
            nonlocal known
            if (length := readline.get_current_history_length()) > known:
                known = length
                with contextlib.suppress(OSError):
                    readline.append_history_file(1, path)

        return keep
    return None


def _read_input(size: int) -> bytes:
    """Read bytes of standard input; b"" at its end, or if it was closed before this program began."""
    return os.read(sys.stdin.fileno(), size) if sys.stdin else b""


def whole_input() -> str:
    """Return all of standard input as text; invalid bytes are replaced."""
    data = b"".join(iter(lambda: _read_input(1 << 16), b""))
    return data.decode(sys.stdin.encoding if sys.stdin else "utf-8", errors="replace")
