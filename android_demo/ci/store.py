"""The folder of downloads: announces files and sizes, fetches each once, checks, unpacks and cleans."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from android_demo.ci.clients import CLIENTS
from android_demo.ci.pins import CACHE_VARIABLE, FetchError, Pin, cache_folder, needed_by, read_pins

MB = 1e6
#: seconds between progress checks of a download
LOOK_EVERY = 0.2


def provided(*parts: str) -> dict[str, Path]:
    """Return the unpacked folder of every pin of `parts` by its name; missing ones are announced, then fetched.

    Raises FetchError.
    """
    rows = read_pins()
    pins = list(dict.fromkeys(pin for part in parts for pin in needed_by(part, rows)))
    cache, console = cache_folder(), Console(stderr=True, highlight=False, soft_wrap=True)
    missing = absent(pins, cache)
    announcement = announced(missing, cache)
    if announcement:
        console.print(announcement)
        _room_for(missing, cache)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, disable=not (missing and console.is_terminal),
    )  # fmt: skip
    folders = {}
    with bar:
        task, done = bar.add_task("", total=sum(pin.size for pin in missing)), 0

        def seen(size: int) -> None:
            bar.update(task, completed=done + size)

        for pin in pins:
            if pin in missing:
                bar.update(task, description=pin.name)
                fetch(pin, cache, seen)
                done += pin.size
                seen(0)
                console.print(f"fetched {pin.file}")
            folders[pin.name] = unpacked(pin, cache)
    return folders


def absent(pins: Iterable[Pin], cache: Path) -> list[Pin]:
    """Return the pins that would be downloaded: neither unpacked nor complete in `cache`."""
    return [pin for pin in pins if not (cache / pin.folder).is_dir() and not _whole(pin, cache)]


def announced(missing: list[Pin], cache: Path) -> str:
    """Describe what will be downloaded, its size and how to remove it; "" if nothing is missing."""
    if not missing:
        return ""
    rows = [
        f"  {pin.name} {pin.version} ({pin.origin}): {pin.size / MB:.1f} MB, unpacked {pin.unpacked / MB:.1f} MB"
        for pin in missing
    ]
    size, after = (sum(getattr(pin, name) for pin in missing) / MB for name in ("size", "unpacked"))
    count = f"{len(missing)} package{'s' * (len(missing) > 1)}"
    return "\n".join(
        [f"To download: {count}, {size:.0f} MB; with what is unpacked of them {size + after:.0f} MB, in {cache}", *rows,
         f"Kept there for the next build ({CACHE_VARIABLE} names another folder). "
         "To remove them: python -m android_demo.ci clean"]
    )  # fmt: skip


def fetch(pin: Pin, cache: Path, seen: Callable[[int], object] = lambda size: None) -> Path:
    """Return the pinned file in `cache`, downloaded if missing. Raises FetchError.

    seen: called now and then with the bytes received, as far as the client shows them.
    """
    path = cache / pin.file
    if _whole(pin, cache):
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as aside, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(CLIENTS[pin.origin], pin, Path(aside))
        while not wait([coming], LOOK_EVERY).done:
            seen(min(pin.size, _largest(Path(aside))))
        coming.result()
        found = Path(aside) / pin.file
        if not found.is_file():
            names = sorted(entry.name for entry in Path(aside).iterdir() if not entry.name.startswith("."))
            raise FetchError(
                f"{pin.name} {pin.version}: {pin.origin} gave {', '.join(names) or 'nothing'} instead of {pin.file}"
            )
        if (got := _sha256(found)) != pin.sha256:
            raise FetchError(f"{pin.file} has sha256 {got}, the lock says {pin.sha256}; do not use it")
        found.replace(path)
    return path


def unpacked(pin: Pin, cache: Path) -> Path:
    """Return the pinned file's content as a folder in `cache`. Raises FetchError."""
    folder = cache / pin.folder
    if folder.is_dir():
        return folder
    archive = fetch(pin, cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".unpack-") as aside:
        content, outer = Path(aside) / "content", Path(aside) / "outer"
        if pin.inside:
            _unpack(archive, outer, (pin.inside,))
            archive = outer / pin.inside
        _unpack(archive, content, pin.take)
        if not any(content.iterdir()):
            raise FetchError(f"{pin.file} has none of {', '.join(pin.take)}")
        content.replace(folder)
    return folder


def clean(cache: Path) -> int:
    """Remove this build's files from `cache`, of this lock or an older one; return the bytes freed.

    Other files stay, as the user may have chosen the folder.
    """
    names = "|".join(re.escape(pin.name).replace(r"\-", "[-_]") for pin in read_pins())
    ours = rf"({names})[-_].*(-[0-9a-f]{{8}}(-.*)?|\.(tgz|whl|deb))|\.(fetch|unpack)-.*"
    freed = 0
    for entry in sorted(cache.iterdir()) if cache.is_dir() else []:
        if not re.fullmatch(ours, entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            freed += size_of(entry)
            shutil.rmtree(entry)
        else:
            freed += entry.lstat().st_size
            entry.unlink()
    if cache.is_dir() and not any(cache.iterdir()):
        cache.rmdir()
    return freed


def size_of(folder: Path) -> int:
    """Return the bytes of all files in it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def _room_for(missing: list[Pin], cache: Path) -> None:
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    wanted, free = sum(pin.size + pin.unpacked for pin in missing), shutil.disk_usage(there).free
    if free < wanted:
        raise FetchError(
            f"{there} has {free / MB:.0f} MB free and {wanted / MB:.0f} are wanted; make room or name another folder "
            f"with {CACHE_VARIABLE}"
        )


def _unpack(archive: Path, folder: Path, take: tuple[str, ...]) -> None:
    """Unpack the files of a .deb, .tgz or zip that match a pattern; all without patterns."""
    folder.mkdir()

    def wanted(name: str) -> bool:
        return not take or any(fnmatch(name.removeprefix("./"), pattern) for pattern in take)

    if archive.suffix == ".deb":
        try:
            with (
                subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as reading,
                tarfile.open(fileobj=reading.stdout, mode="r|") as opened,
            ):
                for member in opened:
                    if wanted(member.name):
                        opened.extract(member, folder, filter="tar")
        except FileNotFoundError:
            raise FetchError("dpkg-deb is not installed; Debian's package dpkg has it") from None
    elif archive.suffix == ".tgz":
        with tarfile.open(archive) as opened:
            opened.extractall(folder, [member for member in opened if wanted(member.name)], filter="tar")
    else:
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(folder, [name for name in zipped.namelist() if wanted(name)])


def _largest(folder: Path) -> int:
    """Return the bytes of the largest file below `folder`, the one being downloaded."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.lstat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _whole(pin: Pin, cache: Path) -> bool:
    path = cache / pin.file
    return path.is_file() and path.stat().st_size == pin.size and _sha256(path) == pin.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
