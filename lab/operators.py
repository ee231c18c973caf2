"""Profile a step by operator: ONNX Runtime's own profile of the target's graph and of the drafter's.

    python -m lab.operators
    python -m lab.operators --bundle build/bundle --threads 2 --rows 1 9 33

The target's graph is the understudy's of the bundle: in the default bundle the very file that a verifier without a GPU
runs. Milliseconds are medians of steps behind a prefix of 128 tokens. A profile itself costs some microseconds for each
operator, so the last line is measured without one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

from benchmarks.command import Figures, common_arguments, conclude
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.engines import open_engine
from outrider_core.machine import describe_machine
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.bundle import open_target_bundle
from outrider_core.targets.part import Part
from outrider_core.targets.runner import OnnxRunner

#: tokens of the prefix, and rows of the pool
PREFIX, POOL = 128, 1024
WARM_UP = 4
#: opens a session and returns a step of it
Opened = Callable[[], Callable[[], object]]


@contextmanager
def profiled(folder: Path) -> Iterator[list[onnxruntime.InferenceSession]]:
    """Sessions that are opened meanwhile write a profile; yields them, in order."""
    opened, plain = list[onnxruntime.InferenceSession](), onnxruntime.InferenceSession

    def opening(graph: Any, options: onnxruntime.SessionOptions, **more: Any) -> onnxruntime.InferenceSession:
        options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
        opened.append(plain(graph, options, **more))
        return opened[-1]

    with mock.patch.object(onnxruntime, "InferenceSession", opening):
        yield opened


def target_step(bundle: Bundle, rows: int, threads: int) -> Opened:
    """A step of the understudy's graph for a tree of `rows` - 1 nodes below one token, two children each."""
    target = open_target_bundle(bundle.folder / "understudy")
    parents = [ROOT, *((node - 1) // 2 for node in range(1, rows - 1))][: rows - 1]
    tree = TokenTree(tuple(range(10, 9 + rows)), tuple(parents))

    def opened() -> Callable[[], object]:
        runner = OnnxRunner.of(target, POOL, threads)
        runner.forward([Part(0, 0, tuple(range(10, 10 + PREFIX)), wanted=False)])
        return lambda: runner.forward([Part(0, PREFIX, (7,), tree)])

    return opened


def drafter_step(bundle: Bundle, rows: int, threads: int) -> Opened:
    """A step of the drafter's graph for `rows` tokens that do not see each other."""
    manifest, shape = bundle.manifest, bundle.row_shape
    rng = np.random.default_rng(0)
    own = rng.standard_normal((2, PREFIX, manifest.sa_kv_heads, shape.head_dim)).astype(np.float32)
    read = rng.standard_normal((2, PREFIX, *shape)).astype(np.float32)
    mask = np.zeros((rows, PREFIX + rows), np.float32)
    mask[:, PREFIX:] = np.where(np.eye(rows), 0, -1e9)
    tokens = np.arange(10, 10 + rows)
    positions = np.full(rows, PREFIX)

    def opened() -> Callable[[], object]:
        engine = open_engine(bundle, "onnx", threads)
        return lambda: engine.step(tokens, positions, np.arange(rows), mask, *own, *read)

    return opened


def measure(options: argparse.Namespace) -> Figures:
    """Milliseconds and number of each operator, by graph and rows."""
    bundle, steps = open_bundle(options.bundle), list[Figures]()
    asked = [("target", rows, target_step) for rows in options.rows]
    asked += [("drafter", rows, drafter_step) for rows in options.drafter_rows]
    for graph, rows, step_of in asked:
        opened = step_of(bundle, rows, options.threads)
        plain = _seconds(opened(), options.steps)
        with tempfile.TemporaryDirectory() as folder, profiled(Path(folder)) as sessions:
            _seconds(opened(), options.steps)
            events = json.loads(Path(sessions[-1].end_profiling()).read_text())
        steps.append({"graph": graph, "rows": rows, "step_ms": 1000 * plain, "operators": by_operator(events)})
    return {"machine": describe_machine(), "threads": options.threads, "steps": steps}


def _seconds(step: Callable[[], object], count: int) -> float:
    """The median of `count` steps."""
    taken = list[float]()
    for _ in range(WARM_UP + count):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[WARM_UP:])


def by_operator(events: Sequence[Figures]) -> dict[str, Figures]:
    """Of ONNX Runtime's events: how often a step runs each operator and its milliseconds, the costliest first.

    The milliseconds are the median of the session's second half of runs.
    """
    runs = sorted((event for event in events if event["name"] == "model_run"), key=lambda event: event["ts"])
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    counts, times = dict[str, int](), defaultdict[str, list[float]](list)
    for run in runs[len(runs) // 2 :]:
        of_run = defaultdict[str, list[float]](list)
        for event in kernels:
            if run["ts"] <= event["ts"] < run["ts"] + run["dur"]:
                of_run[event["args"]["op_name"]].append(event["dur"])
        for name, durations in of_run.items():
            counts[name] = len(durations)
            times[name].append(sum(durations) / 1000)
    found = {name: {"nodes": counts[name], "ms": statistics.median(each)} for name, each in times.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def show(figures: Figures, console: Console) -> None:
    """A table of operators by step, in milliseconds."""
    steps = figures["steps"]
    table = Table("operator", *(f"{step['graph']}, {step['rows']}" for step in steps), title=figures["machine"])
    for name in dict.fromkeys(name for step in steps for name in step["operators"]):
        each = [step["operators"].get(name) for step in steps]
        table.add_row(name, *(f"{of['nodes']} × {of['ms'] / of['nodes'] * 1000:.1f} us" if of else "" for of in each))
    counted = [step["operators"].values() for step in steps]
    table.add_row("nodes", *(str(sum(each["nodes"] for each in of)) for of in counted))
    table.add_row("operators, ms", *(f"{sum(each['ms'] for each in of):.2f}" for of in counted))
    table.add_row("step, ms", *(f"{step['step_ms']:.2f}" for step in steps))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.operators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "bundle", "threads", json=Path("build/operators.json"))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 9, 33], help="tokens of a step of the target")
    parser.add_argument("--drafter-rows", type=int, nargs="*", default=[1, 8], help="tokens of a step of the drafter")
    parser.add_argument("--steps", type=int, default=40)
    options, console = parser.parse_args(argv), Console()
    return conclude(lambda: measure(options), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
