"""`python -m export check`: prove again that a bundle matches its manifest and drafts as the eager model does."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edge_runtime.answer.offline_drafter import understudy_of
from edge_runtime.events import AnswerStats, Finished
from edge_runtime.options import FIXED_TREES, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from export.bundle.bundle_options import CheckOptions
from export.bundle.facts import RANDOM_ROWS, TARGET_ANSWERS, broken_bounds, check_metadata
from export.bundle.parity import compare
from export.bundle.plan import target_fits
from export.bundle.report import check_markdown, put_section
from export.bundle.steps import PROMPTS, passages_for
from export.bundle.verifier_process import UNPRUNED_TREES, VerifierProcess
from export.progress import Meter
from export.train.prompts import read_prompts
from outrider_core.drafting.bundle import MANIFEST, Bundle, BundleError, Manifest, open_bundle
from outrider_core.drafting.engines import Engine, open_engine
from outrider_core.machine import describe_machine
from outrider_core.models.drafter_arrays import find_drafter
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.eager import EagerEngine
from outrider_core.models.moa import DeviceHalf, device_half_on
from outrider_core.models.target import open_target
from outrider_core.targets.source import TargetSource
from outrider_core.targets.understudy import UnderstudyError


def check_bundle(options: CheckOptions) -> list[str]:
    """Check everything and write the figures into the bundle's report; returns a line for each broken bound.

    Checks hashes and metadata, parity on the target's own answers, and acceptance length if requested. Raises
    BundleError, TargetError or DrafterError if the bundle cannot even be compared.
    """
    console, folder = Console(stderr=True), options.bundle
    prompts = [turns[0] for turns in read_prompts(options.prompts)]
    bundle = open_bundle(folder)
    manifest = bundle.manifest
    source = options.target or TargetSource.resolve(manifest.target)
    files = open_target(source)
    if files.model_hash != manifest.target_hash:
        raise BundleError(f"{folder} was made for target {manifest.target_hash}, {files.name} is {files.model_hash}")
    for name in manifest.engines:
        check_metadata(bundle, name)
    console.print(f"{folder}: {len(manifest.files)} files with the right hashes, metadata as in {MANIFEST}")
    if not manifest.has_drafter:
        try:
            understudy_of(bundle).load()
        except UnderstudyError as error:
            raise BundleError(str(error)) from None
        console.print("no drafter to compare: its understudy drafts, and loads")
        return []
    drafter = options.drafter or find_drafter(manifest.drafter_hash)
    config, tensors, drafter_hash = load_drafter(drafter)
    if drafter_hash != manifest.drafter_hash:
        raise BundleError(f"{folder} was made of drafter {manifest.drafter_hash}, {drafter} is {drafter_hash}")
    config = replace(config, max_context=manifest.max_context)
    half = device_half_on(config, tensors, *files.tables())
    load = target_fits(source.shape())
    with tempfile.TemporaryDirectory() as work:
        passages = passages_for(files, config, tensors, Path(work), load)
    figures: dict[str, Any] = {"engines": {}, "compared_on": TARGET_ANSWERS if load else RANDOM_ROWS}
    for name in manifest.engines:
        parity = compare(open_engine(bundle, name), EagerEngine(half), config, bundle, passages)
        figures["engines"][name] = {"parity": parity.as_dict()}
    if options.acceptance and not load:
        console.print("acceptance left out: the target does not fit into memory, so no verifier could serve it here")
    elif options.acceptance:
        figures["acceptance"] = check_acceptance(bundle, drafter, files.name, half, prompts)
    show(figures, manifest, console)
    put_section(folder, "check", figures, check_markdown(figures))
    return broken_bounds(figures, manifest)


def show(figures: dict[str, Any], manifest: Manifest, console: Console) -> None:
    steps = max(row["parity"]["steps"] for row in figures["engines"].values())
    title = f"{steps} steps against the eager drafter, on {figures['compared_on']}"
    table = Table(title=title, title_justify="left")
    table.add_column("engine", no_wrap=True)
    for column in ("top-1", "top-4", "flips", "at ties", "mean", "max error", "tau", "ratio"):
        table.add_column(column, justify="right", no_wrap=True, min_width=5)
    taus = figures.get("acceptance", {}).get("engines", {})
    for name in manifest.engines:
        parity, tau = figures["engines"][name]["parity"], taus.get(name)
        table.add_row(
            name, f"{parity['top1_agreement']:.3f}", f"{parity['top4_agreement']:.3f}", str(parity["flips"]),
            str(parity["flips_at_near_ties"]), f"{parity['mean_abs_logit_error']:.3f}",
            f"{parity['max_abs_logit_error']:.2f}", f"{tau['tau']:.2f}" if tau else "-",
            f"{tau['ratio']:.3f}" if tau else "-",
        )  # fmt: skip
    console.print(table)
    if taus:
        eager = figures["acceptance"]["eager"]["tau"]
        console.print(f"the eager drafter's tau is {eager:.2f}: greedy, without prompt lookup", highlight=False)


def check_acceptance(
    bundle: Bundle, drafter: Path, target: str, half: DeviceHalf, prompts: list[str] | None = None, tokens: int = 64
) -> dict[str, Any]:
    """Measure tau of each engine over the eager drafter's, through a real verifier process on loopback.

    Greedy, the runtime's default trees, without prompt lookup, `tokens` tokens an answer. Returns {"eager": {...},
    "engines": {name: {"tau", "ratio", ...}}, ...}.
    """
    console = Console(stderr=True)
    prompts = prompts or PROMPTS
    drafters: dict[str, Engine | str] = {"eager": EagerEngine(half)}
    drafters |= {name: open_engine(bundle, name) for name in bundle.manifest.engines}
    with tempfile.TemporaryDirectory() as folder:
        verifier = VerifierProcess(drafter, Path(folder) / "verifier.log", "--model", target, *UNPRUNED_TREES)
        try:
            with console.status("starting the verifier"):
                verifier.start()
                try:
                    verifier.wait_ready()
                except RuntimeError as error:
                    raise BundleError(f"acceptance needs a verifier: {error}; or leave it out") from None
            with Meter("acceptance", len(prompts) * len(drafters)) as meter:
                figures = {
                    name: asyncio.run(_tau(bundle, verifier.address, engine, prompts, tokens, meter))
                    for name, engine in drafters.items()
                }
        finally:
            verifier.stop()
    eager = figures.pop("eager")
    for row in figures.values():
        row["ratio"] = round(row["tau"] / eager["tau"], 4)
        row["same_text"] = row.pop("texts") == eager["texts"]
    del eager["texts"]
    return {
        "prompts": len(prompts), "max_new_tokens": tokens, "eager": eager, "engines": figures,
        "machine": describe_machine(),
    }  # fmt: skip


async def _tau(
    bundle: Bundle, address: str, engine: Engine | str, prompts: list[str], tokens: int, meter: Meter
) -> dict[str, Any]:
    stats: list[AnswerStats] = []
    texts = []
    async with EdgeRuntime(bundle, address, RuntimeOptions(engine=engine, lookup=False), FIXED_TREES) as runtime:
        for prompt in prompts:
            ids = runtime.encode_prompt(prompt)
            last = None
            async for event in runtime.generate(ids, max_new_tokens=tokens):
                last = event
            assert isinstance(last, Finished), "generate() always ends with Finished"
            stats.append(last.stats)
            texts.append(last.token_ids)
            meter.update(meter.done + 1, "")
    rounds = sum(s.rounds for s in stats)
    tau = sum(s.tau * s.rounds for s in stats) / max(1, rounds)
    return {"tau": round(tau, 4), "rounds": rounds, "tokens": sum(s.tokens for s in stats), "texts": texts}
