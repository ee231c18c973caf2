"""Write a bundle: the device half for each engine, tokenizer, chat template and manifest, all checked.

The folder is written under a temporary name and renamed once everything in it has been shown to load and, if torch is
installed, to agree with the eager model; so a half-written bundle never has the final name. After Ctrl-C or a kill the
same command resumes from the finished files; after an error nothing is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.console import Console
from safetensors.numpy import save_file

from export.bundle.bench import bench_bundle, write_into_report
from export.bundle.bundle_options import BundleOptions
from export.bundle.export_target import ExportTarget
from export.bundle.facts import broken_bounds, check_metadata, facts
from export.bundle.plan import FORMATS, BundlePlan, check_output, check_resources, make_plan, show_plan
from export.bundle.report import markdown
from export.bundle.signing import sign, versions
from export.bundle.to_onnx import data_file, write_onnx
from export.bundle.understudy import write_understudy
from export.bundle.undrafted import write_undrafted
from export.places import locked, put_in_place
from export.quiet import quiet
from outrider_core import durable
from outrider_core.cache import sha256_of
from outrider_core.drafting.bundle import (
    FORMAT_VERSION,
    SERVER_HALF_FILE,
    Bounds,
    Bundle,
    BundleError,
    EngineEntry,
    Manifest,
    open_bundle,
)
from outrider_core.drafting.drafter import MAX_WIDTH
from outrider_core.drafting.engines import open_engine
from outrider_core.machine import describe_machine
from outrider_core.models.device_arrays import device_arrays
from outrider_core.models.drafter_arrays import Arrays, drafter_of_target
from outrider_core.models.moa_config import SERVER_PREFIXES

if TYPE_CHECKING:
    from outrider_core.models.moa import DeviceHalf

DRAFT_IDS_FILE = "draft_ids.u32"
NULL_ROW_FILE = "null_row.f32"
#: bits -> least shares of the eager model's argmaxes that an engine keeps (as its own argmax, among its four best)
AGREEMENT = {32: (0.999, 0.999), 16: (0.99, 0.995), 8: (0.93, 0.98), 4: (0.7, 0.9)}
ACCEPTANCE = 0.97


def write_bundle(options: BundleOptions, console: Console | None = None) -> dict[str, Any]:
    """Export by `options` and return the bundle's report; with their `dry_run` only show the plan (returns {}).

    console: for progress; None: stderr.

    Raises BundleError, TargetError or DrafterError with one clear line; the output folder is then as it was.
    """
    console = console or Console(stderr=True)
    with quiet(), console.status("reading target and drafter"):
        check_output(options.output_dir)
        target = ExportTarget.open(options.target)
        drafter = options.drafter or drafter_of_target(target.model_hash)
        plan = make_plan(options, target, drafter) if drafter else None
    if plan is None:
        return write_undrafted(options, target, console)
    show_plan(plan, console)
    check_resources(plan)
    if options.dry_run:
        console.print("dry run: nothing written")
        return {}
    output = options.output_dir.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.parent / f".{output.name}.partial"
    with locked(aside):
        try:
            report = _write_all(plan, aside, console)
            put_in_place(aside, output)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    console.print(f"wrote {output}; it loads with EdgeRuntime.from_bundle({str(output)!r})")
    for name, entry in report["engines"].items():
        line = f"  {entry['file']} ({name}): {entry['bytes'] / 1e6:.1f} MB"
        if parity := entry.get("parity"):
            line += f", top-1 agreement {parity['top1_agreement']:.3f}, {parity['flips']} flips of {parity['steps']} "
            line += f"({parity['flips_at_near_ties']} at near-ties)"
        console.print(line, highlight=False)
    if not plan.compared:
        console.print("  not compared with the eager model; `python -m export check` does, where torch is installed")
    if understudy := report.get("understudy"):
        console.print(
            f"  {understudy['folder']}/: {understudy['bytes'] / 1e6:.0f} MB, {understudy['name']} at "
            f"{understudy['bits']} bits; an app may fetch it later",
            highlight=False,
        )
    return report


def _write_all(plan: BundlePlan, aside: Path, console: Console) -> dict[str, Any]:
    options, config = plan.options, plan.config
    _start_or_resume(plan, aside, console)
    with console.status("reading the target's embedding and LM head"):
        tensors = device_arrays(config, plan.tensors, *plan.target.tables())
    if bad := [name for name, x in tensors.items() if not np.isfinite(x).all()]:
        raise BundleError(
            f"{bad[0]} holds infinite or undefined weights, which cannot be exported; train or import again"
        )
    work = aside / "work"
    plan.target.write_tokenizer(aside)
    manifest = _manifest(plan, aside)
    lowering = _write_engines(plan, tensors, aside, manifest, console)
    for entry in manifest.engines.values():
        data = data_file(aside / entry.file)
        entry.data = data.name if data.is_file() else None
    tensors["draft_ids"].astype("<u4").tofile(aside / DRAFT_IDS_FILE)
    if config.null_row:
        tensors["null_row"].astype("<f4").tofile(aside / NULL_ROW_FILE)
    if options.understudy:
        with console.status(f"lowering the understudy {options.understudy.name}") as status:
            manifest.understudy = write_understudy(
                options.understudy,
                aside,
                config.max_context,
                lambda step, steps: status.update(f"lowering the understudy, step {step} of {steps}"),
                options.understudy_bits,
            )
    sign(manifest, aside)
    encoder = {k: v.astype(np.float16) for k, v in plan.tensors.items() if k.startswith(SERVER_PREFIXES)}
    described = {"drafter_hash": plan.drafter_hash, "config": json.dumps(asdict(config))}
    save_file(encoder, aside / SERVER_HALF_FILE, metadata=described)
    (aside / SERVER_HALF_FILE).chmod(0o644)
    report = _report(plan, aside, lowering)
    if plan.compared:
        from export.bundle.comparison import add_comparison  # torch

        add_comparison(report, plan, _half(plan, tensors), aside, work, console)
    (aside / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (aside / "report.md").write_text(markdown(report))
    if broken := broken_bounds(report, open_bundle(aside).manifest):
        raise BundleError(f"{broken[0]}; nothing was written. Try --quant int8 or fp32, or more --embedding-bits")
    if options.bench:
        figures = bench_bundle(aside)
        write_into_report(aside, figures)
    shutil.rmtree(work)
    return report


def _start_or_resume(plan: BundlePlan, aside: Path, console: Console) -> None:
    """Keep the finished engine files of an interrupted run of the same export; start afresh for any other."""
    wanted = {
        "target": plan.target.model_hash, "drafter": plan.drafter_hash, "profile": asdict(plan.profile),
        "backend": plan.options.backend, "max_context": plan.config.max_context, "format_version": FORMAT_VERSION,
        "formats": plan.options.format, "versions": versions(),
        "understudy": plan.options.understudy and plan.options.understudy.name,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    with contextlib.suppress(OSError):
        if (aside / "work" / "key").read_text() == key:
            console.print("continuing the interrupted export")
            done = {FORMATS[name] for name in FORMATS if _lowered(aside, name) is not None}
            for path in aside.iterdir():
                if path.is_file() and path.name.removesuffix(".data") not in done:
                    path.unlink()
            return
    shutil.rmtree(aside, ignore_errors=True)
    (aside / "work").mkdir(parents=True)
    durable.write(aside / "work" / "key", key)


def _write_engines(
    plan: BundlePlan, tensors: Arrays, aside: Path, manifest: Manifest, console: Console
) -> dict[str, dict[str, Any]]:
    """Lower to every format that is missing; return the report of each lowering."""
    lowering = {}
    known = facts(manifest)
    for name in plan.options.format:
        table = _lowered(aside, name)
        if table is None:
            unfinished, files = aside / "work" / FORMATS[name], dict[str, str]()
            with quiet(), console.status(f"lowering to {unfinished.name} ({plan.profile.quant})"):
                table = _lower(plan, tensors, name, unfinished, known)
            for part in sorted(unfinished.parent.glob(unfinished.name + "*")):
                durable.put_in_place(part, aside / part.name)
                [files[part.name]] = sha256_of([aside / part.name])
            durable.write(_note(aside, name), json.dumps({"table": table, "files": files}))
        lowering[name] = table
    return lowering


def _note(aside: Path, name: str) -> Path:
    """Return the file that marks the engine of a format as finished."""
    return aside / "work" / f"{name}.json"


def _lowered(aside: Path, name: str) -> dict[str, Any] | None:
    """Return the report of lowering to a format, if its files are those that it wrote."""
    try:
        note = json.loads(_note(aside, name).read_bytes())
        if sha256_of([aside / file for file in note["files"]]) == list(note["files"].values()):
            table: dict[str, Any] = note["table"]
            return table
    except (OSError, ValueError):  # none was finished, or a crash has removed it
        pass
    return None


def _lower(plan: BundlePlan, tensors: Arrays, name: str, path: Path, known: dict[str, Any]) -> dict[str, Any]:
    profile = plan.profile
    try:
        if name == "onnx":
            described = {key: json.dumps(value) for key, value in known.items()}
            return write_onnx(plan.config, tensors, profile, path, described)
        from export.bundle.to_executorch import write_executorch  # torch

        half = _half(plan, tensors)
        return write_executorch(half, profile, path, known, plan.config.max_context, plan.options.backend)
    except (BundleError, OSError):
        raise
    except Exception as error:  # the exporters raise kinds of their own
        reason = " ".join(str(error).split())[:300]
        raise BundleError(f"lowering to {path.name} failed: {type(error).__name__}: {reason}") from error


def _manifest(plan: BundlePlan, folder: Path) -> Manifest:
    """Return the manifest without its list of files, which `sign` adds."""
    config, profile, target = plan.config, plan.profile, plan.target
    tokenizer = (folder / "tokenizer.json").read_bytes()
    worst = min(profile.bits, profile.embedding_bits)
    top1, top4 = AGREEMENT[worst]
    bounds = Bounds(top1_agreement=top1, top4_agreement=top4, acceptance_ratio=ACCEPTANCE)
    entries = {
        name: EngineEntry(
            file=FORMATS[name],
            quant=profile.quant,
            embedding_bits=profile.embedding_bits,
            step_bytes=plan.step_bytes,
            max_width=MAX_WIDTH,
            bounds=bounds,
        )
        for name in plan.options.format
    }  # fmt: skip
    return Manifest(
        format_version=FORMAT_VERSION,
        target=plan.options.target.shown_name,
        target_hash=target.model_hash,
        drafter_hash=plan.drafter_hash,
        vocab_size=config.vocab_size,
        eos_ids=list(target.eos_ids),
        max_context=config.max_context,
        hidden_size=config.hidden_size,
        sa_kv_heads=config.sa_kv_heads,
        ca_kv_heads=config.ca_kv_heads,
        head_dim=config.head_dim,
        draft_vocab_size=config.draft_vocab_size,
        draft_ids_file=DRAFT_IDS_FILE,
        null_row_file=NULL_ROW_FILE if config.null_row else None,
        confidence_temperature=config.confidence_temperature,
        tokenizer_hash=hashlib.sha256(tokenizer).hexdigest(),
        versions=versions(),
        engines=entries,
        files={},
    )


def _half(plan: BundlePlan, tensors: Arrays) -> DeviceHalf:
    """Build the same in torch."""
    from outrider_core.models.moa import device_half_of

    return device_half_of(plan.config, tensors)


def _report(plan: BundlePlan, folder: Path, lowering: dict[str, Any]) -> dict[str, Any]:
    """Open the bundle as an app would, and let every engine that runs here draft a token."""
    bundle = open_bundle(folder)
    engines: dict[str, Any] = {}
    for name, entry in bundle.manifest.engines.items():
        check_metadata(bundle, name)
        _try(bundle, name)
        size = sum(file.bytes for path, file in bundle.manifest.files.items() if path.startswith(entry.file))
        engines[name] = {
            "file": entry.file, "bytes": size, "quant": entry.quant, "embedding_bits": entry.embedding_bits,
            "lowering": lowering[name],
        }  # fmt: skip
    understudy = bundle.manifest.understudy
    return {
        "target": bundle.manifest.target,
        "understudy": msgspec.to_builtins(understudy) if understudy else None,
        "engines": engines,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "machine": describe_machine(),
        "versions": bundle.manifest.versions,
    }


def _try(bundle: Bundle, name: str) -> None:
    """Raise BundleError unless an engine drafts a first token."""
    manifest = bundle.manifest
    empty = np.zeros((0, manifest.sa_kv_heads, manifest.head_dim), np.float32)
    rows = np.zeros((1, 2, manifest.ca_kv_heads, manifest.head_dim), np.float32)
    if bundle.null_row is not None:
        rows = bundle.null_row[None]
    token, first = np.array([manifest.eos_ids[0]]), np.array([0])
    mask = np.zeros((1, 1), np.float32)
    logits, *_ = open_engine(bundle, name).step(
        token, first, first, mask, empty, empty, np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])
    )
    if logits.shape != (1, manifest.draft_vocab_size) or not np.isfinite(logits).all():
        raise BundleError(
            f"{manifest.engines[name].file} cannot draft a token here; this is a bug in Outrider, please report it"
        )
