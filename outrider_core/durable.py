"""Files that survive a power cut: their bytes reach the disk before their name, or a note that they exist."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import IO, Any


def settle(file: IO[Any]) -> None:
    """Wait until all that was written to `file` is on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def put_in_place(aside: Path, path: Path) -> None:
    """Rename a file or a folder once all of it is on the disk, in place of a file or an empty folder of that name.

    After a power cut `path` is unchanged or complete. Raises OSError.
    """
    for each in [*aside.rglob("*"), aside] if aside.is_dir() else [aside]:
        sync(each)
    os.replace(aside, path)
    sync(path.parent)


def write(path: Path, content: str | bytes) -> None:
    """Write a file in one step: after a crash it is unchanged or complete. Raises OSError."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        put_in_place(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until all that any program wrote to a file, or all names in a folder, are on the disk. Raises OSError."""
    windows = os.name == "nt"
    if windows and path.is_dir():  # which cannot open folders
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # unsupported by the file system
            raise
    finally:
        os.close(handle)
