"""`python -m edge_runtime.probe`: measure one engine of a bundle in one fresh process, without torch.

The process loads the same as an app's process (`edge_runtime.runtime` with its link, the bundle with its tokenizer,
one engine) and prints one JSON object on standard output; an error is one line on standard error and exit status 1.
`python -m export bench` starts one such process per engine and number of threads, and adds the memory floor.

How each figure is measured:

open_ms: `open_bundle` without hashing. import_ms: importing the engine's Python runtime, which an app that links it
    does not do. load_ms: `open_engine`. All with the files in the page cache if they were read before.
step times: `Engine.step` on random inputs, all logits asked for, the same inputs again and again: the weights stay
    in the processor's cache as far as they fit. WARM_UP steps first, then `repeats` that count.
rss_mb: resident memory once the engine is loaded. peak_rss_mb: its peak up to the last step (or tree), read before
    the bandwidth is measured. VmRSS and VmHWM of /proc/self/status; without it, both are getrusage's
    ru_maxrss (the peak so far); null where there is neither. 1 MB = 10^6 bytes.
bandwidth_gb_s: `outrider_core.machine.read_bandwidth` of as many threads.
others_cores: processor cores that everything but this process used while it measured, from /proc/stat; null where
    there is none. Together with `threads` it should stay below the machine's cores, or the times are not the engine's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from outrider_core.arguments import positive_int, positive_ints
from outrider_core.drafting.bundle import Bundle, BundleError, Manifest, open_bundle
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.engines import MASKED, RUNTIMES, Engine, Floats, Ints, installed, open_engine
from outrider_core.machine import Others, available_cores, memory_mb, read_bandwidth
from outrider_core.protocol.sampling import Sampling

#: steps before those that are timed
WARM_UP = 3
#: trees drafted by --draft, each after one more token
TREES = 10
#: feature rows handed over at once, about as many as in one message of the verifier
ROWS_AT_ONCE = 64

#: module of a package's runtime, if it is not the package itself
RUNTIME_MODULES = {"executorch": "executorch.runtime"}

T = TypeVar("T")
Step = tuple[Ints, Ints, Ints, Floats, Floats, Floats, Floats, Floats]

EPILOG = """\
examples:
  python -m edge_runtime.probe build/bundle --engine onnx --threads 1
  python -m edge_runtime.probe build/bundle --engine onnx --threads 4 --draft 1024
  python -m export bench build/bundle          all engines, with tables and the memory floor
"""


def _milliseconds(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work`, and its milliseconds."""
    began = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - began) * 1e3


def random_step(manifest: Manifest, width: int, context: int, seed: int = 0) -> Step:
    """Return random inputs of `Engine.step`: `width` tokens after `context` cache rows and as many feature rows.

    All `width` logits are wanted, and a token sees the past and the new tokens up to itself.
    """
    rng = np.random.default_rng(seed)

    def normal(heads: int) -> Floats:
        return rng.standard_normal((context, heads, manifest.head_dim), np.float32)

    mask = np.zeros((width, context + width), np.float32)
    mask[:, context:] = np.triu(np.full((width, width), MASKED, np.float32), 1)
    return (
        rng.integers(manifest.vocab_size, size=width), np.arange(context, context + width), np.arange(width), mask,
        normal(manifest.sa_kv_heads), normal(manifest.sa_kv_heads), normal(manifest.ca_kv_heads),
        normal(manifest.ca_kv_heads),
    )  # fmt: skip


def time_step(engine: Engine, inputs: Step, repeats: int) -> dict[str, float]:
    """Return {"p50", "p95", "min"} of `repeats` steps in ms."""
    times = [_milliseconds(lambda: engine.step(*inputs))[1] for _ in range(WARM_UP + repeats)]
    p50, p95 = np.percentile(times[WARM_UP:], [50, 95])
    return {"p50": float(p50), "p95": float(p95), "min": min(times[WARM_UP:])}


def _rows(manifest: Manifest, end: int, rng: np.random.Generator) -> Iterator[tuple[Ints, Floats]]:
    """Yield random feature rows of positions 0..end-1, (positions [n], rows [n, 2, heads, head_dim]) at a time."""
    for start in range(0, end, ROWS_AT_ONCE):
        positions = np.arange(start, min(start + ROWS_AT_ONCE, end))
        shape = (len(positions), 2, manifest.ca_kv_heads, manifest.head_dim)
        yield positions, rng.standard_normal(shape, np.float32)


class _Counting:
    """An engine that counts its steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps = engine, 0

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        self.steps += 1
        return self.engine.step(tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values)


def measure_drafting(
    drafter: Drafter, bundle: Bundle, context: int, tick: Callable[[str], None] = lambda note: None
) -> dict[str, Any]:
    """Draft greedily as an app does: a prompt pass over `context` tokens, then TREES trees of default shape.

    The text is numpy's documentation (English and code). All positions but the last have random feature rows. A tree is
    followed by one more token and one more row, as when the verifier sends a bonus token. tree_ms has the times in ms;
    steps_per_tree counts engine steps: with random rows the drafter is unsure and may stop before the last level, and
    the number of rows it fills depends on their measured cost.
    """
    manifest = bundle.manifest
    text = bundle.tokenizer.encode(str(np.einsum.__doc__)).ids or [0]
    text *= 1 + (context + TREES) // len(text)
    rng, shape, greedy = np.random.default_rng(0), TreeShape(), Sampling()
    counter = drafter.engine = _Counting(drafter.engine)
    for positions, rows in _rows(manifest, context - 1, rng):
        drafter.add_rows(positions, rows)
    prefix: list[int] = text[:context]
    _, prompt_ms = _milliseconds(lambda: drafter.draft(prefix, greedy, TreeShape(nodes=1, depth=1, breadth=1)).tree)
    tick("prompt")
    counter.steps, nodes, times = 0, 0, list[float]()
    for tree in range(TREES):
        grown, ms = _milliseconds(lambda: drafter.draft(prefix, greedy, shape).tree)
        nodes, times = nodes + len(grown.tokens), [*times, ms]
        row = rng.standard_normal((1, 2, manifest.ca_kv_heads, manifest.head_dim), np.float32)
        drafter.add_rows(np.array([len(prefix) - 1]), row)
        prefix.append(text[len(prefix)])
        tick(f"tree {tree + 1}")
    p50, p95 = np.percentile(times, [50, 95])
    return {
        "context": context, "prompt_ms": prompt_ms, "trees": TREES, "ms_per_tree": float(np.mean(times)),
        "tree_ms": {"p50": float(p50), "p95": float(p95), "min": min(times)}, "nodes_per_tree": nodes / TREES,
        "steps_per_tree": counter.steps / TREES,
    }  # fmt: skip


def longest_drafting_context(max_context: int) -> int:
    """Return the longest prefix after which all TREES trees reach their full depth."""
    return max_context - TREES - TreeShape().depth


def _check(bundle: Bundle, options: argparse.Namespace) -> None:
    """Raise BundleError if the bundle cannot be measured as requested; open_engine checks the rest."""
    manifest = bundle.manifest
    if options.draft:
        limit = longest_drafting_context(manifest.max_context)
        if options.draft > limit:
            raise BundleError(f"--draft {options.draft} is more than this bundle has room for; at most {limit}")
        return
    entry = manifest.engines.get(options.engine)
    if max(options.contexts) > manifest.max_context:
        raise BundleError(f"--contexts: {max(options.contexts)} is above this bundle's {manifest.max_context} tokens")
    if entry and max(options.widths) > entry.max_width:
        raise BundleError(f"--widths: {max(options.widths)} is above the {entry.max_width} tokens {entry.file} takes")


def _import_runtime(bundle: Bundle, engine: str) -> None:
    """Import the modules of `open_engine`, so that loading is timed without them; it reports missing ones."""
    package = installed(engine) if engine in bundle.manifest.engines else None
    try:
        if package:
            importlib.import_module(RUNTIME_MODULES.get(package, package))
    except ImportError as error:
        raise BundleError(f"{package} does not import: {error}; install it again") from None


def probe(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line requests, and return the figures."""

    def tick(note: str) -> None:
        if options.progress:  # writing the line also ends a probe whose parent is gone
            print(f"progress {note}", file=sys.stderr, flush=True)

    threads = options.threads or available_cores()
    bundle, open_ms = _milliseconds(lambda: open_bundle(options.bundle, verify=False))
    _check(bundle, options)
    _, import_ms = _milliseconds(lambda: _import_runtime(bundle, options.engine))
    engine, load_ms = _milliseconds(lambda: open_engine(bundle, options.engine, threads))
    figures: dict[str, Any] = {
        "engine": options.engine, "threads": threads, "open_ms": open_ms, "import_ms": import_ms, "load_ms": load_ms,
        "rss_mb": memory_mb()[0],
    }  # fmt: skip
    tick("loaded")
    others = Others()
    if options.draft:
        drafter = EdgeRuntime(bundle, None, RuntimeOptions(engine=engine)).drafter
        figures["draft"] = measure_drafting(drafter, bundle, options.draft, tick)
        figures["peak_rss_mb"] = memory_mb()[1]
    else:
        figures["steps"] = []
        for context in options.contexts:
            for width in options.widths:
                times = time_step(engine, random_step(bundle.manifest, width, context), options.repeats)
                figures["steps"].append({"width": width, "context": context, **times})
                tick(f"{width} tokens after {context}")
        figures["peak_rss_mb"] = memory_mb()[1]
        figures["bandwidth_gb_s"] = read_bandwidth(threads)
    figures["others_cores"] = others.cores()
    figures["torch_imported"] = "torch" in sys.modules
    return figures


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m edge_runtime.probe", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        description="Measure one engine of a bundle in this fresh process and print one JSON object: times of opening, "
        "loading and draft steps (ms), memory (MB) and read bandwidth (GB/s). Never loads torch for ONNX.",
    )  # fmt: skip
    add = parser.add_argument
    add("bundle", type=Path, help="folder that `python -m export bundle` wrote")
    add("--engine", choices=list(RUNTIMES), default="onnx", help="engine to load (default: onnx)")
    add("--threads", type=int, default=1, help="of the engine and of the bandwidth, 0 = all cores (default: 1)")
    add(
        "--widths", type=positive_ints, default=[1, 8, 32], metavar="N,N",
        help="tokens of a step: 1 writes a single token, 8 is a level of a default tree (default: 1,8,32)",
    )  # fmt: skip
    add(
        "--contexts", type=positive_ints, default=[128, 512], metavar="N,N",
        help="cache rows and feature rows a step reads (default: 128,512)",
    )  # fmt: skip
    add("--repeats", type=positive_int, default=30, help="timed steps per width and context (default: 30)")
    add(
        "--draft", type=positive_int, default=0, metavar="CONTEXT",
        help=f"instead of single steps, draft {TREES} trees as an app does, after a prompt of CONTEXT tokens",
    )  # fmt: skip
    add("--progress", action="store_true", help="a line on standard error after every measurement")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.threads < 0:
        parser.error("--threads must be 0 (all cores) or more")
    try:
        figures = probe(options)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
