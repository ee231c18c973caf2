"""Compare the engines of a bundle with the eager model in torch, for the report of `export bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from export.bundle.check import check_acceptance
from export.bundle.drafter_graph import INT8_ACTIVATIONS
from export.bundle.facts import RANDOM_ROWS, TARGET_ANSWERS
from export.bundle.parity import compare
from export.bundle.plan import BundlePlan
from export.bundle.steps import passages_for
from export.bundle.to_onnx import accuracy_levels
from outrider_core.drafting.bundle import open_bundle
from outrider_core.drafting.engines import open_engine
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.eager import EagerEngine
from outrider_core.models.moa import DeviceHalf
from outrider_core.models.target import open_target


def add_comparison(
    report: dict[str, Any], plan: BundlePlan, half: DeviceHalf, folder: Path, work: Path, console: Console
) -> None:
    """Compare each engine of the bundle in `folder` with `half`, and put the figures into `report`.

    work: folder for the target's answers, so that an interrupted export can continue.
    """
    files = open_target(plan.options.target)
    tensors = load_drafter(plan.drafter)[1]
    passages = passages_for(files, plan.config, tensors, work, plan.load_target)
    bundle, eager = open_bundle(folder), EagerEngine(half)
    for name, entry in bundle.manifest.engines.items():
        with console.status(f"comparing {entry.file} with the eager model"):
            parity = compare(open_engine(bundle, name), eager, plan.config, bundle, passages)
            engine = report["engines"][name]
            engine["parity"] = parity.as_dict()
            if name == "onnx" and plan.profile.bits < 16 and plan.load_target:
                engine["accuracy_levels"] = {
                    str(level): compare(other, eager, plan.config, bundle, passages).as_dict()
                    for level, other in accuracy_levels(bundle.path(entry.file))
                }
                engine["accuracy_level"] = INT8_ACTIVATIONS
    report["compared_on"] = TARGET_ANSWERS if plan.load_target else RANDOM_ROWS
    report["machine"] += f", {torch.get_num_threads()} threads"
    if plan.options.check and plan.load_target:
        report["acceptance"] = check_acceptance(bundle, plan.drafter, plan.options.target.name, half)
