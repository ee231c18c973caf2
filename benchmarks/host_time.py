"""What a step costs the host beside the device's work: attention session by session against the plan of fixed shape.

    python -m benchmarks.host_time                      1, 8 and 64 sessions, loop and plan in turns
    python -m benchmarks.host_time --device cuda --dtype bfloat16 --json host.json

The target is random: the layers and heads of a model of 8 billion parameters, and widths so small that arithmetic is
next to nothing. Each session has a prefix of some tokens and verifies a tree. Columns:

    loop operations, plan operations   that torch is asked for in a forward; the plan's are counted uncompiled
    loop ms       a forward, attention session by session, until it returns. On CUDA nothing is waited for; on a CPU
                  that includes the arithmetic, such as it is
    table ms      the making of the plan's table: of the host's work with the plan, all that depends on the sessions
    compiled ms   a forward by the plan, compiled, on CUDA as a graph, table included. On a CPU only with --compile: it
                  takes many minutes to compile and is nearly all arithmetic, as the kernels for CPUs are slow
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.command import Figures, common_arguments, conclude
from cloud.torch_engine.plan import step_table
from cloud.torch_engine.runner import Steps, TorchRunner, compiled_rows
from outrider_core.machine import describe_machine
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part

SHAPE = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16}
SESSIONS = (1, 8, 64)
PAST = 64  # rows of every session's prefix


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_runner(steps: Steps, options: argparse.Namespace) -> TorchRunner:
    """A runner of the random target, the same for every kind of steps."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=256, sliding_window=None, **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval().requires_grad_(False)
    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
    model = model.to("cpu" if device == "auto" else device)
    return TorchRunner(model, max(SESSIONS) * 256, SHAPE["num_key_value_heads"], SHAPE["head_dim"], steps)


def make_parts(sessions: int, nodes: int) -> list[Part]:
    return [Part(256 * i, PAST, (5,), TokenTree.chain(range(nodes))) for i in range(sessions)]


def count(runner: TorchRunner, parts: Sequence[Part]) -> int:
    with Operations() as seen:
        runner.forward(parts)
    return seen.count


def medians(repeats: int, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each until it returns, taken in turns; what a device still does then is waited for."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            took = 1000 * (time.perf_counter() - begun)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(took)
    return {name: statistics.median(each) for name, each in times.items()}


def measure(options: argparse.Namespace, console: Console) -> Figures:
    """All rows of the table."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    loop, plan, compiled = (make_runner(steps, options) for steps in ("loop", "pool", "compiled"))
    if compiling := options.compile or loop.device.type == "cuda":
        sizes = sorted({compiled_rows(sessions * (1 + options.nodes)) for sessions in SESSIONS})
        console.print(f"compiling steps of {', '.join(map(str, sizes))} rows ...", style="dim")
        compiled.warm_up(sizes)
        if compiled.steps != "compiled":
            raise RuntimeError("the step cannot be compiled here; the log above says why")
    rows = []
    for sessions in SESSIONS:
        parts = make_parts(sessions, options.nodes)
        runs: dict[str, Callable[[], object]] = {
            "loop_ms": partial(loop.forward, parts),
            "table_ms": partial(step_table, parts, compiled_rows(sum(map(len, parts))), loop.store.spare),
        }
        if compiling:
            runs["compiled_ms"] = partial(compiled.forward, parts)
        counts = {"loop_operations": count(loop, parts), "plan_operations": count(plan, parts)}
        rows.append({"sessions": sessions, **counts, **medians(options.repeats, runs)})
    machine = torch.cuda.get_device_name() if loop.device.type == "cuda" else describe_machine()
    return {"machine": machine, "dtype": options.dtype, "nodes": options.nodes, "host_time": rows}


def show(figures: Figures, console: Console) -> None:
    table = Table(title=f"host time of a step: 8B layers and heads, {figures['dtype']}, {figures['machine']}")
    rows = figures["host_time"]
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else f"{value:,}" for value in row.values()))
    console.print(table)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "device", "threads", "seed", dtype="float32", json=Path("build/host_time.json"))
    parser.add_argument("--nodes", type=int, default=0, help="nodes of each session's tree; 0: single tokens")
    parser.add_argument("--repeats", type=int, default=9, help="runs of which the median is taken")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU too, which takes many minutes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options, console = make_parser().parse_args(argv), Console()
    return conclude(lambda: measure(options, console), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
