"""The registries' ordinary clients: each puts one pinned file into a folder and leaves nothing elsewhere."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from android_demo.ci.pins import REPOSITORY, FetchError, Pin

#: runs npm, with Node from the package index if the machine has none
WITH_NODE = REPOSITORY / "browser_runtime" / "tools" / "with-node"


def _npm(pin: Pin, folder: Path) -> None:
    run([str(WITH_NODE), sys.executable, "npm", "pack", "--silent", "--cache", str(folder / ".npm"),
         "--pack-destination", str(folder), f"{pin.name}@{pin.version}"])  # fmt: skip


def _pypi(pin: Pin, folder: Path) -> None:
    """Download a wheel, by the tags in its name, so that every machine gets the same one."""
    python, abi, platforms = pin.file.removesuffix(".whl").split("-")[-3:]
    tags = [f"--platform={platform}" for platform in platforms.split(".")]
    if abi != "none":
        tags += [f"--python-version={python.removeprefix('cp')}", f"--abi={abi}"]
    scratch = folder / ".pip"
    scratch.mkdir()
    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
         *tags, "--dest", str(folder), f"{pin.name}=={pin.version}"], env={"TMPDIR": str(scratch)})  # fmt: skip


def _debian(pin: Pin, folder: Path) -> None:
    """Download from the machine's Debian mirror, perhaps of another suite; the machine's settings stay unchanged."""
    run([*_apt(pin.suite), "download", f"{pin.name}={pin.version}"], cwd=folder)
    for file in folder.glob("*%3a*"):  # apt writes an epoch's colon like that
        file.rename(folder / file.name.replace("%3a", ":"))


@functools.cache
def _apt(suite: str) -> list[str]:
    """Return apt-get with the package lists of `suite`, which are fetched once and removed when the process ends."""
    root = Path(_scratch().name) / suite
    for name in ("lists/partial", "cache/archives/partial"):
        (root / name).mkdir(parents=True)
    (root / "sources.list").write_text(f"{_mirror()} {suite} main\n", encoding="utf-8")
    settings = {
        "Dir::Etc::sourcelist": root / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": root / "lists", "Dir::Cache": root / "cache", "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",
    }  # fmt: skip
    apt = ["apt-get", "--quiet=2", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt, "update"])
    return apt


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="outrider-apt-")


def _mirror() -> str:
    """Return a line of sources.list up to the address: the machine's first source that is a Debian archive."""
    rows = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(SIGNED_BY)", "Created-By: Packages"])
    for row in rows.splitlines():
        address, _, key = row.strip().partition(" ")
        if address.rstrip("/").rsplit("/", 1)[-1] == "debian":
            return f"deb [signed-by={key}] {address}" if key.startswith("/") else f"deb {address}"
    raise FetchError("apt knows no Debian archive here; put the .deb files of pins.toml into the cache folder by hand")


def run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Return a command's output. Raises FetchError with its last line if it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, errors="replace",
            check=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise FetchError(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        tail = (error.stderr.strip() or error.stdout.strip()).splitlines()[-1:]
        raise FetchError(f"{' '.join(command[:2])} ended with {error.returncode}: {' '.join(tail)}") from None
    return done.stdout


CLIENTS: dict[str, Callable[[Pin, Path], None]] = {"npm": _npm, "pypi": _pypi, "debian": _debian}
