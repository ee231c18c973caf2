"""Standard error as a log's destination that never raises and never blocks."""

from __future__ import annotations

import atexit
import io
import os
import threading
import time
from contextlib import suppress
from queue import Full, Queue

#: lines that wait for a slow reader; further ones are dropped
MAX_LINES = 1024
#: seconds that the end of the process waits for unwritten lines
LAST_LINES = 1.0


class LogSink(io.TextIOBase):
    """A text stream whose lines a thread of its own writes to a file descriptor.

    A line that cannot be written (disk full, reader gone) or finds MAX_LINES before it (reader stalled) is dropped and
    counted in `dropped`. The descriptor is written directly: a thread that hangs in a buffered stream would hang the
    end of the process too.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._lines: Queue[bytes] = Queue(MAX_LINES)
        self._torn = False
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.settle)

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        """Queue `text`, at least one whole line of it."""
        try:
            self._lines.put_nowait(text.encode("utf-8", "backslashreplace"))
        except Full:
            self.dropped += 1
        return len(text)

    def settle(self, seconds: float = LAST_LINES) -> None:
        """Wait until everything is written, for at most `seconds`."""
        until = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(b"\n" + line if self._torn else line)
                self._torn = False
            except OSError:
                self.dropped += 1
            self._lines.task_done()

    def _write(self, line: bytes) -> None:
        """Write a line. Raises OSError, with `_torn` set if a part was written."""
        rest = memoryview(line)
        while rest:
            with suppress(BlockingIOError):
                rest = rest[os.write(self._descriptor, rest) :]
                self._torn = len(rest) < len(line)
                continue
            time.sleep(0.02)  # another process has made the pipe non-blocking, and it is full
