"""Draft steps of the Kotlin runtime on the desktop JVM and of the Python runtime, side by side.

    python -m benchmarks.jvm --engine onnx --threads 1

The same bundle, engine, number of threads, inputs and texts; the two take turns, so that what else the machine does
meets both. The JVM runs the app's own x86-64 natives (android_demo/ci/native.py), Python its packages' (so the versions
of ONNX Runtime and ExecuTorch differ: the figures name Python's). Trees must come out equal.

step: the engine alone, `width` tokens behind 128, all logits asked for. draft: a whole tree behind each of the last
tokens of some texts, feature rows at all but the last; "own" is what the drafter itself takes of it. Times are the
median over all calls of a turn, then the median and the least over turns. memory: of the JVM (--memory): see `memory`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from android_demo.ci import core, engines, native
from benchmarks.command import Figures, common_arguments, conclude
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.engines import MASKED, Engine, Floats, Ints, installed, open_engine
from outrider_core.drafting.row_cost import USUAL
from outrider_core.machine import Others, processor_name
from outrider_core.protocol.sampling import Sampling

#: English and code
TEXT = str(np.einsum.__doc__)
#: texts, tokens of each, and where drafting begins
TEXTS, LENGTH, START = 4, 144, 128
WIDTHS = (1, 8, 32)
NODES = (8, 15, 62)
SAMPLINGS = {"greedy": Sampling(), "T=0.7": Sampling(temperature=0.7, seed=7)}
#: steps of one turn, and turns before those that count: the JVM compiles what is hot
COUNT, WARM_UP = 60, 12
#: columns of the printed table
WIDTH = 120


def samples(*shape: int) -> Floats:
    """Return random-looking values, the same as in Bench.kt."""
    index = np.arange(np.prod(shape), dtype=np.int64)
    return ((index * 7919 % 1024 - 512) / np.float32(256)).astype(np.float32).reshape(shape)


class Timed:
    """An engine that adds up the time of its steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seconds, self.steps = engine, 0.0, 0

    def step(
        self,
        tokens: Ints,
        positions: Ints,
        wanted: Ints,
        sa_mask: Floats,
        sa_keys: Floats,
        sa_values: Floats,
        row_keys: Floats,
        row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:
        began = time.perf_counter()
        results = self.engine.step(tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values)
        self.seconds += time.perf_counter() - began
        self.steps += 1
        return results


class Here:
    """The Python runtime."""

    def __init__(self, bundle: Bundle, engine: str, threads: int) -> None:
        self.bundle, self.engine = bundle, open_engine(bundle, engine, threads)

    def ask(self, what: str, **asked: Any) -> Figures:
        return self._steps(**asked) if what == "step" else self._drafts(**asked)

    def _steps(self, width: int, past: int, count: int) -> Figures:
        manifest, every = self.bundle.manifest, np.arange(width)
        mask = np.where(np.arange(past + width) > (past + every)[:, None], MASKED, np.float32(0))
        keys = samples(past, manifest.sa_kv_heads, manifest.head_dim)
        rows = samples(past, manifest.ca_kv_heads, manifest.head_dim)
        tokens, positions, seconds = every * 7919 % manifest.vocab_size, past + every, []
        for _ in range(count):
            began = time.perf_counter()
            self.engine.step(tokens, positions, every, mask, keys, keys, rows, rows)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def _drafts(self, texts: list[list[int]], start: int, nodes: int, sampling: dict[str, Any]) -> Figures:
        distribution, shape, engine = Sampling(**sampling), TreeShape(nodes), Timed(self.engine)
        row_shape = self.bundle.row_shape
        seconds, trees, inside, steps = [], [], 0.0, 0
        for text in texts:
            drafter = Drafter.of(self.bundle, engine, row_cost=USUAL)
            last = len(text) - 1
            drafter.add_rows(np.arange(last), samples(last, 2, *row_shape))
            for end in range(start, len(text) + 1):
                prefix, engine.seconds, engine.steps = text[:end], 0.0, 0
                began = time.perf_counter()
                tree = drafter.draft(prefix, distribution, shape).tree
                taken = time.perf_counter() - began
                trees.append([*tree.tokens, *tree.parents])
                if end > start:
                    seconds.append(taken)
                    inside, steps = inside + engine.seconds, steps + engine.steps
        return {"seconds": seconds, "engine": inside, "steps": steps, "trees": trees}


class Jvm:
    """The Kotlin runtime in a JVM of its own."""

    def __init__(self, bundle: Bundle, engine: str, threads: int, *options: str, verify: bool = False) -> None:
        tools, libraries = core.Toolchain.fetched(), engines.Libraries.fetched()
        classpath = [*engines.build_tests(tools, libraries), native.build_compat(tools)]
        program = [*native.options(native.build(libraries)), *options, "dev.outrider.engines.BenchKt"]
        command = [part for part in core.java(classpath, *program) if part != "-ea"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say({"bundle": str(bundle.folder), "engine": engine, "threads": threads, "verify": verify})

    def __enter__(self) -> Jvm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def ask(self, what: str, **asked: Any) -> Figures:
        self._say({"what": what, **asked})
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the JVM ended; its reason stands above")
        figures: Figures = json.loads(line)
        return figures

    def _say(self, asked: Figures) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()


def sides(turns: list[tuple[Figures, Figures]], figure: Callable[[Figures], float]) -> Figures:
    """Return median and least of `figure` over the turns, in ms, of both sides, and their ratio."""
    kotlin, python = ([figure(turn[side]) * 1e3 for turn in turns] for side in (0, 1))
    medians = statistics.median(kotlin), statistics.median(python)
    return {
        "jvm_ms": round(medians[0], 3), "python_ms": round(medians[1], 3), "jvm_min_ms": round(min(kotlin), 3),
        "python_min_ms": round(min(python), 3), "ratio": round(medians[0] / medians[1], 3),
        "min_ratio": round(min(kotlin) / min(python), 3),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> Figures:
    # torch, which ExecuTorch's wheel brings along, would let other threads spin beside the engine's
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    bundle, others = open_bundle(options.bundle), Others()
    here = Here(bundle, options.engine, options.threads)
    text = bundle.tokenizer.encode(TEXT).ids
    texts = [text[n * LENGTH : (n + 1) * LENGTH] for n in range(TEXTS)]
    figures: Figures = {
        "engine": options.engine, "threads": options.threads, "processor": processor_name(),
        "python_runtime": f"{installed(options.engine)} {version(installed(options.engine) or '')}", "repeats":
        options.repeats, "rows": [],
    }  # fmt: skip
    asked: list[tuple[str, Figures]] = [
        (f"step of {width}", {"what": "step", "width": width, "past": START, "count": COUNT}) for width in WIDTHS
    ]
    for name, sampling in SAMPLINGS.items():
        settings = msgspec.structs.asdict(sampling)
        asked += [
            (f"tree of {nodes}, {name}",
             {"what": "draft", "texts": texts, "start": START, "nodes": nodes, "sampling": settings})
            for nodes in NODES
        ]  # fmt: skip
    turns: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name, _ in asked}
    with Jvm(bundle, options.engine, options.threads) as jvm:
        for _ in range(WARM_UP):
            for _, question in asked:
                jvm.ask(**question)
        for _ in range(options.repeats):
            for name, question in asked:
                turns[name].append((jvm.ask(**question), here.ask(**question)))
    for name, question in asked:
        row = {"what": name, **sides(turns[name], lambda turn: statistics.median(turn["seconds"]))}
        if question["what"] == "draft":
            for one, other in turns[name]:
                if (one["trees"], one["steps"]) != (other["trees"], other["steps"]):
                    raise RuntimeError(f"{name}: the two drafted other trees")
            row["steps_per_tree"] = round(turns[name][0][0]["steps"] / len(turns[name][0][0]["seconds"]), 2)
            row["own"] = sides(turns[name], lambda turn: (sum(turn["seconds"]) - turn["engine"]) / len(turn["seconds"]))
        figures["rows"].append(row)
    figures["others_cores"] = others.cores()
    return figures


def memory(options: argparse.Namespace) -> Figures:
    """Measure a JVM with a small heap in MB: empty, with the bundle open, the engine loaded, and its drafting peak."""
    bundle = open_bundle(options.bundle)
    question = bundle.tokenizer.encode(TEXT).ids[:1100]
    with Jvm(bundle, options.engine, options.threads, "-Xmx64m", "-XX:+UseSerialGC", verify=True) as jvm:
        jvm.ask("draft", texts=[question], start=1024, nodes=32, sampling=msgspec.structs.asdict(Sampling()))
        kib = jvm.ask("memory")

    def mb(moment: str, of: str) -> float:
        return round(kib[moment][of] * 1024 / 1e6, 1)

    return {
        "engine": options.engine, "threads": options.threads, "empty_mb": mb("begun", "VmRSS"),
        "bundle_mb": mb("opened", "VmRSS"), "loaded_mb": mb("loaded", "VmRSS"), "drafting_mb": mb("now", "VmRSS"),
        "peak_mb": mb("now", "VmHWM"), "java_heap_mb": mb("now", "heap"),
    }  # fmt: skip


def show(figures: Figures) -> None:
    if "rows" not in figures:
        print(json.dumps(figures, indent=2))
        return
    title = f"{figures['engine']}, {figures['threads']} thread(s), ms: median (least)"
    table = Table("", "JVM", "Python", "ratio", "own part: JVM", "Python", "ratio", "steps", title=title)
    for row in figures["rows"]:
        own = row.get("own")
        cells = [f"{one[f'{side}_ms']} ({one[f'{side}_min_ms']})" for one in (row, own) if one for side in
                 ("jvm", "python")]  # fmt: skip
        cells.insert(2, f"{row['ratio']} ({row['min_ratio']})")
        if own:
            cells += [f"{own['ratio']} ({own['min_ratio']})", str(row["steps_per_tree"])]
        table.add_row(row["what"], *cells)
    Console(width=WIDTH).print(table)
    print(f"{figures['processor']}; others used {figures['others_cores']:.1f} cores meanwhile")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser, "bundle")
    parser.add_argument("--engine", default="onnx")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9, help="turns that count")
    parser.add_argument("--memory", action="store_true", help="measure the JVM's memory instead")
    parser.add_argument("--output", type=Path, default=Path("build/jvm.json"))
    options = parser.parse_args()
    if reason := native.unavailable():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    return conclude(lambda: (memory if options.memory else measure)(options), show, options.output, Console())


if __name__ == "__main__":
    sys.exit(main())
