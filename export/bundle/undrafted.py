"""Write a bundle without a drafter, in which the understudy drafts: no training is needed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from export.bundle.bundle_options import BundleOptions
from export.bundle.export_target import ExportTarget
from export.bundle.plan import check_ends, understudy_bytes
from export.bundle.report import markdown
from export.bundle.signing import sign, versions
from export.bundle.understudy import write_understudy
from export.places import lacking, locked, put_in_place
from outrider_core.drafting.bundle import FORMAT_VERSION, BundleError, Manifest, UnderstudyEntry, open_bundle
from outrider_core.machine import describe_machine
from outrider_core.models.moa_config import MoAConfig
from outrider_core.targets.cached import cached_target
from outrider_core.targets.source import TargetSource

#: most tokens of a conversation, unless --max-context or a model limits it
CONTEXT = 4096


def write_undrafted(options: BundleOptions, target: ExportTarget, console: Console) -> dict[str, Any]:
    """Write a bundle for `target`, which has no drafter, by `options`; return the report, {} for a dry run.

    Raises BundleError or TargetError with one clear line; the output folder is then as it was.
    """
    source = options.understudy
    if source is None:
        raise BundleError(
            f"no drafter here was trained on {target.name}: train one (outrider export train --target ...), or let a "
            "small model with the same tokenizer draft (--understudy MODEL)"
        )
    if options.check or options.bench:
        raise BundleError("--check and --bench measure a drafter, and there is none; leave them out")
    check_ends(target)
    size = understudy_bytes(source, options.understudy_bits)
    console.print(f"no drafter: {source.name} drafts for {target.name}; about {size / 1e6:.0f} MB", highlight=False)
    if why := lacking(options.output_dir, size, 0, ""):
        raise BundleError(why)
    if options.dry_run:
        console.print("dry run: nothing written")
        return {}
    output = options.output_dir.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.parent / f".{output.name}.partial"
    with locked(aside):
        try:
            report = _write(options, source, target, aside, console)
            put_in_place(aside, output)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    console.print(f"wrote {output}; it loads with EdgeRuntime.from_bundle({str(output)!r})")
    console.print(f"  {_what_a_drafter_adds(target)}", highlight=False)
    return report


def _write(
    options: BundleOptions, source: TargetSource, target: ExportTarget, aside: Path, console: Console
) -> dict[str, Any]:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    target.write_tokenizer(aside)
    with console.status(f"lowering the understudy {source.name}") as status:
        done = lambda step, steps: status.update(f"lowering the understudy, step {step} of {steps}")  # noqa: E731
        model = cached_target(source, done, bits=options.understudy_bits)
    most = min(model.max_positions, target.config.max_position_embeddings)
    if not 1 <= (context := options.max_context or min(CONTEXT, most)) <= most:
        raise BundleError(f"--max-context {context}: target and understudy read 1..{most} tokens")
    entry = write_understudy(source, aside, context, bits=options.understudy_bits)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        target=options.target.shown_name,
        target_hash=target.model_hash,
        vocab_size=target.config.vocab_size,
        eos_ids=list(target.eos_ids),
        max_context=context,
        tokenizer_hash=hashlib.sha256((aside / "tokenizer.json").read_bytes()).hexdigest(),
        versions=versions(),
        engines={},
        files={},
        understudy=entry,
    )
    sign(manifest, aside)
    open_bundle(aside)
    report = _report(manifest, entry, aside)
    (aside / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (aside / "report.md").write_text(markdown(report))
    return report


def _report(manifest: Manifest, understudy: UnderstudyEntry, folder: Path) -> dict[str, Any]:
    return {
        "target": manifest.target,
        "understudy": msgspec.to_builtins(understudy),
        "engines": {},
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "machine": describe_machine(),
        "versions": manifest.versions,
    }


def _what_a_drafter_adds(target: ExportTarget) -> str:
    """Return one line on what training a drafter for the target would improve."""
    shape = MoAConfig.for_target(target.config, target.model_hash)
    heads, wide = shape.heads * shape.head_dim, shape.hidden_size
    step = 2 * (2 * heads * wide + 3 * wide * shape.sa_mlp) + wide * shape.draft_vocab_size
    return (
        f"a trained drafter would add trees from about {step / 1e6:.0f} million weights a step, text at once when the "
        f"link drops, and an understudy that is loaded only then: outrider export train --target {target.name}"
    )
