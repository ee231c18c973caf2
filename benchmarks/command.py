"""How a benchmark ends: figures on the screen and in a JSON file, or one line of error."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.provenance import provenance

Figures = dict[str, Any]
#: what bad input, missing files and machines that cannot do it raise: errors of ours are RuntimeErrors
ERRORS = (RuntimeError, OSError, ValueError, KeyError)


def conclude(measure: Callable[[], Figures], show: Callable[[Figures], None], path: Path, console: Console) -> int:
    """Measure, write the figures to `path` and show them. Returns the exit status.

    The file also says where the figures come from, in its field `run`.
    SIGTERM ends it as Ctrl-C does, so that no verifier is left behind.
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
