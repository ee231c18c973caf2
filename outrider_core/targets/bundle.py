"""Target bundles: a lowered target in a folder, with everything that is needed to serve it. No torch.

target.onnx, target.onnx.data   the graph and its tables
tokenizer.json, tokenizer_config.json, chat_template.jinja
manifest.json                   what it was made from, its shapes, and the size and SHA-256 of every file
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
from filelock import FileLock

from outrider_core.cache import sha256_of
from outrider_core.targets.config import Rope, TargetConfig, UnsupportedTarget
from outrider_core.targets.gguf_tokenizer import write_tokenizer
from outrider_core.targets.graph import TargetGraph
from outrider_core.targets.tables import DATA_FILE, INDEX_FILE, TableFile
from outrider_core.targets.weights import BrokenWeights, GgufWeights, SafetensorsWeights, Weights

MANIFEST_FILE, GRAPH_FILE = "manifest.json", "target.onnx"
#: version of the folder's layout and of the graph's arithmetic: another version may write other text
FORMAT_VERSION = 2
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


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
        """The ONNX file."""
        return self.folder / GRAPH_FILE


def make_target_bundle(
    name: str,
    source: Path,
    source_hash: str,
    folder: Path,
    max_positions: int,
    eos_ids: Sequence[int] = (),
    done: Callable[[int, int], None] = lambda layer, layers: None,
) -> TargetBundle:
    """Lower the model in `source`, a folder or a GGUF file, into `folder`, which appears once it is complete.

    Work under way lies beside it and goes on where it was interrupted (not after an error); of several processes one
    works and the others wait. eos_ids: those of a folder; a GGUF file has its own. done(layer, layers) is called after
    every layer. Raises TargetBundleError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{source_hash}.partial")
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not (folder / MANIFEST_FILE).is_file():
                aside.mkdir(exist_ok=True)
                _write(name, source, source_hash, aside, max_positions, eos_ids, done)
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(aside, folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # the disk may be full
        raise TargetBundleError(f"{folder} cannot be written: {error.strerror or error}") from None
    except UnsupportedTarget as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TargetBundleError(f"{name}: {error}; run it with --engine torch") from None
    except BrokenWeights as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TargetBundleError(f"{name}: {error}") from None
    return open_target_bundle(folder)


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
    except (ValueError, KeyError, TypeError) as error:
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


def _write(
    name: str,
    source: Path,
    source_hash: str,
    folder: Path,
    max_positions: int,
    eos_ids: Sequence[int],
    done: Callable[[int, int], None],
) -> None:
    weights: Weights
    if source.is_dir():
        weights = SafetensorsWeights(source)
        config = TargetConfig.from_json(json.loads((source / "config.json").read_text()))
        for each in _TOKENIZER_FILES:
            if (source / each).is_file():
                shutil.copyfile(source / each, folder / each)
    else:
        weights = GgufWeights(source)
        config = weights.config
        eos_ids = weights.eos_ids
        write_tokenizer(weights, folder)
    positions = min(max_positions, config.max_position_embeddings)
    layers = config.num_hidden_layers
    with TableFile(folder) as tables:
        graph = TargetGraph(config, weights, positions, tables, lambda layer: done(layer, layers))
        onnx.save(graph.build(), folder / GRAPH_FILE)
    scales = [graph.value_scale(layer) for layer in range(layers)]
    (folder / INDEX_FILE).unlink()
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of([path])[0]}
        for path in sorted(folder.iterdir())
        if path.name in (*_TOKENIZER_FILES, GRAPH_FILE, DATA_FILE)
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "source_hash": source_hash,
        "config": asdict(config),
        "value_scales": scales,
        "max_positions": positions,
        "eos_ids": list(eos_ids),
        "files": files,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
