"""Folders that appear complete: written under another name, and renamed at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from outrider_core import durable
from outrider_core.drafting.bundle import BundleError


@contextmanager
def locked(aside: Path) -> Iterator[None]:
    """Keep other exports from writing the same folder. Raises BundleError if another one does."""
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
    """Rename a complete folder to `output`, replacing what was there."""
    old = output.parent / f".{output.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    durable.put_in_place(aside, output)
    shutil.rmtree(old, ignore_errors=True)


def lacking(output: Path, disk_bytes: int, memory_bytes: int, remedy: str) -> str:
    """Return whether disk or memory is too small for an export to `output`, and what to do; "" if both suffice.

    remedy: for too little memory.
    """
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    free, memory = shutil.disk_usage(there).free, psutil.virtual_memory().available
    if free < disk_bytes:
        return (
            f"{there} has {free / 1e9:.1f} GB free, {disk_bytes / 1e9:.1f} GB are needed; free some or choose another "
            "--output-dir"
        )
    if memory < memory_bytes:
        return f"about {memory_bytes / 1e9:.1f} GB of memory are needed, {memory / 1e9:.1f} GB are free; {remedy}"
    return ""
