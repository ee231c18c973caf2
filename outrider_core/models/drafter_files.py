"""Drafter folders: `config.json` and `drafter.safetensors`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider_core.models.folders import drafters_folder
from outrider_core.models.identity import former_identity
from outrider_core.models.moa_config import DrafterError, MoAConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "drafter.safetensors"


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
    """A drafter folder of any kind; `config` is what its reader wants to know. as_given: keep the number formats."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {k: v if as_given or not v.is_floating_point() else v.half() for k, v in tensors.items()}
    save_file({k: v.contiguous().cpu() for k, v in stored.items()}, folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors leaves it readable to its owner only
    text = json.dumps({"type": kind, **config, "notes": notes}, indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n")


def load_drafter(folder: Path) -> tuple[MoAConfig, dict[str, Tensor], str]:
    """Read a drafter folder: (config, float32 tensors, drafter_hash).

    Both halves of one drafter carry the same `hash_drafter`.
    Raises DrafterError with one clear line.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise DrafterError(f"{folder}: no {name} there, so this is not a drafter folder")
    try:
        values = json.loads((folder / CONFIG_FILE).read_text())
        if values.get("type", "moa") != "moa":
            raise DrafterError(f"{folder}: a {values['type']} drafter, for benchmarks only; MoA is what devices run")
        config = MoAConfig.from_dict(values)
        tensors = load_file(folder / WEIGHTS_FILE)
    except DrafterError:
        raise
    except Exception as error:
        raise DrafterError(f"{folder}: broken drafter files: {error}") from error
    floats = {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}
    return config, floats, hash_drafter(values, config, tensors)


def hash_drafter(stored: dict[str, Any], config: Any, tensors: dict[str, Tensor]) -> str:
    """16 hex digits over the shapes that are `stored` in a config file and the weights as they are stored.

    A shape that a config has by default and the file does not name is left out, so that the hash of an older drafter
    stays what it is.
    """
    shapes = {name: value for name, value in asdict(config).items() if name in stored}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # numpy knows no bfloat16
        digest.update(name.encode() + plain.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_target(known: str, name: str, identity: str, drafter: str | Path, folder: Path | None = None) -> None:
    """Raise DrafterError unless the identity that `drafter`'s config names, `known`, is that of target `name`.

    folder: the target's, by which a drafter of version 0.2 is told what to do.
    """
    if known == identity:
        return
    if folder is not None and known == former_identity(folder):
        raise DrafterError(
            f"{drafter} names {name} as version 0.2 did, by the ends of its weights alone; run once: "
            f"python -m export renew {drafter} --target {name}"
        )
    raise DrafterError(
        f"{drafter} was trained on target {known}, but {name} is {identity}; give the target it was trained on, or a "
        "drafter trained for this one"
    )


def find_drafter(drafter_hash: str) -> Path:
    """The folder of the drafter with this hash, of those in `drafters/` here and of those that come with the package.

    Raises DrafterError where there is none.
    """
    places = dict.fromkeys([Path("drafters").resolve(), drafters_folder()])
    for folder in (folder for place in places if place.is_dir() for folder in sorted(place.iterdir())):
        try:
            if load_drafter(folder)[2] == drafter_hash:
                return folder
        except DrafterError:
            continue
    raise DrafterError(
        f"no drafter {drafter_hash} in ./drafters or {drafters_folder()}; give the bundle's with --drafter, or "
        "export the bundle again"
    )
