"""Read pins.toml: which files of which registries the scripted build takes, by their sha256, and how large they are."""

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
#: where to keep downloads, instead of build/android/cache
CACHE_VARIABLE = "OUTRIDER_ANDROID_CACHE"
#: what `from` may say
ORIGINS = ("npm", "pypi", "debian")


class FetchError(RuntimeError):
    """A pinned file is unavailable, or differs from the lock. One line that says what to do."""


@dataclass(frozen=True)
class Pin:
    """One file of a registry.

    origin: the lock's `from`; need: the parts that want it; size, unpacked: bytes of the file and of what is unpacked;
    suite: of Debian; inside: an archive in it that is unpacked in its place; take: patterns of the files to unpack, or
    () for all.
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
        """The name of what is unpacked: another one wherever other files would be in it."""
        made_of = self.sha256
        if self.inside or self.take:
            made_of = hashlib.sha256(f"{made_of} {self.inside} {self.take}".encode()).hexdigest()
        return f"{self.name}-{self.version}-{made_of[:8]}"


def read_pins(lock: Path = LOCK) -> list[Pin]:
    """All pins. Raises FetchError on a lock that is not well-formed."""
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
    """Where downloads are kept; never inside what git tracks."""
    return Path(os.environ.get(CACHE_VARIABLE) or REPOSITORY / "build" / "android" / "cache").absolute()


def needed_by(part: str, pins: Iterable[Pin]) -> list[Pin]:
    """The pins that `part` wants. Raises FetchError where there is none."""
    found = [pin for pin in pins if part in pin.need]
    if not found:
        raise FetchError(f"nothing is pinned for {part!r}")
    return found
