"""Read pins.toml, fetch what it names with the registries' ordinary clients, check every sha256, unpack."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

LOCK = Path(__file__).with_name("pins.toml")
REPOSITORY = Path(__file__).parents[2]
#: where to keep downloads, instead of build/android/cache
CACHE_VARIABLE = "OUTRIDER_ANDROID_CACHE"


class FetchError(RuntimeError):
    """A pinned file cannot be had, or is not what the lock says. One line that says what to do."""


@dataclass(frozen=True)
class Pin:
    """One file of a registry. origin: the lock's `from`; suite: of Debian; need: the parts that want it."""

    name: str
    version: str
    origin: str
    file: str
    sha256: str
    need: tuple[str, ...]
    suite: str = ""


def read_pins(lock: Path = LOCK) -> list[Pin]:
    """All pins. Raises FetchError on a lock that is not well-formed."""
    try:
        rows = tomllib.loads(lock.read_text(encoding="utf-8"))["pin"]
        pins = [
            Pin(row["name"], row["version"], row["from"], row["file"], row["sha256"], tuple(row["need"]),
                row.get("suite", ""))
            for row in rows
        ]  # fmt: skip
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise FetchError(f"{lock}: not a lock file: {error!r}") from None
    for pin in pins:
        if pin.origin not in CLIENTS:
            raise FetchError(f"{lock}: {pin.name} is from {pin.origin!r}; known are {', '.join(CLIENTS)}")
        if not re.fullmatch("[0-9a-f]{64}", pin.sha256) or Path(pin.file).name != pin.file:
            raise FetchError(f"{lock}: {pin.name} has no sha256 of 64 digits or no plain file name")
    return pins


def cache_folder() -> Path:
    """Where downloads are kept; never inside what git tracks."""
    return Path(os.environ.get(CACHE_VARIABLE) or REPOSITORY / "build" / "android" / "cache").absolute()


def fetch(pin: Pin, cache: Path) -> Path:
    """The pinned file in `cache`, downloaded if it is not there. Raises FetchError."""
    path = cache / pin.file
    if path.is_file() and _sha256(path) == pin.sha256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as aside:
        CLIENTS[pin.origin](pin, Path(aside))
        found = Path(aside) / pin.file
        if not found.is_file():
            names = ", ".join(sorted(entry.name for entry in Path(aside).iterdir())) or "nothing"
            raise FetchError(f"{pin.name} {pin.version}: {pin.origin} gave {names} instead of {pin.file}")
        if (got := _sha256(found)) != pin.sha256:
            raise FetchError(f"{pin.file} has sha256 {got}, the lock says {pin.sha256}; do not use it")
        found.replace(path)
    return path


def unpacked(pin: Pin, cache: Path) -> Path:
    """The pinned file's content as a folder in `cache`. Raises FetchError."""
    folder = cache / f"{pin.name}-{pin.version}-{pin.sha256[:8]}"
    if folder.is_dir():
        return folder
    archive = fetch(pin, cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".unpack-") as aside:
        content = Path(aside) / "content"
        if archive.suffix == ".deb":
            _run(["dpkg-deb", "--extract", str(archive), str(content)])
        else:
            shutil.unpack_archive(archive, content, "gztar" if archive.suffix == ".tgz" else "zip")
        content.replace(folder)
    return folder


def needed_by(part: str, pins: Iterable[Pin]) -> list[Pin]:
    """The pins that `part` wants. Raises FetchError where there is none."""
    found = [pin for pin in pins if part in pin.need]
    if not found:
        raise FetchError(f"nothing is pinned for {part!r}")
    return found


def _npm(pin: Pin, folder: Path) -> None:
    _run(["npm", "pack", "--silent", "--pack-destination", str(folder), f"{pin.name}@{pin.version}"])


def _pypi(pin: Pin, folder: Path) -> None:
    """A wheel; by the tags in its name, so that every machine gets the same one."""
    python, abi, platforms = pin.file.removesuffix(".whl").split("-")[-3:]
    tags = [f"--platform={platform}" for platform in platforms.split(".")]
    if abi != "none":
        tags += [f"--python-version={python.removeprefix('cp')}", f"--abi={abi}"]
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *tags,
          "--dest", str(folder), f"{pin.name}=={pin.version}"])  # fmt: skip


def _debian(pin: Pin, folder: Path) -> None:
    """From the Debian mirror that the machine uses, perhaps of another suite; its own settings stay as they are."""
    with tempfile.TemporaryDirectory(prefix="outrider-apt-") as scratch:
        root = Path(scratch)
        for name in ("lists/partial", "cache/archives/partial"):
            (root / name).mkdir(parents=True)
        (root / "sources.list").write_text(f"{_mirror()} {pin.suite} main\n", encoding="utf-8")
        settings = {
            "Dir::Etc::sourcelist": root / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": root / "lists", "Dir::Cache": root / "cache", "Acquire::Languages": "none",
            "APT::Sandbox::User": "root",
        }  # fmt: skip
        apt = ["apt-get", "--quiet=2", *(f"-o{name}={value}" for name, value in settings.items())]
        _run([*apt, "update"])
        _run([*apt, "download", f"{pin.name}={pin.version}"], cwd=folder)
        for file in folder.glob("*%3a*"):  # apt writes an epoch's colon so
            file.rename(folder / file.name.replace("%3a", ":"))


def _mirror() -> str:
    """A line of sources.list up to the address: the machine's first source that is a Debian archive."""
    rows = _run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(SIGNED_BY)", "Created-By: Packages"])
    for row in rows.splitlines():
        address, _, key = row.strip().partition(" ")
        if address.rstrip("/").rsplit("/", 1)[-1] == "debian":
            return f"deb [signed-by={key}] {address}" if key.startswith("/") else f"deb {address}"
    raise FetchError("apt knows no Debian archive here; put the .deb files of pins.toml into the cache folder by hand")


def _run(command: list[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", check=True)
    except FileNotFoundError:
        raise FetchError(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        tail = (error.stderr.strip() or error.stdout.strip()).splitlines()[-1:]
        raise FetchError(f"{' '.join(command[:2])} ended with {error.returncode}: {' '.join(tail)}") from None
    return done.stdout


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CLIENTS: dict[str, Callable[[Pin, Path], None]] = {"npm": _npm, "pypi": _pypi, "debian": _debian}
