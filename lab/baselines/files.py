"""Read and write baselines in folders of the form that all drafters have."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import deserialize
from safetensors.torch import load
from torch import Tensor

from lab.baselines.eagle3 import Eagle3
from lab.baselines.fused import FusedHiddenMoA, FusedMoA, FusedQueryMoA, Rows4MoA, Rows6MoA
from lab.baselines.networks import KINDS, Baseline, BaselineConfig
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE, hash_drafter
from outrider_core.models.drafter_files import write_drafter
from outrider_core.models.layers import adopt_tables
from outrider_core.models.moa_config import DrafterError, MoAConfig


def build_baseline(config: BaselineConfig) -> Baseline:
    """Return a new drafter of these shapes."""
    return Eagle3(config) if config.kind == "eagle3" else Baseline(config)


#: MoA with one change, by the `type` of its folder
VARIANTS: dict[str, Callable[[MoAConfig], FusedMoA]] = {
    "moa-fused": FusedMoA,
    "moa-fused-hidden": FusedHiddenMoA,
    "moa-fused-query": FusedQueryMoA,
    "moa-4-bits": Rows4MoA,
    "moa-6-bits": Rows6MoA,
}


def save_baseline(folder: Path, model: Baseline, notes: dict[str, Any]) -> None:
    """Write a drafter folder for `load_baseline`."""
    write_drafter(folder, model.config.kind, asdict(model.config), model.trained(), notes)


def load_baseline(folder: Path, tables: tuple[Tensor, Tensor]) -> tuple[Baseline, str]:
    """Load the drafter in `folder` with the target's embedding and LM head, each [vocab, hidden_size]; and its hash.

    float32. Raises DrafterError with one clear line.
    """
    with _broken_is_one_line(folder):
        values, tensors, raw = _read(folder, KINDS)
        config = BaselineConfig.from_dict(values)
        model = build_baseline(config)
        adopt_tables(model.embedding, model.head, model.draft_ids, tables, tensors["draft_ids"])
        model.load_state_dict(tensors, strict=False)
    return model.requires_grad_(False).eval(), hash_drafter(config, raw)


def load_variant(folder: Path, tables: tuple[Tensor, Tensor]) -> tuple[FusedMoA, str]:
    """Load the same for one of VARIANTS."""
    with _broken_is_one_line(folder):
        values, tensors, raw = _read(folder, VARIANTS)
        config = MoAConfig.from_dict(values)
        model = VARIANTS[values["type"]](config)
        half = model.device_half
        adopt_tables(half.embedding, half.head, half.draft_ids, tables, tensors["draft_ids"])
        model.restore(tensors)
    return model.requires_grad_(False).eval(), hash_drafter(config, raw)


def _read(folder: Path, kinds: Collection[str]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:
    """Read a drafter's config.json, its tensors in float32, and in their stored form."""
    values = json.loads((folder / CONFIG_FILE).read_text())
    if values.get("type") not in kinds:
        raise DrafterError(f"{folder}: a {values.get('type')} drafter is none of these: {', '.join(kinds)}")
    stored = (folder / WEIGHTS_FILE).read_bytes()
    tensors = {k: v.float() if v.is_floating_point() else v for k, v in load(stored).items()}
    return values, tensors, {name: entry["data"] for name, entry in deserialize(stored)}


@contextmanager
def _broken_is_one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except DrafterError:
        raise
    except Exception as error:
        raise DrafterError(f"{folder}: broken drafter files: {error}") from error
