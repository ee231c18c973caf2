"""Read pins.toml: the files that the scripted build takes from registries, with their sha256 and size."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOCK = Path(__file__).with_name("pins.toml")
REPOSITORY = Path(__file__).parents[2]
#: environment variable of the folder for downloads, instead of build/android/cache
CACHE_VARIABLE = "OUTRIDER_ANDROID_CACHE"
#: values of `from`
ORIGINS = ("npm", "pypi", "debian")


class FetchError(RuntimeError):
    """A pinned file is unavailable, or differs from the lock. One line that says what to do."""


@dataclass(frozen=True)
class Pin:
    """A file of a registry.

    origin: the lock's `from`; need: the parts that need it; size, unpacked: bytes of the file and of its unpacked
    content; suite: of Debian; inside: an archive in it that is unpacked instead; take: patterns of the files to unpack,
    or () for all.
    """

    name: str
    version: str
    origin: str
    file: str
    sha256: str
    need: tuple[str, ...]
    size: int
    unpacked: int
    suite: str = ""
    inside: str = ""
    take: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The name of its unpacked folder; it changes with the folder's content."""
        made_of = self.sha256
        if self.inside or self.take:
            made_of = hashlib.sha256(f"{made_of} {self.inside} {self.take}".encode()).hexdigest()
        return f"{self.name}-{self.version}-{made_of[:8]}"


def read_pins(lock: Path = LOCK) -> list[Pin]:
    """Return all pins. Raises FetchError on a lock that is not well-formed."""
    try:
        rows = tomllib.loads(lock.read_text(encoding="utf-8"))["pin"]
        pins = [
            Pin(row["name"], row["version"], row["from"], row["file"], row["sha256"], tuple(row["need"]),
                int(row["size"]), int(row["unpacked"]), row.get("suite", ""), row.get("inside", ""),
                tuple(row.get("take", ())))
            for row in rows
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise FetchError(f"{lock}: not a lock file: {error!r}") from None
    for pin in pins:
        if pin.origin not in ORIGINS:
            raise FetchError(f"{lock}: {pin.name} is from {pin.origin!r}; known are {', '.join(ORIGINS)}")
        if not re.fullmatch("[0-9a-f]{64}", pin.sha256) or Path(pin.file).name != pin.file:
            raise FetchError(f"{lock}: {pin.name} has no sha256 of 64 digits or no plain file name")
    return pins


def cache_folder() -> Path:
    """Return the folder of downloads; never inside what git tracks."""
    return Path(os.environ.get(CACHE_VARIABLE) or REPOSITORY / "build" / "android" / "cache").absolute()


def needed_by(part: str, pins: Iterable[Pin]) -> list[Pin]:
    """Return the pins that `part` needs. Raises FetchError if there are none."""
    found = [pin for pin in pins if part in pin.need]
    if not found:
        raise FetchError(f"nothing is pinned for {part!r}")
    return found
