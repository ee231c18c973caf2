"""Target bundles: a lowered target in a folder, with everything that is needed to serve it. No torch.

target.onnx, target.onnx.data   the graph and its tables
target.unsigned.onnx            the same over the same tables, for processors on which the first would be inexact
products.onnx, products.unsigned.onnx
                                products by which `outrider_core.targets.products` tests a machine
tokenizer.json, tokenizer_config.json, chat_template.jinja
manifest.json                   what it was made from, its shapes, and the size and SHA-256 of every file
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_core.cache import sha256_of
from outrider_core.targets.config import Rope, TargetConfig

MANIFEST_FILE, GRAPH_FILE, DATA_FILE = "manifest.json", "target.onnx", "target.onnx.data"
UNSIGNED_GRAPH_FILE = "target.unsigned.onnx"
PRODUCTS_FILE, UNSIGNED_PRODUCTS_FILE = "products.onnx", "products.unsigned.onnx"
#: version of the folder's layout and of the graph's arithmetic: another version may write other text
FORMAT_VERSION = 5


class TargetBundleError(RuntimeError):
    """A target bundle cannot be made or used. The message is one line that says what to do."""


@dataclass(frozen=True)
class TargetBundle:
    """A bundle on disk whose files are whole.

    name: what the target was called when the bundle was made. source_hash: identity of the model it was made from.
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

    @property
    def graph(self) -> Path:
        """The ONNX file with signed tables; `usable_graph` says which one a machine takes."""
        return self.folder / GRAPH_FILE

    @property
    def unsigned_graph(self) -> Path:
        """The ONNX file with unsigned tables."""
        return self.folder / UNSIGNED_GRAPH_FILE

    @property
    def products(self) -> Path:
        """A product with a signed table."""
        return self.folder / PRODUCTS_FILE

    @property
    def unsigned_products(self) -> Path:
        """The same with an unsigned one."""
        return self.folder / UNSIGNED_PRODUCTS_FILE


def open_target_bundle(folder: Path) -> TargetBundle:
    """Open a bundle and check that its files are those that were written. Raises TargetBundleError."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise TargetBundleError(f"{folder}: there is no {MANIFEST_FILE}, so this is not a target bundle")
    try:
        values = json.loads(path.read_text())
        version = values["format_version"]
        if version != FORMAT_VERSION:
            raise TargetBundleError(
                f"{folder}: target bundle of format {version}, and this program reads {FORMAT_VERSION}; "
                "delete it, and it is made again"
            )
        _check_files(folder, values["files"])
        config = dict(values["config"])
        rope = Rope(**config.pop("rope"))
        return TargetBundle(
            folder=folder,
            name=values["name"],
            source_hash=values["source_hash"],
            config=TargetConfig(**config, rope=rope),
            value_scales=tuple(values["value_scales"]),
            max_positions=values["max_positions"],
            eos_ids=tuple(values["eos_ids"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetBundleError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete {folder}, and it is made again"
        ) from None


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, wanted in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != wanted["bytes"] or sha256_of([path])[0] != wanted["sha256"]:
            state = "is missing" if found is None else "is not what was written"
            raise TargetBundleError(f"{path} {state}; delete {folder}, and it is made again")
