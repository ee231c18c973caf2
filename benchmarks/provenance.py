"""The origin of a figure: the command, machine, day and commit of its measurement."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

from outrider_core.machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]


def provenance() -> dict[str, str]:
    """Identify this run, for the `run` field of a results file.

    command: as typed, with files by their names alone; commit: short hash, with "+" if the checkout had changes in
    tracked files, "unknown" outside a checkout.
    """
    return {
        "command": command(sys.argv[1:]),
        "machine": describe_machine(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def command(arguments: list[str]) -> str:
    """Return `python -m MODULE ARGUMENTS` of the running program, without this machine's folders and without --json."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = ["python", "-m", (spec.name if spec else Path(sys.argv[0]).stem).removesuffix(".__main__")]
    skip = False
    for word in arguments:
        if skip or word.startswith("--json="):
            skip = False
            continue
        if word == "--json":
            skip = True
            continue
        words.append(Path(word).name if Path(word).is_absolute() or word.startswith("..") else word)
    return " ".join(words)


def commit() -> str:
    """Return the checkout's commit, for a results file."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        dirty = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
