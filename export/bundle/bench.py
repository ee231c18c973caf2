"""`python -m export bench`: time a bundle's engines and set them against the memory floor.

Every figure comes from a fresh `python -m edge_runtime.probe` process, one after another; its docstring tells how each
is measured. The floor of a step is the time for reading its data once at the bandwidth measured in the same process
with the same number of threads: the weights (`step_bytes` of the manifest), and keys and values of the context, in
self-attention and in cross-attention, in float32.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edge_runtime.probe import TREES, longest_drafting_context
from export.bundle.bundle_options import BenchOptions
from export.bundle.report import put_section, read_report
from export.progress import Meter
from outrider_core.drafting.bundle import Bundle, BundleError, Manifest, open_bundle
from outrider_core.drafting.engines import RUNTIMES, installed
from outrider_core.machine import available_cores, describe_machine, last_level_cache

#: contexts at which drafting is measured, or the nearest that the bundle's max_context allows
DRAFT_CONTEXT = 1024
HEADING = "## Bench"
#: the probe prints one line after every measurement
PROGRESS = "progress "
#: cores that other processes may use, beyond those left free, before a run counts as disturbed
CROWDED = 0.25
#: libraries that would start threads of their own; none of them does the engine's work
POOLS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")

Figures = dict[str, Any]


def bench_bundle(
    folder: Path,
    *,
    engines: Iterable[str] | None = None,
    threads: Iterable[int] | None = None,
    widths: Iterable[int] = BenchOptions.widths,
    contexts: Iterable[int] = BenchOptions.contexts,
    repeats: int = BenchOptions.repeats,
) -> Figures:
    """Measure `engines` (None: all of the bundle) with each of `threads` (None: 1 and all cores; 0: all cores).

    Widths above an engine's max_width and contexts above the bundle's max_context are left out. An engine that no
    installed package can run is skipped: `skipped` in the figures says what to install. Raises BundleError with one
    clear line.
    """
    cores = available_cores()
    counts = sorted({count or cores for count in ((1, cores) if threads is None else threads)})
    widths, contexts = sorted(set(widths)), sorted(set(contexts))
    if min([1, *counts, *widths, *contexts, repeats]) < 1 or not (counts and widths and contexts):
        raise ValueError("threads must be 0 (all cores) or more; widths, contexts and repeats 1 or more")
    bundle = open_bundle(folder)  # checks its hashes: this is the exported bundle
    names, skipped = _choose(bundle, engines)
    plan = {name: _fitting(bundle, name, widths, contexts) for name in names}
    versions, measured = {"python": platform.python_version()}, {}
    # per process "loaded", and "bandwidth" or "prompt"; see the probe
    total = len(counts) * sum(len(plan[name][0]) * len(plan[name][1]) + TREES + 4 for name in names)
    with Meter("bench", total) as meter:
        for name in names:
            runs = [_run(bundle, name, count, *plan[name], repeats, meter) for count in counts]
            measured[name] = {**_describe(bundle, name), "runs": runs}
            versions |= _version(name)
    figures: Figures = _rounded(
        {**_machine(cores), "versions": versions, "repeats": repeats, "engines": measured, "skipped": skipped}
    )
    return figures


def _rounded(value: Any) -> Any:
    """Return `value` with every float in it rounded to five digits, so that a report is readable."""
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def bench(options: BenchOptions, console: Console) -> Figures:
    """Run `bench_bundle` with `options`, show it on `console` and write it into the bundle's report."""
    read_report(options.bundle)  # finds a broken one before the minutes of measuring
    figures = bench_bundle(
        options.bundle,
        engines=options.engines,
        threads=options.threads,
        widths=options.widths,
        contexts=options.contexts,
        repeats=options.repeats,
    )
    show(figures, console)
    write_into_report(options.bundle, figures)
    console.print(f"wrote the figures into {options.bundle}/report.json and report.md", highlight=False)
    return figures


def _choose(bundle: Bundle, engines: Iterable[str] | None) -> tuple[list[str], dict[str, str]]:
    """Return the engines to measure, and why the others cannot be: {engine: line}."""
    held = bundle.manifest.engines
    if not held:
        raise BundleError(f"{bundle.folder} has no drafter whose steps could be measured; its understudy drafts")
    wanted = list(held if engines is None else dict.fromkeys(engines))
    if missing := [name for name in wanted if name not in held]:
        raise BundleError(f"{bundle.folder} holds no {missing[0]} engine (it has: {', '.join(held)})")
    skipped = {}
    for name in wanted:
        if name not in RUNTIMES:
            skipped[name] = f"engine {name!r} is unknown here (known: {', '.join(RUNTIMES)}); update"
        elif not installed(name):
            skipped[name] = f"nothing here runs {held[name].file}; run: pip install '{RUNTIMES[name][1]}'"
    names = [name for name in wanted if name not in skipped]
    if not names:
        raise BundleError(next(iter(skipped.values()), f"{bundle.folder}: name an engine, or none for all of them"))
    return names, skipped


def _fitting(bundle: Bundle, name: str, widths: list[int], contexts: list[int]) -> tuple[list[int], list[int]]:
    """Return the widths and contexts that engine `name` supports."""
    width, context = bundle.manifest.engines[name].max_width, bundle.manifest.max_context
    kept = [n for n in widths if n <= width], [n for n in contexts if n <= context]
    if not kept[0]:
        raise BundleError(f"engine {name} takes {width} tokens a step at most; give --widths of that or less")
    if not kept[1]:
        raise BundleError(f"{bundle.folder} holds {context} tokens at most; give --contexts of that or less")
    return kept


def _describe(bundle: Bundle, name: str) -> Figures:
    entry = bundle.manifest.engines[name]
    files = {entry.file, entry.data or entry.file}
    return {
        "file": entry.file, "quant": entry.quant, "embedding_bits": entry.embedding_bits, "runtime": installed(name),
        "file_mb": sum(bundle.path(file).stat().st_size for file in files) / 1e6, "step_mb": entry.step_bytes / 1e6,
    }  # fmt: skip


def _version(name: str) -> dict[str, str]:
    """Return {package that runs engine `name`: its version}."""
    package = str(installed(name))
    try:
        return {package: metadata.version(package)}
    except metadata.PackageNotFoundError:  # a variant under another name, such as onnxruntime-openvino
        owners = metadata.packages_distributions().get(package, [])
        return {package: " ".join(f"{owner} {metadata.version(owner)}" for owner in owners) or "of unknown version"}


def floor_bytes(manifest: Manifest, name: str, context: int) -> int:
    """Return the bytes that one step after `context` tokens must read: weights, cached K and V, feature rows."""
    heads = manifest.sa_kv_heads + manifest.ca_kv_heads
    return manifest.engines[name].step_bytes + 2 * context * heads * manifest.head_dim * 4


def _run(
    bundle: Bundle, name: str, threads: int, widths: list[int], contexts: list[int], repeats: int, meter: Meter
) -> Figures:
    """Return the figures of one engine and number of threads: single steps in one process, drafting in another."""
    manifest, label = bundle.manifest, f"{name}, {_count(threads, 'thread')}"

    def tick(note: str) -> None:
        meter.update(meter.done + 1, f"{label}: {note}")

    common = [str(bundle.folder), "--engine", name, "--threads", str(threads)]
    sizes = ["--widths", ",".join(map(str, widths)), "--contexts", ",".join(map(str, contexts))]
    run = run_probe([*common, *sizes, "--repeats", str(repeats)], threads, label, tick)
    tick("bandwidth")
    for step in run["steps"]:
        step["bytes"] = floor_bytes(manifest, name, step["context"])
        step["floor_ms"] = step["bytes"] / run["bandwidth_gb_s"] / 1e6
        step["ratio"] = step["p50"] / step["floor_ms"]
    run["draft"] = None
    context = min(DRAFT_CONTEXT, longest_drafting_context(manifest.max_context))
    if context > 0:
        drafting = run_probe([*common, "--draft", str(context)], threads, label, tick)
        run["draft"] = {
            **drafting["draft"],
            **{key: drafting[key] for key in ("rss_mb", "peak_rss_mb", "others_cores")},
        }
    return run


def run_probe(arguments: list[str], threads: int, label: str, tick: Callable[[str], None]) -> Figures:
    """Run one probe to its end and return its JSON. `tick` is called with each of its progress notes.

    Raises BundleError with one line if it fails. An exception in this call ends the probe.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **dict.fromkeys(POOLS, "1")}
    command = [sys.executable, "-m", "edge_runtime.probe", *arguments, "--progress"]
    said: list[str] = []
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith(PROGRESS):
                    tick(line.removeprefix(PROGRESS).strip())
                elif line.strip():
                    said.append(line.strip())
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            if process.stderr:
                process.stderr.close()
        if status:
            raise BundleError(f"measuring {label} failed: {_reason(status, said)}")
        output.seek(0)
        lines = output.read().splitlines()
    try:
        figures: Figures = json.loads(lines[-1])  # a runtime may have printed something before
    except (IndexError, ValueError):
        raise BundleError(f"measuring {label} failed: the probe printed no figures; run: {' '.join(command)}") from None
    return figures


def _reason(status: int, said: list[str]) -> str:
    """Say in one line why a probe ended with `status`, from its lines on standard error."""
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    if errors:
        return errors[-1]
    if status < 0:
        return f"the process was killed by signal {-status}; if memory ran out, free some or bench a smaller drafter"
    return said[-1] if said else f"the process ended with status {status}"


def _machine(cores: int) -> Figures:
    """Describe this machine: a line, cores this process may use, all cores, last-level cache in MB or None."""
    cache = last_level_cache()
    cache_mb = cache / 1e6 if cache else None
    return {"machine": describe_machine(), "cores": cores, "machine_cores": os.cpu_count() or 1, "cache_mb": cache_mb}


def _count(number: float, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _mb(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} MB"


def _cell(step: Figures | None) -> str:
    return f"{_ms(step['p50'])} / {_ms(step['p95'])} (x{step['ratio']:.1f})" if step else "-"


def _grid(run: Figures) -> tuple[list[int], list[list[str]]]:
    """Return contexts (columns) and one row of texts per width: the width, then a cell per context."""
    steps = {(step["width"], step["context"]): step for step in run["steps"]}
    contexts = sorted({context for _, context in steps})
    rows = [
        [str(width), *(_cell(steps.get((width, context))) for context in contexts)]
        for width in sorted({width for width, _ in steps})
    ]
    return contexts, rows


def _title(name: str, engine: Figures, run: Figures) -> str:
    return f"{name} ({engine['quant']}, embedding {engine['embedding_bits']} bit), {_count(run['threads'], 'thread')}"


def _facts(figures: Figures, engine: Figures, run: Figures) -> list[tuple[str, str]]:
    """Return the lines below a table of steps: (figure, value)."""
    runtime = engine["runtime"]
    loading = (
        f"{_ms(run['load_ms'])} ms (before it: manifest and tokenizer {_ms(run['open_ms'])} ms, "
        f"importing {runtime} {_ms(run['import_ms'])} ms)"
    )
    return [
        ("load time", loading),
        ("memory when loaded / peak over all steps", f"{_mb(run['rss_mb'])} / {_mb(run['peak_rss_mb'])}"),
        *_drafting(run["draft"]),
        ("read bandwidth", f"{run['bandwidth_gb_s']:.1f} GB/s"),
        ("weights read", f"{_mb(engine['step_mb'])} a step"),
        ("runtime", f"{runtime} {figures['versions'][runtime]}"),
        *_cautions(figures, engine, run),
    ]


def _drafting(draft: Figures | None) -> list[tuple[str, str]]:
    if draft is None:
        return []
    where = f"drafting after {draft['context']} tokens"
    times = (
        f"{_ms(draft['ms_per_tree'])} ms a tree ({draft['steps_per_tree']:.1f} steps, "
        f"{draft['nodes_per_tree']:.0f} nodes), {_ms(draft['prompt_ms'])} ms for the prompt"
    )
    return [(f"{where}: peak memory", _mb(draft["peak_rss_mb"])), (f"{where}: time", times)]


def _cautions(figures: Figures, engine: Figures, run: Figures) -> list[tuple[str, str]]:
    """Return what a reader must know before comparing these figures with others."""
    cautions, cache = [], figures["cache_mb"]
    others = max(part["others_cores"] or 0.0 for part in (run, run["draft"] or run))
    if others + run["threads"] > figures["machine_cores"] + CROWDED:
        said = f"other processes used {_count(round(others, 1), 'core')} meanwhile: run it again when they are done"
        cautions.append(("disturbed", said))
    if cache and engine["step_mb"] < cache:
        said = f"the {cache:.0f} MB cache can keep the weights from step to step, so ratios below 1 are possible"
        cautions.append(("cache", said))
    if run["torch_imported"]:
        said = f"{engine['runtime']} loads torch into the process, an app does not: no guide to a phone's memory"
        cautions.append(("torch", said))
    return cautions


def _intro(figures: Figures) -> str:
    cache = f", {figures['cache_mb']:.0f} MB last-level cache" if figures["cache_mb"] else ""
    return (
        f"Machine: {figures['machine']}{cache}; Python {figures['versions']['python']}. Steps: p50 / p95 in ms of "
        f"{figures['repeats']}, and p50 in multiples of the memory floor, which is the time to read the step's "
        "weights, cached keys and values and feature rows once. Random inputs; drafting is on English text with "
        "random rows."
    )


def bench_markdown(figures: Figures) -> str:
    """Return the section of report.md, its heading included."""
    lines = [HEADING, "", _intro(figures), ""]
    lines += [f"Engine {name} was skipped: {line}\n" for name, line in figures["skipped"].items()]
    for name, engine in figures["engines"].items():
        for run in engine["runs"]:
            contexts, rows = _grid(run)
            lines += [f"### {_title(name, engine, run)}", ""]
            lines += ["| " + " | ".join(["tokens of a step", *(f"behind {n}" for n in contexts)]) + " |"]
            lines += ["|---" * (1 + len(contexts)) + "|"]
            lines += ["| " + " | ".join(row) + " |" for row in rows]
            lines += ["", "| figure | value |", "|---|---|"]
            lines += [f"| {fact} | {value} |" for fact, value in _facts(figures, engine, run)] + [""]
    return "\n".join(lines).rstrip() + "\n"


def show(figures: Figures, console: Console) -> None:
    """Show the same as tables on a terminal."""
    for name, engine in figures["engines"].items():
        for run in engine["runs"]:
            contexts, rows = _grid(run)
            table = Table(title=_title(name, engine, run), title_justify="left", title_style="bold")
            table.add_column("tokens", justify="right")
            for context in contexts:
                table.add_column(f"behind {context}", justify="right")
            for row in rows:
                table.add_row(*row)
            console.print(table)
            facts = Table.grid(padding=(0, 2))
            for fact, value in _facts(figures, engine, run):
                facts.add_row(fact, value)
            console.print(facts)
            console.print()
    for name, line in figures["skipped"].items():
        console.print(f"skipped {name}: {line}", style="yellow", markup=False)
    console.print(_intro(figures), style="dim", markup=False, highlight=False)


def write_into_report(folder: Path, figures: Figures) -> None:
    """Put `figures` into the report of a bundle, as key "bench" and section "## Bench"."""
    put_section(folder, "bench", figures, bench_markdown(figures))
