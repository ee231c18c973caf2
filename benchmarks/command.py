"""Arguments and endings that the benchmark commands share."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.provenance import provenance
from outrider_core.models.folders import default_drafter
from outrider_core.targets.source import DEFAULT_TARGET

Figures = dict[str, Any]
#: exceptions of bad input, missing files and unsuitable machines: our own errors are RuntimeErrors
ERRORS = (RuntimeError, OSError, ValueError, KeyError)
#: arguments that most benchmarks have, for argparse; a command may change the default
COMMON: dict[str, dict[str, Any]] = {
    "prompts": {"type": Path, "nargs": "+", "metavar": "FILE", "help": "JSONL with `turns`, `prompt` or `question`"},
    "count": {"type": int, "help": "questions of each file, spread evenly over it; 0: all"},
    "max_new_tokens": {"type": int, "help": "tokens of every answer"},
    "target": {"default": DEFAULT_TARGET, "help": "alias, Hugging Face id or folder"},
    "bundle": {"type": Path, "default": Path("build/bundle"), "help": "what the device loads"},
    "drafter": {"type": Path, "default": default_drafter(), "help": "drafter folder, trained on the target"},
    "dtype": {"choices": ["float32", "bfloat16", "float16"], "help": "the target's number format"},
    "device": {"default": "auto", "help": "torch device; auto takes CUDA where there is one"},
    "threads": {"type": int, "default": 0, "help": "CPU threads, 0: all cores"},
    "seed": {"type": int, "default": 0},
    "json": {"type": Path, "help": "where the figures go"},
}

#: --dtype of commands that start a verifier
VERIFIER_DTYPE: dict[str, Any] = {
    "choices": ["auto", "float32", "bfloat16", "float16"],
    "default": "float32",
    "help": "the target's number format in torch; auto: as a verifier chooses, on a CPU the 8-bit engine",
}


def common_arguments(parser: argparse.ArgumentParser, *names: str, **defaults: object) -> None:
    """Add arguments of COMMON: `names` unchanged, and those in `defaults` with another default.

    A name in `names` without a default is required.
    """
    for name in (*names, *defaults):
        options = COMMON[name] | ({"default": defaults[name]} if name in defaults else {})
        parser.add_argument("--" + name.replace("_", "-"), **options, required="default" not in options)


def conclude(measure: Callable[[], Figures], show: Callable[[Figures], None], path: Path, console: Console) -> int:
    """Measure, write the figures to `path` and show them. Returns the exit status.

    The file's field `run` says how they were measured. SIGTERM ends it like Ctrl-C, so that no verifier is left behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        figures = measure()
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"run": provenance(), **figures}, indent=2) + "\n")
    show(figures)
    console.print(f"figures: {path}", style="dim")
    return 0
