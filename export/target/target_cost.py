"""`python -m export.target.target_cost BUNDLE`: measure a target bundle on this machine, as JSON. No torch.

It is a separate process, so that its memory is the bundle's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from outrider_core.machine import available_cores
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.bundle import open_target_bundle
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.runner import PIECE_TOKENS, OnnxRunner

#: tokens of a timed step, a root and a tree below it
WIDTHS = (1, 9, 17, 33)
#: tokens before it, and timed steps of each width, in turns
PAST, REPEATS = 128, 15
#: tokens in the pool when memory is measured
HELD = 1024


def measure_cost(folder: Path) -> dict[str, Any]:
    """Return seconds to load, median milliseconds of a step by width, and resident megabytes with HELD tokens."""
    bundle, process = open_target_bundle(folder), psutil.Process()
    held = min(HELD, bundle.max_positions - PIECE_TOKENS)
    began = time.perf_counter()
    rows = POOL_BLOCK * -(-(held + max(WIDTHS)) // POOL_BLOCK)
    runner = OnnxRunner.of(bundle, rows, available_cores())
    loaded = time.perf_counter() - began
    ids = [token % bundle.config.vocab_size for token in range(held)]
    past = min(PAST, held)
    runner.forward([Part(0, 0, tuple(ids[:past]), wanted=False)])
    taken = dict[int, list[float]]({width: [] for width in WIDTHS})
    for _ in range(REPEATS + 1):
        for width, seconds in taken.items():
            began = time.perf_counter()
            runner.forward([Part(0, past, (ids[0],), TokenTree.chain(ids[: width - 1]))])
            seconds.append(time.perf_counter() - began)
    if held > past:
        runner.forward([Part(0, past, tuple(ids[past:]), wanted=False)])
    return {
        "load_seconds": round(loaded, 2),
        "step_milliseconds": {str(width): round(1000 * median(times[1:]), 1) for width, times in taken.items()},
        "step_past_tokens": past,
        "resident_megabytes": round(process.memory_info().rss / 1e6),
        "resident_tokens": held,
        "threads": available_cores(),
    }


if __name__ == "__main__":
    print(json.dumps(measure_cost(Path(sys.argv[1]))))
