"""What a step costs the host beside the device's work: attention session by session against the plan of fixed shape.

    python -m benchmarks.host_time                      loop and plan, 1, 8 and 64 sessions, in turns
    python -m benchmarks.host_time --device cuda --dtype bfloat16 --json host.json

The target is random: the layers and heads of a model of 8 billion parameters, and widths so small that arithmetic is
next to nothing. Each session has a prefix of some tokens and verifies a tree. Columns:

    operations   that torch is asked for in a forward; the plan's are counted uncompiled, as a compiled step is one call
    host ms      until `forward` returns. On CUDA nothing is waited for. On a CPU that includes all arithmetic
    table ms     of these, the making of the plan's table: all that depends on the number of sessions
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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

SHAPE = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8}
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


def medians(repeats: int, *runs: Callable[[], object]) -> list[float]:
    """Median milliseconds of each until it returns, taken in turns; what a device still does then is waited for."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 2):
        for index, run in enumerate(runs):
            begun = time.perf_counter()
            run()
            took = 1000 * (time.perf_counter() - begun)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= 2:
                times[index].append(took)
    return [statistics.median(each) for each in times]


def measure(options: argparse.Namespace, console: Console) -> Figures:
    """All rows of the table."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    loop, plan, compiled = (make_runner(steps, options) for steps in ("loop", "pool", "compiled"))
    sizes = sorted({compiled_rows(sessions * (1 + options.nodes)) for sessions in SESSIONS})
    console.print(f"compiling steps of {', '.join(map(str, sizes))} rows ...", style="dim")
    compiled.warm_up(sizes)
    rows = []
    for sessions in SESSIONS:
        parts = make_parts(sessions, options.nodes)
        size = compiled_rows(sum(map(len, parts)))
        in_loop, in_plan, of_table = medians(
            options.repeats,
            lambda parts=parts: loop.forward(parts),
            lambda parts=parts: compiled.forward(parts),
            lambda parts=parts, size=size: step_table(parts, size, loop.store.spare),
        )
        rows.append({"sessions": sessions, "steps": "loop", "operations": count(loop, parts), "host_ms": in_loop})
        fixed = {"sessions": sessions, "steps": compiled.steps, "operations": count(plan, parts), "host_ms": in_plan}
        rows.append({**fixed, "table_ms": of_table})
    machine = torch.cuda.get_device_name() if loop.device.type == "cuda" else describe_machine()
    return {"machine": machine, "dtype": options.dtype, "nodes": options.nodes, "host_time": rows}


def show(figures: Figures, console: Console) -> None:
    table = Table(title=f"host time of a step: 8B layers and heads, {figures['dtype']}, {figures['machine']}")
    for name in ("sessions", "steps", "operations", "host ms", "table ms"):
        table.add_column(name, justify="right")
    for row in figures["host_time"]:
        ends = [f"{row[name]:.2f}" if name in row else "" for name in ("host_ms", "table_ms")]
        table.add_row(str(row["sessions"]), row["steps"], f"{row['operations']:,}", *ends)
    console.print(table)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "device", "threads", "seed", dtype="float32", json=Path("build/host_time.json"))
    parser.add_argument("--nodes", type=int, default=0, help="nodes of each session's tree; 0: single tokens")
    parser.add_argument("--repeats", type=int, default=9, help="runs of which the median is taken")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options, console = make_parser().parse_args(argv), Console()
    return conclude(lambda: measure(options, console), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
