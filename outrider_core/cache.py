"""The cache folder, and the SHA-256 of large files, remembered in it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider_core import durable

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

#: files of at least this many bytes are remembered; smaller ones are read each time
REMEMBERED_BYTES = 16 << 20
#: a file changed more recently than this is not remembered: another write could leave it with the same time
SETTLED_NS = 100_000_000
#: hashing that takes more seconds than this is logged
SLOW_SECONDS = 3.0
CHUNK_BYTES = 4 << 20

_log = logging.getLogger(__name__)
#: folders that this process keeps others from removing -> their open descriptors
_held: dict[Path, int] = {}


def cache_dir() -> Path:
    """`$OUTRIDER_CACHE`, else `$XDG_CACHE_HOME/outrider`, else `~/.cache/outrider`.

    Without a home, a private folder among the temporary ones. Raises PermissionError if other users own that.
    """
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own)
    if os.path.isabs(shared := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(shared) / "outrider"
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:
        return _temporary()


def _temporary() -> Path:
    """Return a folder that no other user can have written to: code loads files from a cache."""
    user = os.getuid() if hasattr(os, "getuid") else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"outrider-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if hasattr(os, "getuid") and (found.st_uid != user or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode)):
        raise PermissionError(errno.EACCES, "this user has no home, and others can write there", str(folder))
    return folder


def expanded(path: str | Path) -> Path:
    """Return `path` with `~` replaced by the home, or unchanged if there is no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def why_inaccessible(error: OSError) -> str:
    """Say in one line why a file or folder cannot be read or written, and what to do."""
    if error.filename is None:
        return str(error)
    remedy = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give this user access to it"
    return f"{error.filename}: {error.strerror}; {remedy}, or name another folder for the cache with OUTRIDER_CACHE"


def hold(folder: Path) -> None:
    """Keep `try_lock` of other processes out of `folder` until this one ends. File systems without locks do nothing."""
    with suppress(OSError):
        if fcntl and folder not in _held:
            _held[folder] = os.open(folder, os.O_RDONLY)
            fcntl.flock(_held[folder], fcntl.LOCK_SH)


def try_lock(path: Path) -> int | None:
    """Lock a file or folder and return its descriptor; None if another process holds it.

    Raises OSError if the path does not exist.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # a file system without locks
        pass
    return handle


def sha256_of(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file's bytes, 64 hex digits.

    Large files are read once: `hashes.json` in `cache_dir()` remembers them by path, size and times of change. A cache
    that is damaged or cannot be written is ignored. Raises OSError if a file cannot be read.
    """
    known = _read_cache()
    fresh: dict[str, list[Any]] = {}
    progress = _Progress(paths)
    try:
        return [_sha256(path, known, fresh, progress) for path in paths]
    finally:
        if fresh:
            _write_cache(fresh)


def remember_sha256(path: Path, digest: str) -> None:
    """Remember the SHA-256 of a large file that this process has just written and synced, without reading it again."""
    if (stamp := _stamp(path))[0] >= REMEMBERED_BYTES:
        _write_cache({str(path.resolve()): [*stamp, digest]})


class _Progress:
    """Logs once that hashing takes a while."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._since, self._told = paths, time.monotonic(), False

    def tick(self) -> None:
        if not self._told and time.monotonic() - self._since > SLOW_SECONDS:
            self._told = True
            gigabytes = sum(path.stat().st_size for path in self._paths) / 1e9
            _log.warning("hashing %s (%.1f GB), once until it changes", self._paths[0].parent, gigabytes)


def _sha256(path: Path, known: dict[str, Any], fresh: dict[str, list[Any]], progress: _Progress) -> str:
    name, stamp, began = str(path.resolve()), _stamp(path), time.time_ns()
    entry = known.get(name)
    if isinstance(entry, list) and len(entry) == 4 and entry[:3] == stamp and isinstance(entry[3], str):
        return entry[3]
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress.tick()
    settled = began - max(stamp[1:]) > SETTLED_NS and _stamp(path) == stamp
    if stamp[0] >= REMEMBERED_BYTES and settled:
        with suppress(OSError):  # after a power cut a file may have its size and times, but not its bytes
            durable.sync(path)
            fresh[name] = [*stamp, digest.hexdigest()]
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    """Return values that change when a file is written: [size, mtime_ns, ctime_ns]."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _cache_file() -> Path:
    return cache_dir() / "hashes.json"


def _read_cache() -> dict[str, Any]:
    try:
        values = json.loads(_cache_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write_cache(fresh: dict[str, list[Any]]) -> None:
    """Add entries to the current cache file, and drop those whose files are gone."""
    entries = {name: entry for name, entry in _read_cache().items() if os.path.exists(name)} | fresh
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        durable.write(_cache_file(), json.dumps(entries, indent=1))
    except OSError:
        return
