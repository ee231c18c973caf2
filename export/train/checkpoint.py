"""A published MoA checkpoint on disk or on the model hub: its config, and its tensors by the drafter's names.

Only safetensors are read, headers first: a checkpoint that does not fit is refused before any weight is loaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider_core.cache import expanded
from outrider_core.models.moa_config import DrafterError

MODULES = ("layer_self_attention", "self_attention", "cross_attention", "Ekv2E")
#: the only one of MODULES' names that no other kind of checkpoint has: it identifies the prefix
LANDMARK = "Ekv2E.weight"
#: copies of the target's frozen tensors, and buffers
FROZEN = re.compile(
    r"(?:^|\.)(?:embed_tokens\.weight|lm_head\.weight|norm\.weight|layers\.\d+\..+"
    r"|rotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached))$"
)
CONVERT = (
    "convert .bin and .pt files, which can run code and are never opened here, where you trust them: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, not read yet."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    kind: str  # safetensors' name of its type


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder's config and table of contents. tensors: by the drafter's names.

    stated: the folder has a config; otherwise the target's is used.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, Stored]
    stated: bool = True


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Read config and file headers of `source`, a folder or a Hugging Face id; no weights.

    Raises DrafterError with one clear line.
    """
    folder = expanded(source)
    if folder.is_dir():
        name = folder.resolve().name
    else:
        name, folder = str(source), _download(str(source))
    contents = _contents(folder)
    stated = (folder / "config.json").is_file()
    config = _json(folder / "config.json") if stated else {}
    if config.get("disable_LSA"):
        raise DrafterError(
            f"{name}: it has no layer self-attention (disable_LSA); only checkpoints with it can be imported"
        )
    return Checkpoint(name, config, _own(name, contents), stated)


def _download(name: str) -> Path:
    path = expanded(name)
    if path.is_file():
        raise DrafterError(f"{name} is a file; name the folder that holds config.json and model.safetensors")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise DrafterError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub client raises many kinds: network, auth, not found
        reason = first_line(error)
        raise DrafterError(f"{name}: not a local folder, and the model hub gave nothing: {reason}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise DrafterError(f"{path.parent}: no {path.name} there, so this is not a checkpoint folder") from None
    except (OSError, ValueError) as error:
        raise DrafterError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise DrafterError(f"{path} is not a JSON object; get the checkpoint again")
    return values


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _contents(folder: Path) -> dict[str, Stored]:
    """Return every tensor of the folder's safetensors file or shards, by its name there."""
    single, indexes = folder / "model.safetensors", sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) == 1 and not single.is_file():
        return _sharded(indexes[0])
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"{folder}: no .safetensors weights there; {CONVERT}")
    if len(files) > 1:
        raise DrafterError(f"{folder}: {len(files)} .safetensors files, but neither model.safetensors nor one index")
    return _header(files[0])


def _sharded(index: Path) -> dict[str, Stored]:
    """Return the tensors that the index lists, each in its shard."""
    shards = _json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(x, str) and Path(x).name == x for x in shards.values()):
        raise DrafterError(f"{index}: its weight_map must map tensors to files of the same folder")
    headers = {shard: _header(index.parent / shard) for shard in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise DrafterError(f"{index.parent / shard} lacks {name}, which its index lists; get the checkpoint again")
    return {name: headers[shard][name] for name, shard in shards.items()}


def _header(file: Path) -> dict[str, Stored]:
    if not file.is_file():
        raise DrafterError(f"{file} is missing; get the checkpoint again")
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: Stored(file, n, tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise DrafterError(f"{file} is not a readable safetensors file: {first_line(error)}") from error


def _own(source: str, contents: dict[str, Stored]) -> dict[str, Stored]:
    """Return the drafter's tensors by name without prefix; the target's are left out, unknown ones refused."""
    prefixes = [name.removesuffix(LANDMARK) for name in contents if f".{name}".endswith(f".{LANDMARK}")]
    if not prefixes:
        raise DrafterError(f"{source}: no tensor {LANDMARK}, so this is not a MoA checkpoint in the authors' layout")
    if len(prefixes) > 1:
        raise DrafterError(f"{source}: {len(prefixes)} tensors {LANDMARK}; a folder must hold exactly one")
    own = {}
    for name, stored in contents.items():
        if FROZEN.search(name):
            continue
        short = name.removeprefix(prefixes[0])
        if not name.startswith(prefixes[0]) or short.split(".")[0] not in MODULES:
            raise DrafterError(f"{source}: tensor {name} does not belong to a MoA checkpoint; it cannot be imported")
        own[short] = stored
    return own


def read_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return all tensors in their own number formats, except float64, which become float32."""
    tensors = {}
    for file in sorted({stored.file for stored in checkpoint.tensors.values()}):
        with safe_open(file, framework="pt") as opened:
            for name, stored in checkpoint.tensors.items():
                if stored.file == file:
                    tensors[name] = _usable(checkpoint.name, name, opened.get_tensor(stored.name))
    return tensors


def _usable(source: str, name: str, tensor: Tensor) -> Tensor:
    usable = tensor.float() if tensor.dtype == torch.float64 else tensor
    if not usable.isfinite().all():
        raise DrafterError(f"{source}: tensor {name} holds {tensor.abs().max():g}; it cannot be imported")
    return usable
