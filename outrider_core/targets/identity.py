"""The identity of a model: 16 hex digits that change with any byte of its weights, tokenizer or chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from outrider_core import durable
from outrider_core.cache import sha256_of

#: files of a model folder that affect its text, beside its weights
SMALL_FILES = (
    "adapter_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
#: weights and their indexes; the second format counts only if there is nothing of the first
WEIGHTS = (("*.safetensors", "*.safetensors.index.json"), ("pytorch_model*.bin", "pytorch_model*.bin.index.json"))
#: file in a converted folder: names the file it was converted from, and the folder's state then
SOURCE_FILE = "converted_from.json"


def model_identity(path: Path) -> str:
    """Return 16 hex digits of a GGUF file or a model folder, whatever its name and place.

    A GGUF file: from the SHA-256 of its bytes. A folder: from the SHA-256 over the names and SHA-256s of SMALL_FILES
    and WEIGHTS. A folder converted from a GGUF file has the file's identity as long as nothing in it was changed. Large
    files are read once (`sha256_of`). Raises OSError if a file cannot be read.
    """
    if path.is_file():
        return sha256_of([path])[0][:16]
    return converted_from(path) or _folder_identity(path)


def converted_from(folder: Path) -> str | None:
    """Return the identity of the file that a folder was converted from; None if unknown or changed since."""
    source = _source(folder)
    return source["identity"] if source and source["folder"] == _folder_identity(folder) else None


def write_source(folder: Path, file: Path) -> None:
    """Note in `folder` that it was converted from `file` and has not been changed since."""
    values = {"file": file.name, "identity": model_identity(file), "folder": _folder_identity(folder)}
    durable.write(folder / SOURCE_FILE, json.dumps(values, indent=2) + "\n")


def _folder_identity(folder: Path) -> str:
    paths = [path for path in map(folder.joinpath, SMALL_FILES) if path.is_file()]
    for weights, index in WEIGHTS:
        if found := list(folder.glob(weights)):
            paths += [*found, *folder.glob(index)]
            break
    paths.sort(key=lambda path: path.name)
    digest = hashlib.sha256()
    for path, sha256 in zip(paths, sha256_of(paths), strict=True):
        digest.update(f"{path.name} {sha256}\n".encode())
    return digest.hexdigest()[:16]


def _source(folder: Path) -> dict[str, str]:
    try:
        values = json.loads((folder / SOURCE_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    whole = isinstance(values, dict) and all(isinstance(values.get(key), str) for key in ("identity", "folder"))
    return values if whole else {}
