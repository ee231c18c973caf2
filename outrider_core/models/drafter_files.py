"""Drafter folders as torch tensors; `outrider_core.models.drafter_arrays` reads them without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider_core import durable
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE, read_drafter
from outrider_core.models.moa_config import MoAConfig


def save_drafter(
    folder: Path, config: MoAConfig, tensors: dict[str, Tensor], notes: dict[str, Any], *, as_given: bool = False
) -> None:
    """Write a drafter folder: weights, in fp16 or `as_given`, and a config that also carries free-form `notes`."""
    write_drafter(folder, "moa", asdict(config), tensors, notes, as_given=as_given)


def write_drafter(
    folder: Path,
    kind: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    notes: dict[str, Any],
    *,
    as_given: bool = False,
) -> None:
    """Write a drafter folder of any kind; `config` holds its reader's values. as_given: keep the number formats."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {k: v if as_given or not v.is_floating_point() else v.half() for k, v in tensors.items()}
    part = folder / f".{WEIGHTS_FILE}.part"
    save_file({k: v.contiguous().cpu() for k, v in stored.items()}, part)
    part.chmod(0o644)  # safetensors leaves it readable to its owner only
    durable.put_in_place(part, folder / WEIGHTS_FILE)
    text = json.dumps({"type": kind, **config, "notes": notes}, indent=2)
    durable.write(folder / CONFIG_FILE, text + "\n")


def load_drafter(folder: Path) -> tuple[MoAConfig, dict[str, Tensor], str]:
    """`read_drafter` with torch tensors. Raises DrafterError with one clear line."""
    config, arrays, drafter_hash = read_drafter(folder)
    return config, {name: torch.from_numpy(array) for name, array in arrays.items()}, drafter_hash
