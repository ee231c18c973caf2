"""The verifier's engine alone: the cost of a step by nodes and sessions, and the speed that results.

    python -m benchmarks.engine --dtype bfloat16                    all tables, default target
    python -m benchmarks.engine --only goals --repeats 15           the ratios alone
    python -m benchmarks.engine --model FOLDER --drafter FOLDER --device cuda --json engine.json

Everything runs in this process on one model; nothing else should run on the machine. Floors are measured here too:
memory (weights and keys and values read once, at the bandwidth of a plain read) and compute (two operations per
weight and token, at the rate of a large matrix product of the target's own shape).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from benchmarks.command import common_arguments
from benchmarks.provenance import provenance
from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord
from cloud.engine.tree_budget import TreeBudget, measure_costs
from cloud.loading import load_verifier
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.runner import TorchRunner
from outrider_core.machine import describe_machine
from outrider_core.models.target import head_dim_of, load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import Open, pack_ids
from outrider_core.targets.part import Part
from outrider_core.targets.source import TargetError, TargetSource

TABLES = ("goals", "steps", "throughput")
NODES, SESSIONS = (0, 8, 16, 32, 64, 128), (1, 2, 4, 8)
CONTEXT = 128  # committed tokens of every session in steps and goals
PROMPT, ANSWER, TREE = 64, 48, 16  # of the throughput table
Figures = dict[str, Any]


@dataclass
class Bench:
    """A verifier that is not started: this code calls the steps."""

    verifier: Verifier
    repeats: int
    rng: random.Random

    @property
    def runner(self) -> TorchRunner:
        runner = self.verifier.engine.runner
        assert isinstance(runner, TorchRunner)
        return runner

    def median(self, *runs: Callable[[], object]) -> list[float]:
        """Return the median seconds of each, taken in turns, so that a disturbance affects all of them."""
        times: list[list[float]] = [[] for _ in runs]
        for turn in range(self.repeats + 1):
            for index, run in enumerate(runs):
                begun = time.perf_counter()
                run()
                self.wait()
                if turn:
                    times[index].append(time.perf_counter() - begun)
        return [statistics.median(each) for each in times]

    def wait(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()

    def tree(self, nodes: int) -> TokenTree:
        """Return a random tree: new nodes hang below the root or any node."""
        parents = [self.rng.randrange(ROOT, node) if node else ROOT for node in range(nodes)]
        return TokenTree(tuple(range(100, 100 + nodes)), tuple(parents))

    def parts(self, sessions: int, nodes: int, past: int = CONTEXT) -> list[Part]:
        """Return a verify of each session; their rows follow one another in the pool."""
        return [Part(i * (past + 256), past, (5,), self.tree(nodes), True) for i in range(sessions)]

    def open(self, name: int, tokens: Sequence[int]) -> SessionRecord:
        """Return a session whose rows are all there."""
        store, engine = self.verifier.sessions, self.verifier.engine
        session_id = name.to_bytes(16, "little")
        request = Open(0, session_id, 0, pack_ids(list(tokens)), 0, Sampling())
        session = store.open(session_id, request, list(tokens), set())
        assert session is not None and engine.pool.reserve(session_id, len(tokens) + 256, set())
        engine.step([self.segment(session, len(tokens) - 1)])
        return session

    def segment(
        self, session: SessionRecord, chain: int, tree: TokenTree | None = None, features: bool = True
    ) -> Segment:
        return Segment.of(session, self.verifier.engine.pool, chain, tree, features)


@dataclass(frozen=True)
class Floors:
    """weight_bytes: read by a step once. kv_bytes: per token of context. macs: per token."""

    bandwidth: float
    flops: float
    weight_bytes: int
    kv_bytes: int
    weights: int

    def memory(self, context: int) -> float:
        return (self.weight_bytes + context * self.kv_bytes) / self.bandwidth

    def compute(self, tokens: int) -> float:
        return 2 * self.weights * tokens / self.flops

    def step(self, tokens: int, context: int) -> float:
        """Return the least seconds that a step can take."""
        return max(self.memory(context), self.compute(tokens))


def measure_floors(bench: Bench) -> Floors:
    """Measure the bandwidth of a buffer larger than any cache, and the target's widest layer on 512 tokens."""
    runner, model = bench.runner, bench.runner.model
    shape = model.config
    dtype, device = runner.store.dtype, runner.device
    buffer = torch.ones(256 << 20, dtype=torch.uint8, device=device).view(torch.int64)
    [read] = bench.median(lambda: buffer.sum())
    wide = model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 512, shape.hidden_size, dtype=dtype, device=device)
    [product] = bench.median(lambda: [wide(x) for _ in range(8)])
    head_dim = head_dim_of(shape)
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    attention = shape.hidden_size * head_dim * 2 * (heads + kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    weights = shape.num_hidden_layers * layer + shape.hidden_size * shape.vocab_size
    return Floors(
        buffer.numel() * 8 / read,
        8 * 2 * 512 * shape.hidden_size * shape.intermediate_size / product,
        weights * dtype.itemsize,
        runner.store.row_bytes,
        weights,
    )


class Plain:
    """The target as transformers runs it by itself, one sequence of CONTEXT tokens in its own cache."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.model = load_target(TargetSource.resolve(options.model), options.dtype, str(device)).model
        self._cache = DynamicCache(config=self.model.config)
        self._device = device
        self.forward(CONTEXT)

    def forward(self, tokens: int) -> None:
        """Run `tokens` tokens after the context; undo all but the first call."""
        first = self._cache.get_seq_length() == 0
        ids = torch.full((1, tokens), 5, device=self._device)
        self.model(ids, cache=self._cache, use_cache=True, logits_to_keep=1 if first else 0)
        if not first:
            self._cache.crop(-tokens)


@torch.inference_mode()
def measure_goals(bench: Bench, plain: Plain, floors: Floors) -> Figures:
    """Return ratios that tell whether trees and batches pay off, and the engine's cost beyond the target itself."""
    runner, engine = bench.runner, bench.verifier.engine
    one, tree = bench.parts(1, 0), bench.parts(1, 32)
    eight = bench.parts(8, 16)
    one_s, tree_s, eight_s, separate_s, plain_one_s, plain_many_s = bench.median(
        lambda: runner.forward(one),
        lambda: runner.forward(tree),
        lambda: runner.forward(eight),
        lambda: [runner.forward([part]) for part in eight],
        lambda: plain.forward(1),
        lambda: plain.forward(33),
    )
    # a whole step: forward, draws, compaction and feature rows; the session is set back each time
    sessions = [bench.open(100 + i, [5 + i] * CONTEXT) for i in range(4)]
    drafted = bench.tree(16)

    def step() -> None:
        engine.step([bench.segment(session, 1, drafted) for session in sessions])
        for session in sessions:
            del session.tokens[CONTEXT:]
            session.rows.truncate(CONTEXT - 1)
            engine.pool.truncate(session.id, CONTEXT - 1)

    segments = [bench.segment(session, 1, drafted) for session in sessions]
    step_s, forward_s = bench.median(step, lambda: runner.forward(segments))
    prompt = [Part(0, 0, tuple(range(5, 517)), TokenTree(), False)]
    [prefill_s] = bench.median(lambda: runner.forward(prompt))
    return {
        "one_token_ms": 1000 * one_s,
        "tree_of_32_ms": 1000 * tree_s,
        "tree_of_32_over_one_token": tree_s / one_s,
        "floors_of_the_same": floors.step(33, CONTEXT + 33) / floors.step(1, CONTEXT + 1),
        "transformers_one_token_ms": 1000 * plain_one_s,
        "transformers_33_tokens_ms": 1000 * plain_many_s,
        "tree_of_32_over_transformers_one_token": tree_s / plain_one_s,
        "tree_of_32_over_transformers_33_tokens": tree_s / plain_many_s,
        "eight_sessions_of_16_ms": 1000 * eight_s,
        "eight_together_over_separate": eight_s / separate_s,
        "whole_step_over_forward": step_s / forward_s,
        "prefill_tokens_per_second": 512 / prefill_s,
    }


@torch.inference_mode()
def measure_steps(bench: Bench, floors: Floors) -> list[Figures]:
    """Return forward times for every tree size and number of sessions, beside the floors."""
    rows = []
    for sessions in SESSIONS:
        for nodes in NODES:
            tokens = sessions * (1 + nodes)
            parts = bench.parts(sessions, nodes)
            [seconds] = bench.median(lambda parts=parts: bench.runner.forward(parts))  # type: ignore[misc]
            memory, compute = floors.memory(sessions * (CONTEXT + 1 + nodes)), floors.compute(tokens)
            rows.append(
                {
                    "sessions": sessions,
                    "nodes": nodes,
                    "tokens": tokens,
                    "milliseconds": 1000 * seconds,
                    "memory_floor_ms": 1000 * memory,
                    "compute_floor_ms": 1000 * compute,
                    "over_floor": seconds / max(memory, compute),
                }
            )
    return rows


@torch.inference_mode()
def measure_throughput(bench: Bench, plain: Any, counts: Sequence[int], console: Console) -> list[Figures]:
    """Return tokens per second of N sessions that are always ready: transformers' generate (`plain`), STREAM, trees.

    Trees hold the target's own continuation down to a random depth (mean 1.9 nodes) among wrong tokens; once with TREE
    nodes and once with the verifier's tree budget for that number of sessions.
    """
    costs = measure_costs(bench.runner, bench.verifier.engine.pool.rows, context=bench.verifier.max_context)
    rows = []
    for count in counts:
        console.print(f"throughput: {count} sessions ...", style="dim")
        rng = random.Random(count)
        prompts = [[rng.randrange(1000, 8000) for _ in range(PROMPT)] for _ in range(count)]
        batch = torch.tensor(prompts, device=plain.device)

        def generate(new: int, batch: torch.Tensor = batch) -> torch.Tensor:
            fixed = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            return plain.generate(batch, attention_mask=torch.ones_like(batch), **fixed)

        generate(2)
        begun = time.perf_counter()
        generate(1)
        first = time.perf_counter() - begun
        begun = time.perf_counter()
        generate(ANSWER)
        baseline = count * (ANSWER - 1) / (time.perf_counter() - begun - first)
        stream, truths = _decode(bench, prompts, None)
        budget = TreeBudget(bench.verifier.max_nodes, costs, sessions=count, pause=0.0)
        trees, _ = _decode(bench, prompts, truths, TREE)
        fitted, _ = _decode(bench, prompts, truths, budget.nodes)
        rows.append(
            {
                "sessions": count,
                "generate": baseline,
                "stream": stream["tokens_per_second"],
                "trees": trees["tokens_per_second"],
                "tree_budget": budget.nodes,
                "trees_in_budget": fitted["tokens_per_second"],
                "stream_over_generate": stream["tokens_per_second"] / baseline,
                "trees_over_stream": trees["tokens_per_second"] / stream["tokens_per_second"],
                "in_budget_over_stream": fitted["tokens_per_second"] / stream["tokens_per_second"],
                "accepted_per_verify": trees["accepted_per_verify"],
                "compaction_bytes_per_verify": trees["compaction_bytes_per_verify"],
            }
        )
    return rows


def _decode(
    bench: Bench, prompts: list[list[int]], truths: list[list[int]] | None, nodes: int = 0
) -> tuple[Figures, list[list[int]]]:
    """Decode ANSWER tokens for every prompt, token by token or with trees; return the text and a little more of it.

    If a near-tie differs in another batch, the text is corrected, so that trees stay as good.
    """
    engine, rng = bench.verifier.engine, random.Random(1)
    sessions = [bench.open(1000 + i, prompt) for i, prompt in enumerate(prompts)]
    moved = engine.pool.moved
    verifies = accepted = 0
    begun = time.perf_counter()
    more = 0 if truths else 12  # trees look ahead of the answer's end
    while going := [i for i, s in enumerate(sessions) if len(s.tokens) < PROMPT + ANSWER + more]:
        segments = []
        for i in going:
            ahead = truths[i][len(sessions[i].tokens) - PROMPT :] if truths else []
            tree = _draft(ahead, rng, nodes) if truths else TokenTree()
            segments.append(bench.segment(sessions[i], 1, tree, bool(truths)))
        for walked in engine.step(segments):
            assert walked is not None
            verifies, accepted = verifies + 1, accepted + len(walked.accepted)
        for i in going if truths else ():
            at = len(sessions[i].tokens) - PROMPT - 1
            sessions[i].tokens[-1] = truths[i][at]  # type: ignore[index]
    seconds = time.perf_counter() - begun
    moved = engine.pool.moved - moved
    written = [session.tokens[PROMPT:] for session in sessions]
    for session in sessions:
        bench.verifier.sessions.forget(session.id)
    figures = {
        "tokens_per_second": (accepted + verifies) / seconds,
        "accepted_per_verify": accepted / verifies,
        "compaction_bytes_per_verify": 2 * moved * bench.runner.store.row_bytes / verifies,  # read and written
    }
    return figures, written


def _draft(ahead: Sequence[int], rng: random.Random, nodes: int) -> TokenTree:
    """Return a tree of `nodes` nodes: the true continuation to a depth of 0 to 6 (mean 1.9), among wrong tokens."""
    depth = min(rng.choices(range(7), [30, 20, 16, 13, 10, 6, 5])[0], len(ahead))
    tokens: list[int] = []
    parents: list[int] = []
    tip, right = ROOT, 0
    while len(tokens) < nodes:
        if right < depth and (rng.random() < 0.5 or nodes - len(tokens) <= depth - right):
            tokens.append(ahead[right])
            parents.append(tip)
            tip, right = len(tokens) - 1, right + 1
        else:
            tokens.append(9000 + len(tokens))
            parents.append(rng.randrange(ROOT, len(tokens) - 1))
    return TokenTree(tuple(tokens), tuple(parents))


def describe_device(device: torch.device) -> str:
    """Name a torch device, and on a CPU the number of threads, for a table's title."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{describe_machine()}, {torch.get_num_threads()} threads"


def show(figures: Figures, console: Console) -> None:
    """Print tables of the measurements."""
    for title, rows in figures.items():
        if isinstance(rows, dict):
            rows = [{"figure": key, "value": value} for key, value in rows.items()]
        if not isinstance(rows, list):
            continue
        table = Table(title=f"{title}: {figures['target']}, {figures['dtype']}, {figures['machine']}")
        for key in rows[0]:
            table.add_column(key.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(value if isinstance(value, str) else _number(value) for value in row.values()))
        console.print(table)


def _number(value: float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Settings()
    common_arguments(parser, "drafter", "device", "threads", dtype="bfloat16", json=None)
    parser.add_argument("--model", default=defaults.model, help="target (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the median is taken")
    parser.add_argument("--only", choices=TABLES, action="append", help="one of the tables; may be repeated")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16, 64], help="of the throughput table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options = make_parser().parse_args(argv)
    console = Console()
    wanted = options.only or TABLES
    rows = max(SESSIONS) * (CONTEXT + 256) + 1024 + max(options.sessions) * 512
    settings = Settings(
        model=options.model, drafter=options.drafter, dtype=options.dtype, device=options.device,
        threads=options.threads or torch.get_num_threads(), kv_tokens=max(rows, 4096), max_sessions=1024,
        tree_budget=1,
    )  # fmt: skip
    try:
        bench = Bench(load_verifier(settings), options.repeats, random.Random(0))
    except (TargetError, RuntimeError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    plain = Plain(options, bench.runner.device)
    console.print("measuring floors ...", style="dim")
    floors = measure_floors(bench)
    figures: Figures = {
        "target": options.model,
        "dtype": options.dtype,
        "machine": describe_device(bench.runner.device),
        "floors": {
            "read_gigabytes_per_second": floors.bandwidth / 1e9,
            "gigaflops": floors.flops / 1e9,
            "weights_megabytes": floors.weight_bytes / 1e6,
            "kv_bytes_per_token": floors.kv_bytes,
            "ridge_tokens": floors.memory(0) / floors.compute(1),
        },
    }
    if "goals" in wanted:
        console.print("measuring ratios ...", style="dim")
        figures["goals"] = measure_goals(bench, plain, floors)
    if "steps" in wanted:
        console.print("measuring steps ...", style="dim")
        figures["steps"] = measure_steps(bench, floors)
    if "throughput" in wanted:
        figures["throughput"] = measure_throughput(bench, plain.model, options.sessions, console)
    show(figures, console)
    if options.json:
        options.json.write_text(json.dumps({"run": provenance(), **figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
