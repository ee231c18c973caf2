"""A chat in a file, so that it survives a killed terminal."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outrider_core.chat.messages import as_templates_take

try:
    import fcntl
except ImportError:  # Windows, where an open file is locked by itself
    fcntl = None  # type: ignore[assignment]

#: seconds between two records of an answer
JOURNAL_SECONDS = 0.3


class Journal:
    """A conversation and the answer in progress. path None: nowhere. tell: called once if the file fails."""

    def __init__(self, path: Path | None, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._written, self._told = 0.0, False
        self._writing: asyncio.Future[None] | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from using the journal. Raises ValueError if one does."""
        if self._path is None or fcntl is None:
            yield
            return
        beside = self._path.with_name(f".{self._path.name}.lock")  # the journal itself is replaced at every write
        try:
            lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:  # the journal cannot be written either; saving reports that
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ValueError(f"another chat is using {self._path}; end that one, or give another file") from None
        except OSError:  # a file system without locks
            os.close(lock)
            yield
            return
        try:
            yield
        finally:
            os.close(lock)

    def load(self) -> tuple[list[dict[str, str]], dict[str, Any] | None]:
        """Return (messages, record of an unfinished answer or None).

        Raises ValueError on a file that is not a journal.
        """
        if self._path is None:
            return [], None
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):
                raise ValueError(f"{self._path} is not a file; name one")  # reading others may never end
        except FileNotFoundError:
            return [], None
        except OSError as error:
            raise ValueError(f"cannot read {self._path}: {error.strerror}") from None
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            return as_templates_take(kept["messages"]), kept["answer"]
        except OSError as error:
            raise ValueError(f"cannot read {self._path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{self._path} is not a journal of a chat ({error}); give another file") from None

    @property
    def due(self) -> bool:
        """Return whether an answer in progress should be saved again."""
        return self._path is not None and time.monotonic() >= self._written + JOURNAL_SECONDS

    def keep(self, messages: list[dict[str, str]], record: dict[str, Any] | None) -> None:
        """Save an answer in progress, if that is due, in another thread: a disk may take seconds for it."""
        if self.due and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().run_in_executor(None, self.save, list(messages), record)

    async def finish(self, messages: list[dict[str, str]]) -> None:
        """Save a chat without an answer in progress, after any save that is running."""
        if self._writing:
            await asyncio.wait([self._writing])
        await asyncio.to_thread(self.save, list(messages), None)

    def begin(self, messages: list[dict[str, str]]) -> None:
        """Write a chat into a new file or over another journal. Raises ValueError if that fails."""
        assert self._path
        self.load()
        if self._path.exists() and not self._path.stat().st_mode & stat.S_IWUSR:
            raise ValueError(f"{self._path} is read-only; name another file")
        try:
            _replace(self._path, messages, None)
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from None

    def save(self, messages: list[dict[str, str]], record: dict[str, Any] | None) -> None:
        """Replace the file in one step. If that fails, the chat continues without it."""
        if self._path is None:
            return
        self._written = time.monotonic()
        try:
            _replace(self._path, messages, record)
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"cannot write the journal {self._path}: {error.strerror}; the chat continues without it")
        else:
            self._told = False


def _replace(path: Path, messages: list[dict[str, str]], record: dict[str, Any] | None) -> None:
    """Write `path` anew, readable by its owner alone, in one step. Raises OSError, and leaves the old file."""
    # an unpredictable name and a new file: in a shared folder others may have put a link there
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages, "answer": record}))
            file.flush()
            os.fsync(handle)  # a file that is renamed before it is written may be empty after a power cut
        os.replace(aside, path)
    except BaseException:
        with suppress(FileNotFoundError):  # an interrupt right after the rename
            os.unlink(aside)
        raise
