"""The cost of a verifier's step on several engines, measured in turns in one process.

    python -m benchmarks.step_costs --engines torch vllm                 one thread, float32, 1 and 8 sessions
    python -m benchmarks.step_costs --engines vllm --sessions 1 8 32 64 --dtype bfloat16 --json steps.json

A step is whole: forward, draws, moves of accepted rows and feature rows. Every session has some committed tokens and
verifies nothing, a chain, or a tree whose second node is right. CPU milliseconds exclude the machine's other work;
on a GPU wall milliseconds count. The ratio is CPU time over the first engine's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import Figures, common_arguments, conclude
from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord
from cloud.loading import load_verifier
from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.machine import describe_machine
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Open, pack_ids

COMMITTED = 200
ROOM = 256  # pool rows of a session beside its committed tokens


def branching(nodes: int) -> list[int]:
    """Return the parents of a tree with a leaf on every second node, at depths 2, 3, 4 ... in turn."""
    half, wide = nodes // 2, max(1, nodes // 6)
    return [max(-1, node - wide) for node in range(half)] + list(range(half))


#: the tree of each session: parents of its nodes
SHAPES: dict[str, list[int]] = {
    "plain": [],
    "chain of 6": list(range(-1, 5)),
    "12 nodes in 6 paths": branching(12),
    "24 nodes in 12 paths": branching(24),
}


class Steps:
    """Sessions of one verifier, set back after every step."""

    def __init__(self, verifier: Verifier, count: int) -> None:
        self._verifier, rng = verifier, random.Random(0)
        self._sessions = [self._open(rng) for _ in range(count)]
        self._truths = self._step(self._sessions, [TokenTree()] * count)

    def _open(self, rng: random.Random) -> SessionRecord:
        store, engine = self._verifier.sessions, self._verifier.engine
        name, tokens = rng.randbytes(16), [rng.randrange(self._verifier.vocab_size) for _ in range(COMMITTED)]
        session = store.open(name, Open(0, name, 0, pack_ids(tokens), 0, Sampling()), tokens, set())
        assert isinstance(session, SessionRecord) and engine.pool.reserve(name, COMMITTED + ROOM, set())
        engine.step([Segment.of(session, engine.pool, COMMITTED - 1)])
        return session

    def run(self, parents: Sequence[int]) -> None:
        """Run a step in which every session verifies a tree of this shape."""
        self._step(self._sessions, [self._tree(parents, truth) for truth in self._truths])

    def _tree(self, parents: Sequence[int], truth: int) -> TokenTree:
        right = 1 if len(parents) > 1 and parents[1] < 0 else 0
        tokens = [(truth + node - right) % self._verifier.vocab_size for node in range(len(parents))]
        return TokenTree(tuple(tokens), tuple(parents))

    def _step(self, sessions: Sequence[SessionRecord], trees: Sequence[TokenTree]) -> list[int]:
        engine = self._verifier.engine
        paths = engine.step(
            [Segment.of(each, engine.pool, 1, tree) for each, tree in zip(sessions, trees, strict=True)]
        )
        for session in sessions:
            del session.tokens[COMMITTED:]
            session.rows.truncate(COMMITTED - 1)
            engine.pool.truncate(session.id, COMMITTED - 1)
        return [path.bonus for path in paths if path is not None]


def milliseconds(repeats: int, runs: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
    """Return median (CPU, wall) milliseconds of each, taken in turns."""
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for index, run in enumerate(runs):
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            if turn:
                times[index].append((1000 * (time.process_time() - cpu), 1000 * (time.perf_counter() - wall)))
    return [(statistics.median(cpu for cpu, _ in each), statistics.median(wall for _, wall in each)) for each in times]


def measure(options: argparse.Namespace, console: Console) -> Figures:
    """Return all rows of the table."""
    rows, verifiers = max(options.sessions) * 2 * ROOM, dict[str, Verifier]()
    for name in options.engines:
        console.print(f"loading on {name} ...", style="dim")
        dtype: Any = "auto" if name == "onnx" else options.dtype
        verifiers[name] = load_verifier(
            Settings(
                model=options.target, drafter=options.drafter, engine=name, dtype=dtype, threads=options.threads,
                cuda_graphs=options.cuda_graphs, kv_tokens=max(rows, 4096), max_nodes=options.nodes, tree_budget=1,
                max_sessions=1024,
            )
        )  # fmt: skip
    figures = list[Figures]()
    for count in options.sessions:
        steps = [Steps(verifier, count) for verifier in verifiers.values()]
        for shape, parents in SHAPES.items():
            if len(parents) > options.nodes:
                continue
            runs = [lambda each=each, parents=parents: each.run(parents) for each in steps]  # type: ignore[misc]
            times = milliseconds(options.repeats, runs)
            row: Figures = {"sessions": count, "shape": shape, "tokens": count * (1 + len(parents))}
            for name, (cpu, wall) in zip(verifiers, times, strict=True):
                row |= {f"{name}_cpu_ms": cpu, f"{name}_wall_ms": wall, f"{name}_ratio": cpu / times[0][0]}
            figures.append(row)
        for verifier in verifiers.values():
            for owner in verifier.engine.pool.owners():
                verifier.sessions.forget(owner)
    arithmetics = {name: verifier.arithmetic for name, verifier in verifiers.items()}
    return {"machine": describe_machine(), "threads": options.threads, "arithmetics": arithmetics, "steps": figures}


def show(figures: Figures, console: Console) -> None:
    """Print the table."""
    table = Table(title=f"a step: {', '.join(figures['arithmetics'].values())}; {figures['machine']}")
    for name in figures["steps"][0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in figures["steps"]:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common_arguments(parser, "target", "drafter", dtype="float32", threads=1, json=Path("build/step_costs.json"))
    parser.add_argument("--engines", choices=("torch", "vllm", "onnx"), nargs="+", default=["torch", "vllm"])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, default=24, help="largest tree; vLLM keeps room for its paths")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the median is taken")
    parser.add_argument("--cuda-graphs", choices=("on", "off"), default="off")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options, console = make_parser().parse_args(argv), Console(width=160)
    return conclude(lambda: measure(options, console), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
