"""Lines that somebody types, while the event loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from threading import Thread


class Interrupted(Exception):
    """Ctrl-C at the prompt."""


@contextlib.contextmanager
def interrupts() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C sets while the context is open."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, event.set)
    try:
        yield event
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


class LineReader:
    """Lines of standard input, read by a thread that nobody has to wait for: Ctrl-C is heard while it blocks.

    stopped: what Ctrl-C sets (`interrupts`).
    """

    def __init__(self, stopped: asyncio.Event) -> None:
        self._stopped = stopped
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._read, name="outrider-stdin", daemon=True)

    async def next(self) -> str:
        """The next line without its end. Raises EOFError at the end of input, Interrupted on Ctrl-C."""
        if self._thread.ident is None:
            self._thread.start()
        line, stop = asyncio.ensure_future(self._lines.get()), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({line, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            line.cancel()
        if self._stopped.is_set():
            self._stopped.clear()
            raise Interrupted
        text = line.result()
        if text is None:
            raise EOFError
        return text

    def _read(self) -> None:
        """By `os.read`: a daemon thread must not hold the lock of `sys.stdin` when the process ends."""
        held = b""
        with contextlib.suppress(OSError):  # a terminal that has gone is the end of input
            while chunk := _read_input(4096):
                *lines, held = (held + chunk).split(b"\n")
                for line in lines:
                    self._put(line)
        if held:
            self._put(held)
        self._put(None)

    def _put(self, line: bytes | None) -> None:
        text = None if line is None else line.decode(sys.stdin.encoding, errors="replace").removesuffix("\r")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._lines.put_nowait, text)


def _read_input(size: int) -> bytes:
    """Bytes of standard input, b"" at its end, or where it was closed before this program began."""
    return os.read(sys.stdin.fileno(), size) if sys.stdin else b""


def whole_input() -> str:
    """All of standard input as text; bytes that are not its encoding's are replaced."""
    data = b"".join(iter(lambda: _read_input(1 << 16), b""))
    return data.decode(sys.stdin.encoding if sys.stdin else "utf-8", errors="replace")
