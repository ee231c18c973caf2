"""Read a drafter folder (`config.json`, `drafter.safetensors`) into numpy. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from outrider_core.models.folders import drafters_folder
from outrider_core.models.moa_config import DrafterError, MoAConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "drafter.safetensors"
#: number formats of safetensors files; numpy has no bfloat16, which is the upper half of a float32
_FORMATS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "?",
}  # fmt: skip

Arrays = dict[str, NDArray[Any]]


def read_drafter(folder: Path) -> tuple[MoAConfig, Arrays, str]:
    """Read a drafter folder: (config, tensors by name, drafter_hash). Floating-point tensors come as float32.

    Both halves of one drafter carry the same `hash_drafter`. Raises DrafterError with one clear line.
    """
    config, stored, drafter_hash = _read(folder)
    try:
        return config, {name: _array(entry) for name, entry in stored.items()}, drafter_hash
    except ValueError as error:
        raise DrafterError(f"{folder}: broken drafter files: {error}") from error


def _read(folder: Path) -> tuple[MoAConfig, dict[str, dict[str, Any]], str]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise DrafterError(f"{folder}: no {name} there, so this is not a drafter folder")
    try:
        values = json.loads((folder / CONFIG_FILE).read_text())
        if values.get("type", "moa") != "moa":
            raise DrafterError(f"{folder}: a {values['type']} drafter, for benchmarks only; devices run MoA drafters")
        config = MoAConfig.from_dict(values)
        stored = dict(safetensors.deserialize((folder / WEIGHTS_FILE).read_bytes()))
    except DrafterError:
        raise
    except Exception as error:
        raise DrafterError(f"{folder}: broken drafter files: {error}") from error
    return config, stored, hash_drafter(config, {name: entry["data"] for name, entry in stored.items()})


def _array(entry: Mapping[str, Any]) -> NDArray[Any]:
    """Read a tensor of a safetensors file; floating-point ones become float32."""
    kind = entry["dtype"]
    if kind not in _FORMATS:
        raise ValueError(f"a tensor is stored as {kind}, which is not supported")
    array = np.frombuffer(entry["data"], _FORMATS[kind]).reshape(entry["shape"])
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if array.dtype.kind == "f" else array.copy()


def hash_drafter(config: Any, raw: Mapping[str, bytes]) -> str:
    """Return 16 hex digits over a drafter's shapes and the bytes of its weights as they are stored.

    The confidence temperature is left out: a better one does not make it another drafter.
    """
    shapes = {name: value for name, value in asdict(config).items() if name != "confidence_temperature"}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode())
    for name in sorted(raw):
        digest.update(name.encode())
        digest.update(raw[name])
    return digest.hexdigest()[:16]


def check_target(known: str, name: str, identity: str, drafter: str | Path) -> None:
    """Raise DrafterError unless `known`, the target identity in `drafter`'s config, is that of target `name`."""
    if known != identity:
        raise DrafterError(
            f"{drafter} was trained on target {known}, but {name} is {identity}; give the target it was trained on, "
            "or a drafter trained for this one"
        )


def _installed_drafters() -> list[Path]:
    """Return the folders in `drafters/` here, then those in the package."""
    places = dict.fromkeys([Path("drafters").resolve(), drafters_folder()])
    return [folder for place in places if place.is_dir() for folder in sorted(place.iterdir())]


def drafter_of_target(identity: str) -> Path | None:
    """Return the folder of the first installed drafter that was trained on the target of this identity."""
    for folder in _installed_drafters():
        with suppress(OSError, ValueError):
            values = json.loads((folder / CONFIG_FILE).read_bytes())
            kind = isinstance(values, dict) and values.get("type", "moa")
            if kind == "moa" and values.get("target_hash") == identity:
                return folder
    return None


def find_drafter(drafter_hash: str) -> Path:
    """Return the folder of the installed drafter with this hash. Raises DrafterError if there is none."""
    for folder in _installed_drafters():
        try:
            if _read(folder)[2] == drafter_hash:
                return folder
        except DrafterError:
            continue
    raise DrafterError(
        f"no drafter {drafter_hash} in ./drafters or {drafters_folder()}; give the bundle's with --drafter, or "
        "export the bundle again"
    )
