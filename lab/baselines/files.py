"""Baseline drafters as folders, in the form that all drafters have."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import deserialize
from safetensors.torch import load
from torch import Tensor

from lab.baselines.eagle3 import Eagle3
from lab.baselines.networks import KINDS, Baseline, BaselineConfig
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE, hash_drafter
from outrider_core.models.drafter_files import write_drafter
from outrider_core.models.layers import adopt_tables
from outrider_core.models.moa_config import DrafterError


def build_baseline(config: BaselineConfig) -> Baseline:
    """A fresh drafter of these shapes."""
    return Eagle3(config) if config.kind == "eagle3" else Baseline(config)


def save_baseline(folder: Path, model: Baseline, notes: dict[str, Any]) -> None:
    """Write a drafter folder for `load_baseline`."""
    write_drafter(folder, model.config.kind, asdict(model.config), model.trained(), notes)


def load_baseline(folder: Path, tables: tuple[Tensor, Tensor]) -> tuple[Baseline, str]:
    """The drafter in `folder` on the target's embedding and LM head, each [vocab, hidden_size]; and its hash.

    float32. Raises DrafterError with one clear line.
    """
    try:
        values = json.loads((folder / CONFIG_FILE).read_text())
        if values.get("type") not in KINDS:
            raise DrafterError(f"{folder}: a {values.get('type')} drafter is not a baseline ({', '.join(KINDS)})")
        given = {field.name: values[field.name] for field in fields(BaselineConfig)}
        config = BaselineConfig(**given | {"target_layers": tuple(given["target_layers"])})
        stored = (folder / WEIGHTS_FILE).read_bytes()
        tensors, raw = load(stored), {name: entry["data"] for name, entry in deserialize(stored)}
        model = build_baseline(config)
        adopt_tables(model.embedding, model.head, model.draft_ids, tables, tensors["draft_ids"])
        model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, strict=False)
    except DrafterError:
        raise
    except Exception as error:
        raise DrafterError(f"{folder}: broken drafter files: {error}") from error
    return model.requires_grad_(False).eval(), hash_drafter(values, config, raw)
