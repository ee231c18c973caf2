"""Target bundles: a lowered target in a folder, with everything needed to serve it. No torch.

target.onnx, target.onnx.data   the graph and its tables
products.onnx                   a product with which `check_products` tests a machine
tokenizer.json, tokenizer_config.json, chat_template.jinja
manifest.json                   the model it was made from, its shapes, size and SHA-256 of every file
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_core.cache import sha256_of
from outrider_core.targets.config import TargetConfig

MANIFEST_FILE, GRAPH_FILE, DATA_FILE = "manifest.json", "target.onnx", "target.onnx.data"
PRODUCTS_FILE = "products.onnx"
#: version of the folder's layout, the graph's arithmetic and the tokenisation; another version may write other text
FORMAT_VERSION = 8
#: bits of a weight that a bundle can have
BITS = (4, 8, 32)
#: what to do about a bundle in the cache, and about an exported one
MADE_AGAIN, EXPORT_AGAIN = "delete this folder, and it is made again", "copy it again, or export it again"


class TargetBundleError(RuntimeError):
    """A target bundle cannot be made or used. The message is one line that says what to do."""


@dataclass(frozen=True)
class TargetBundle:
    """A bundle on disk whose files are complete and undamaged.

    name: what the target was called when the bundle was made. source_hash: identity of the model it was made from.
    bits: of its linear layers' weights, one of BITS. digest: 8 hex digits of the conversion's result: the graph, the
    rounded weights and value_scales.
    value_scales: see `TargetGraph.value_scale`, one for each layer. max_positions: longest sequence.
    eos_ids: token ids that end an answer.
    """

    folder: Path
    name: str
    source_hash: str
    config: TargetConfig
    value_scales: tuple[float, ...]
    max_positions: int
    eos_ids: tuple[int, ...]
    bits: int
    digest: str

    @property
    def arithmetic(self) -> str:
        """Return the name of its arithmetic: replicas with the same model and the same name write the same text.

        The digest is part of it because calibration on another kind of machine may round weights differently.
        """
        return f"onnx-{self.bits}-v{FORMAT_VERSION}-{self.digest}"

    @property
    def graph(self) -> Path:
        """The ONNX file."""
        return self.folder / GRAPH_FILE

    @property
    def products(self) -> Path:
        """The file that `check_products` reads."""
        return self.folder / PRODUCTS_FILE


def open_target_bundle(folder: Path, remedy: str = MADE_AGAIN) -> TargetBundle:
    """Open a bundle and check that its files are unchanged since they were written. Raises TargetBundleError.

    remedy: what the error tells the user to do about an unusable bundle.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise TargetBundleError(f"{folder}: there is no {MANIFEST_FILE}, so this is not a target bundle")
    try:
        values = json.loads(path.read_text())
        if "config" not in values and "engines" in values:
            raise TargetBundleError(f"{folder} is a device's bundle, not a target bundle; `export target` writes those")
        version = values["format_version"]
        if version != FORMAT_VERSION:
            raise TargetBundleError(
                f"{folder}: target bundle of format {version}, and this program reads {FORMAT_VERSION}; {remedy}"
            )
        _check_files(folder, values["files"], remedy)
        if values["bits"] not in BITS:
            raise ValueError(f"bits {values['bits']}")
        return TargetBundle(
            folder=folder,
            name=values["name"],
            source_hash=values["source_hash"],
            config=TargetConfig.from_manifest(values["config"]),
            value_scales=tuple(values["value_scales"]),
            max_positions=values["max_positions"],
            eos_ids=tuple(values["eos_ids"]),
            bits=values["bits"],
            digest=_digest(values),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetBundleError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from None


def _digest(values: Mapping[str, Any]) -> str:
    made = [values["files"][name]["sha256"] for name in (GRAPH_FILE, DATA_FILE)], values["value_scales"]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:8]


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]], remedy: str) -> None:
    if not {GRAPH_FILE, DATA_FILE, PRODUCTS_FILE} <= set(files):
        raise ValueError("files are missing in its list")
    for name, wanted in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != wanted["bytes"] or sha256_of([path])[0] != wanted["sha256"]:
            state = "is missing" if found is None else "is not what was written"
            raise TargetBundleError(f"{path} {state}; {remedy}")
