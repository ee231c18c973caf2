"""Make a target bundle: read a model's files, quantise them, write the graph. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx
from filelock import FileLock, Timeout

from outrider_core import durable
from outrider_core.cache import remember_sha256, sha256_of
from outrider_core.protocol.wire import MAX_TOKENS
from outrider_core.targets.bundle import (
    DATA_FILE,
    FORMAT_VERSION,
    GRAPH_FILE,
    MANIFEST_FILE,
    PRODUCTS_FILE,
    TargetBundle,
    TargetBundleError,
    open_target_bundle,
)
from outrider_core.targets.calibration import InputMoments, kept_texts, write_texts
from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.gguf_tokenizer import write_tokenizer
from outrider_core.targets.graph import TargetGraph
from outrider_core.targets.products import products_graph, rows_graph
from outrider_core.targets.source import TargetSource
from outrider_core.targets.tables import INDEX_FILE, TableFile
from outrider_core.targets.weights import GgufWeights, Weights, folder_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
#: subfolders of a bundle under way: the copy whose weights are rounded to nearest, and its answers
PLAIN_FOLDER, TEXTS_FILE = "plain", "texts.json"
#: what to do if a folder cannot be written
REMEDY = "free some space there, or name another folder with OUTRIDER_CACHE"


def make_target_bundle(
    source: TargetSource,
    folder: Path,
    max_positions: int = MAX_TOKENS,
    *,
    done: Callable[[int, int], None] = lambda step, steps: None,
    waiting: Callable[[], None] = lambda: None,
    calibrate: bool | None = None,
    bits: int = 8,
    remedy: str = REMEDY,
) -> TargetBundle:
    """Lower a model into `folder`, which appears once it is complete.

    Work under way lies beside it. An interrupted conversion resumes there (one that failed starts again). Among several
    processes one works and the others wait. done(step, steps): called after every step. waiting(): called if another
    process is at work. bits: of its weights, one of BITS. calibrate: make a first copy, let it write some answers, and
    round weights again by the inputs that its layers read then; otherwise to nearest; None: only 4 bits; never 32.
    remedy: what to do if the folder cannot be written. Raises TargetBundleError.
    """
    aside = folder.with_name(f".{folder.name}.{source.identity}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_name(f".{folder.name}.lock"), waiting):
            if not (folder / MANIFEST_FILE).is_file():
                aside.mkdir(exist_ok=True)
                lowering = _Lowering(source, max_positions, bits)
                if bits != 32 and (bits == 4 if calibrate is None else calibrate):
                    _write_calibrated(lowering, aside, done)
                else:
                    lowering.write(aside, done)
                shutil.rmtree(folder, ignore_errors=True)
                durable.put_in_place(aside, folder)
                written = json.loads((folder / MANIFEST_FILE).read_bytes())["files"][DATA_FILE]
                remember_sha256(folder / DATA_FILE, written["sha256"])
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # the disk may be full
        raise TargetBundleError(f"{folder} cannot be written: {error.strerror or error}; {remedy}") from None
    except UnsupportedTarget as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TargetBundleError(f"{source.name}: {error}") from None
    except BrokenTarget as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TargetBundleError(f"{source.name}: {error}") from None
    except TargetBundleError:  # an interrupted call left a damaged one
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return open_target_bundle(folder)


@contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; `waiting` is called once if another process holds it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_calibrated(lowering: _Lowering, folder: Path, done: Callable[[int, int], None]) -> None:
    """Write a first copy, its answers, and the final copy; each reports a third of the steps."""
    plain = folder / PLAIN_FOLDER
    if not _opens(plain):
        plain.mkdir(exist_ok=True)
        kind = lowering if lowering.bits == 8 else replace(lowering, bits=32)
        kind.write(plain, lambda step, steps: done(step, 3 * steps))
    first = open_target_bundle(plain)
    layers = first.config.num_hidden_layers

    def written(token: int, tokens: int) -> None:
        done(layers + layers * token // tokens, 3 * layers)

    texts = kept_texts(folder / TEXTS_FILE, lambda: write_texts(first, written))
    moments = InputMoments(first, texts)
    lowering.write(folder, lambda step, steps: done(2 * steps + step, 3 * steps), moments)
    (folder / TEXTS_FILE).unlink()
    shutil.rmtree(plain, ignore_errors=True)


def _opens(folder: Path) -> bool:
    """Return whether an earlier call has left a complete bundle there; a damaged one is removed."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    try:
        open_target_bundle(folder)
        return True
    except TargetBundleError:
        shutil.rmtree(folder)
        return False


@dataclass(frozen=True)
class _Lowering:
    """A model on its way to a target bundle; see make_target_bundle."""

    source: TargetSource
    max_positions: int
    bits: int

    def write(self, folder: Path, done: Callable[[int, int], None], moments: InputMoments | None = None) -> None:
        """Write a bundle's files into `folder`, its manifest last. moments: of an earlier copy's inputs."""
        weights, config, eos_ids = self._open(folder)
        positions = min(self.max_positions, config.max_position_embeddings)
        layers = config.num_hidden_layers
        with TableFile(folder) as tables:
            known = moments.of if moments else lambda name: None
            graph = TargetGraph(config, weights, positions, tables, lambda layer: done(layer, layers), known, self.bits)
            onnx.save(graph.build(), folder / GRAPH_FILE)
        remember_sha256(folder / DATA_FILE, tables.sha256)
        (folder / PRODUCTS_FILE).write_bytes(products_graph() if self.bits == 8 else rows_graph(self.bits))
        scales = [graph.value_scale(layer) for layer in range(layers)]
        (folder / INDEX_FILE).unlink()
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of([path])[0]}
            for path in sorted(folder.iterdir())
            if path.name in (*_TOKENIZER_FILES, GRAPH_FILE, DATA_FILE, PRODUCTS_FILE)
        }
        manifest = {
            "format_version": FORMAT_VERSION,
            "name": self.source.shown_name,
            "source_hash": self.source.identity,
            "bits": self.bits,
            "config": asdict(config),
            "value_scales": scales,
            "max_positions": positions,
            "eos_ids": list(eos_ids),
            "calibrated": moments is not None,
            "files": files,
        }
        durable.write(folder / MANIFEST_FILE, json.dumps(manifest, indent=2) + "\n")

    def _open(self, folder: Path) -> tuple[Weights, TargetConfig, Sequence[int]]:
        """Return weights, shapes and the ids that end an answer; put the tokenizer's files into `folder`."""
        path = self.source.path
        if path.is_dir():
            for name in _TOKENIZER_FILES:
                if (path / name).is_file():
                    shutil.copyfile(path / name, folder / name)
            return *folder_weights(path), self.source.eos_ids
        weights = GgufWeights(path)
        write_tokenizer(weights.fields, folder)
        return weights, weights.config, weights.eos_ids
