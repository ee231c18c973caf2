"""Make a target bundle, measure it, and move it into place. No torch.

Unfinished work is in a hidden folder: after Ctrl-C or a kill the same command resumes from there; after an error
nothing is left behind.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from export.places import locked, put_in_place
from export.progress import Meter
from export.target.target_options import TargetOptions
from export.target.target_plan import TargetPlan, check_resources, make_plan, show_plan
from export.target.target_report import describe, markdown
from outrider_core import durable
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.bundle import FORMAT_VERSION, TargetBundle, TargetBundleError
from outrider_core.targets.source import TargetError

#: folder of the unfinished work
BUNDLE_FOLDER, ANSWERS_FILE, NOTE_FILE = "bundle", "answers.json", "note.json"
REMEDY = "free some space there, or choose another --output-dir"


def write_target(options: TargetOptions) -> dict[str, Any]:
    """Write the bundle that `options` describe and return its report; a dry run only shows the plan (returns {}).

    Raises TargetError or BundleError with one clear line; the output folder is then as it was.
    """
    console = Console(stderr=True)
    plan = make_plan(options)
    show_plan(plan, console)
    check_resources(plan)
    if options.dry_run:
        console.print("dry run: nothing written")
        return {}
    output = options.output_dir.resolve()
    aside = output.parent / f".{output.name}.partial"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with locked(aside):
            try:
                report = _write_all(plan, aside)
                put_in_place(aside / BUNDLE_FOLDER, output)
            except Exception:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            shutil.rmtree(aside)
    except TargetBundleError as error:
        raise TargetError(str(error)) from None
    except OSError as error:
        raise TargetError(f"{output} cannot be written: {error.strerror or error}; {REMEDY}") from None
    console.print(f"wrote {output}; serve it with: python -m cloud.verifier --model {options.output_dir}")
    for line in describe(report):
        console.print(f"  {line}", highlight=False)
    return report


def _write_all(plan: TargetPlan, aside: Path) -> dict[str, Any]:
    _start_or_resume(plan, aside)
    bundle = _make(plan, aside / BUNDLE_FOLDER)
    quality = _quality(plan, aside, bundle) if plan.compared else None
    with Meter("timing steps", 1) as meter:
        cost = _cost(bundle.folder)
        meter.update(1, "")
    report = _report(plan, bundle, cost, quality)
    (bundle.folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (bundle.folder / "report.md").write_text(markdown(report))
    return report


def _start_or_resume(plan: TargetPlan, aside: Path) -> None:
    """Keep the files of an interrupted export of the same target."""
    note = json.dumps([plan.options.target.identity, plan.options.bits, plan.options.calibrate, FORMAT_VERSION])
    path = aside / NOTE_FILE
    if not path.is_file() or path.read_text() != note:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        durable.write(path, note)


def _make(plan: TargetPlan, folder: Path) -> TargetBundle:
    from outrider_core.targets.convert import make_target_bundle  # imported only here, as it takes memory

    source, bits, calibrate = plan.options.target, plan.options.bits, plan.options.calibrate or None
    with Meter(f"lowering to {'float32' if bits == 32 else f'{bits} bits'}", 1) as meter:
        return make_target_bundle(source, folder, done=_told(meter), calibrate=calibrate, bits=bits, remedy=REMEDY)


def _told(meter: Meter) -> Callable[[int, int], None]:
    """Return a callback that shows step `step` of `steps`, counted from 0."""
    return lambda step, steps: meter.update(step + 1, "", steps)


def _quality(plan: TargetPlan, aside: Path, bundle: TargetBundle) -> dict[str, Any]:
    """Return how close the bundle is to the model in float32, on answers that the bundle writes."""
    from outrider_core.targets.answers import WrittenAnswer, write_answers
    from outrider_core.targets.quality import compare
    from outrider_core.targets.weights import open_weights

    options, path = plan.options, aside / ANSWERS_FILE
    prompts = plan.prompts
    asked = {"prompts": prompts, "tokens": options.answer_tokens}
    try:
        kept = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # there is none, or a crash has damaged it
        kept = {}
    if kept.get("asked") != asked:
        with Meter("the target's own answers", options.answer_tokens) as meter:
            answers = write_answers(bundle, prompts, options.answer_tokens, Sampling(), _told(meter))
        kept = {"asked": asked, "answers": [asdict(answer) for answer in answers]}
        durable.write(path, json.dumps(kept))
    answers = [WrittenAnswer(**answer) for answer in kept["answers"]]
    with Meter("comparing", plan.config.num_hidden_layers) as meter:
        weights = open_weights(options.target.path)
        found = compare(bundle, *weights, answers, lambda done: meter.update(done, ""))
    return {
        "prompts": len(prompts),
        "answer_tokens": found.tokens,
        "top1_agreement": round(found.agreement, 4),
        "kl_divergence": round(found.divergence, 5),
    }


def _cost(folder: Path) -> dict[str, Any]:
    """Return the measurements of `export.target.target_cost`."""
    command = [sys.executable, "-m", "export.target.target_cost", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        raise TargetError(f"the bundle does not run on this machine: {last[:300]}")
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


def _report(
    plan: TargetPlan, bundle: TargetBundle, cost: dict[str, Any], quality: dict[str, Any] | None
) -> dict[str, Any]:
    import importlib.metadata

    from outrider_core.machine import describe_machine

    files = {path.name: path.stat().st_size for path in sorted(bundle.folder.iterdir()) if path.is_file()}
    return {
        "target": bundle.name,
        "source_hash": bundle.source_hash,
        "bits": bundle.bits,
        "format_version": FORMAT_VERSION,
        "bytes": sum(files.values()),
        "files": files,
        **cost,
        "quality": quality,
        "machine": f"{describe_machine()}, {cost['threads']} threads",
        "versions": {name: importlib.metadata.version(name) for name in ("outrider", "onnx", "onnxruntime")},
    }
