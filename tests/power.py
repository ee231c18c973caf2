"""Find data that a power cut would lose: bytes renamed into place before an fsync put them on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """unsettled: files that got their final name, by themselves or with their folder, before their bytes were safe.

    renamed: final names, in order. waited: how many times the disk was waited for.
    """

    def __init__(self) -> None:
        self.unsettled, self.renamed = list[str](), list[str]()
        self.waited = 0
        self._settled: dict[int, tuple[int, int]] = {}

    def synced(self, handle: int) -> None:
        self.waited += 1
        found = os.fstat(handle)
        self._settled[found.st_ino] = (found.st_size, found.st_mtime_ns)

    def renames(self, source: Path, target: Path) -> None:
        if target.name.startswith("."):
            return  # out of the way, and nobody reads it there
        self.renamed.append(target.name)
        for path in [source, *source.rglob("*")]:
            found = path.stat()
            if path.is_file() and self._settled.get(found.st_ino) != (found.st_size, found.st_mtime_ns):
                self.unsettled.append(path.name)


@contextmanager
def watched_disk() -> Iterator[Disk]:
    """Watch every fsync and rename of this process."""
    disk = Disk()
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:

        def synced(handle: int) -> None:
            fsync(handle)
            disk.synced(handle)

        patch.setattr(os, "fsync", synced)
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(_renamed, disk, getattr(os, name)))
        yield disk


def _renamed(disk: Disk, rename: Callable[..., None], source: Any, target: Any) -> None:
    disk.renames(Path(source), Path(target))
    rename(source, target)


def forgotten(path: Path, begin: int, length: int) -> None:
    """Make `length` bytes from `begin` zeros, as a page is whose bytes never reached the disk."""
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(length))
