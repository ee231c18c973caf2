"""Folders that appear whole: written aside, and renamed once they are complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from outrider_core.drafting.bundle import BundleError


@contextmanager
def locked(aside: Path) -> Iterator[None]:
    """Two exports must not write the same folder. Raises BundleError where another one does."""
    path = aside.with_name(aside.name + ".lock")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BundleError(f"another export is writing to {aside.parent}; wait for it or stop it") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def put_in_place(aside: Path, output: Path) -> None:
    """Rename a complete folder to `output`, and remove what was there."""
    old = output.parent / f".{output.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    aside.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def free_bytes(folder: Path) -> tuple[Path, int]:
    """(the part of the path that is there, bytes free on its disk)."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return there, shutil.disk_usage(there).free
