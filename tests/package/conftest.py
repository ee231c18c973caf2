"""The wheel and the sdist, built once from a copy of the working tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@dataclass(frozen=True)
class Distributions:
    wheel: Path
    sdist: Path


@dataclass(frozen=True)
class Installed:
    """A virtual environment that holds the wheel, and the folder that its commands run in."""

    venv: Path
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Nothing of the checkout: no PYTHONPATH, no settings of the shell that runs the tests."""
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME")
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }

    def run(self, name: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, such as `python` or `outrider`."""
        command = [str(self.venv / "bin" / name), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=timeout
        )


def build(hook: str, source: Path, output: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, hook, str(output)], cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The wheel is built from the unpacked sdist, which proves that nothing is missing from it."""
    copy, output, unpacked = (tmp_path_factory.mktemp(name) for name in ("copy", "dist", "unpacked"))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    build("build_sdist", copy, output)
    (sdist,) = output.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    build("build_wheel", source, output)
    (wheel,) = output.glob("*.whl")
    return Distributions(wheel, sdist)


def make_venv(folder: Path) -> Path:
    """An empty virtual environment without pip; ours installs into it from outside."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    return venv


def pip_install(venv: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "--quiet", *arguments]
    alone = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # pip would find a checkout there
    done = subprocess.run(command, capture_output=True, text=True, cwd=venv, env=alone)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel alone; its dependencies are those of the environment that runs the tests."""
    venv = make_venv(tmp_path_factory.mktemp("installed"))
    pip_install(venv, "--no-deps", "--no-index", str(distributions.wheel))
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(venv, tmp_path_factory.mktemp("elsewhere"))
