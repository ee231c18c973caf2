"""A model's weights as float32 arrays, one at a time, from safetensors files or a GGUF file. No torch.

Names are those of `transformers`, without the leading "model." of decoder tensors: "embed_tokens", "norm", "lm_head",
"layers.3.self_attn.q_proj", ... ; a bias is named with the suffix ".bias".
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.families import FAMILIES, Family
from outrider_core.targets.gguf_config import gguf_config, gguf_name, gguf_values, rope_tensors
from outrider_core.targets.gguf_file import GgufFile
from outrider_core.targets.gguf_tokenizer import gguf_ends
from outrider_core.targets.quantised import Quantisation, float8_values

Floats = NDArray[np.float32]
ALL = slice(None)


class Weights(Protocol):
    """A source of tensors."""

    def read(self, name: str, rows: slice = ALL) -> Floats:
        """Return tensor `name` in float32, in its shape in TargetConfig.tensors; `rows` of embedding and LM head.

        Raises BrokenTarget, also for NaN and infinite values.
        """


@dataclass(frozen=True)
class Rows:
    """A large matrix that is read a few rows at a time. part: reads rows. NumPy converts it to an array, whole."""

    shape: tuple[int, int]
    part: Callable[[slice], Floats]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Floats:
        return self.part(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        return self.part(ALL)


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in a file: rows begin..end-1 of the stored tensor `name`."""

    name: str
    begin: int
    end: int

    def rows(self, part: slice) -> slice:
        """Convert a slice of its own rows to rows of the stored tensor."""
        chosen = range(self.begin, self.end)[part]
        return slice(chosen.start, chosen.stop)


class _Places:
    """The places of a model's tensors. called: maps a name of TargetConfig.tensors to the name in the files."""

    def __init__(self, config: TargetConfig, called: Callable[[str], str]) -> None:
        self.of, self.shapes = dict[str, _Place](), dict[str, tuple[int, ...]]()
        for name, (rows, *rest) in config.tensors().items():
            stored = called(name)
            begin = self.shapes.get(stored, (0,))[0]
            self.of[name] = _Place(stored, begin, begin + rows)
            self.shapes[stored] = (begin + rows, *rest)


class SafetensorsWeights:
    """The tensors of a model folder's safetensors files, mapped into memory and converted when read.

    Raises BrokenTarget if the files lack a tensor of `config` or hold it in another shape, UnsupportedTarget if they
    hold one that such a model does not have.
    """

    def __init__(self, folder: Path, config: TargetConfig, quantisation: Quantisation | None = None) -> None:
        self._folder, self._family, self._quantisation = folder, FAMILIES[config.family], quantisation
        self._entries, extra = _safetensors_entries(folder)
        self._places = _Places(config, lambda name: _stored(name, self._family))
        parts = {name: self._parts(name) for name in self._places.shapes}
        plain = {name: shape for name, shape in self._places.shapes.items() if not parts[name]}
        _check_shapes(folder, config, plain, {name: entry.shape for name, entry in self._entries.items()})
        used = {*plain, *(entry.name for each in parts.values() for entry in each.values())}
        unused = [name for name in self._entries if name not in used and not name.endswith(".rotary_emb.inv_freq")]
        if config.tie_word_embeddings and _HEAD in unused:
            _check_tied(folder, self._entries[self._places.of["embed_tokens"].name], self._entries[_HEAD])
            unused.remove(_HEAD)
        if unused or extra:
            name = (unused or extra)[0]
            raise UnsupportedTarget(f"it has a tensor {name}, which a model of type {config.family!r} does not have")

    def read(self, name: str, rows: slice = ALL) -> Floats:
        """See Weights.read."""
        place = self._places.of[name]
        values = _numbers(self._folder, name, np.ascontiguousarray(self._stored_rows(place.name, place.rows(rows))))
        return values + np.float32(self._family.gain_offset) if name.endswith("norm") else values

    def _stored_rows(self, stored: str, rows: slice) -> Floats:
        """Return rows of the tensor stored under a name; a quantised one is decoded whole."""
        if not (parts := self._parts(stored)) or self._quantisation is None:
            return self._entries[stored].values(rows)
        values = self._decoded(stored, parts, self._quantisation)
        if values.shape != self._places.shapes[stored]:
            raise BrokenTarget(f"{self._folder}: tensors of {stored} make one of the shape {list(values.shape)}")
        return values[rows]

    def _decoded(self, stored: str, parts: Mapping[str, _Entry], quantisation: Quantisation) -> Floats:
        try:
            return quantisation.decode({part: entry.raw() for part, entry in parts.items()}, quantisation.options)
        except (ValueError, IndexError, ArithmeticError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BrokenTarget | UnsupportedTarget):
                raise
            raise BrokenTarget(f"{self._folder}: what {stored} is made of does not fit together: {error}") from None

    def _parts(self, stored: str) -> dict[str, _Entry]:
        """Return the parts of a quantised tensor by the ends of their names; none if it is not quantised."""
        if self._quantisation is None or not stored.endswith(".weight"):
            return {}
        base, kinds = stored.removesuffix("weight"), self._quantisation
        found = {part: self._entries.get(f"{base}{part}") for part in (*kinds.needed, *kinds.optional)}
        parts = {part: entry for part, entry in found.items() if entry is not None}
        return parts if len(parts) > 1 and set(kinds.needed) <= set(parts) else {}


#: types of a safetensors file, and the numpy type to read them
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "I32": "<i4", "U32": "<u4",
}  # fmt: skip
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class _Entry:
    """A tensor in a safetensors file; `begin` counts from the file's first byte."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def raw(self, rows: slice = ALL) -> NDArray[Any]:
        """Return its numbers, with those of BF16 and FP8 in float32."""
        count = math.prod(self.shape)
        if self.dtype not in DTYPES:
            raise UnsupportedTarget(f"tensor {self.name} is stored as {self.dtype}, which is not supported")
        kind = np.dtype(DTYPES[self.dtype])
        raw: NDArray[Any] = np.memmap(self.path, kind, "r", self.begin, (count,)) if count else np.empty(0, kind)
        raw = raw.reshape(self.shape)[rows] if self.shape else raw.reshape(())
        if self.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        elif self.dtype == "F8_E4M3":
            raw = float8_values()[raw]
        return raw

    def values(self, rows: slice = ALL) -> Floats:
        """Return its numbers in float32."""
        if self.dtype.startswith(("I", "U")):
            raise UnsupportedTarget(f"tensor {self.name} is stored as {self.dtype}, which is not supported")
        return self.raw(rows).astype(np.float32)


def write_safetensors(weights: Weights, own: Container[str], config: TargetConfig, path: Path) -> None:
    """Write a model in float32, tensor by tensor, as folders of its family have it.

    own: names that `weights` has; other tensors of `config` are biases, written as zeros.
    """
    family = FAMILIES[config.family]
    header, at = dict[str, Any](), 0
    for name, shape in _Places(config, lambda name: _stored(name, family)).shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in config.tensors().items():  # parts of one stored tensor come in the order of its rows
            values = weights.read(name) if name in own else np.zeros(shape, np.float32)
            if name.endswith("norm"):
                values = values - np.float32(family.gain_offset)
            file.write(np.ascontiguousarray(values, "<f4").data)


def _stored(name: str, family: Family) -> str:
    """Return a tensor's name in folders."""
    full = name if name.endswith(".bias") else f"{name}.weight"
    for part, stored in family.stored.items():
        full = full.replace(f".{part}.", f".{stored}.")
    return full if full == _HEAD else f"model.{full}"


def _check_shapes(
    path: Path, config: TargetConfig, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in wanted.items():
        if name not in found:
            raise BrokenTarget(f"{path}: there is no tensor {name}, which a model of type {config.family!r} has")
        if found[name] != shape:
            raise BrokenTarget(
                f"{path}: tensor {name} has the shape {list(found[name])}; by its configuration it is {list(shape)}"
            )


def _check_tied(folder: Path, embedding: _Entry, head: _Entry) -> None:
    """Raise UnsupportedTarget if a tied head is stored and differs from the embedding."""
    if embedding.shape != head.shape or not np.array_equal(embedding.values(), head.values()):
        raise UnsupportedTarget(
            f"{folder}: config.json ties the LM head to the embedding, but the weights hold another one; "
            "set tie_word_embeddings to false"
        )


def _numbers(path: Path, name: str, values: Floats) -> Floats:
    if not np.isfinite(values).all():
        raise BrokenTarget(f"{path}: tensor {name} holds values that are not numbers; download it again")
    return values


def _safetensors_entries(folder: Path) -> tuple[dict[str, _Entry], list[str]]:
    """Return (the tensors of a model by name, names of others in its files).

    The tensors come from model.safetensors, else from the files that the index names, else from all files.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return _safetensors_file(whole), []
    entries, extra = dict[str, _Entry](), list[str]()
    if not index.is_file():
        for path in sorted(folder.glob("*.safetensors")):
            found = _safetensors_file(path)
            if twice := found.keys() & entries:
                raise BrokenTarget(
                    f"{folder}: tensor {min(twice)} is in {entries[min(twice)].path.name} and in {path.name}; "
                    "remove the file that does not belong to the model"
                )
            entries |= found
        if not entries:
            raise BrokenTarget(f"{folder}: there are no *.safetensors files with tensors; download the model again")
        return entries, []
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {name: Path(place).name for name, place in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BrokenTarget(f"{index}: not an index of weights; download it again") from None
    for file in sorted(set(names.values())):
        if not (folder / file).is_file():
            raise BrokenTarget(f"{folder}: {file} is missing, which {index.name} names; download it again")
        for name, entry in _safetensors_file(folder / file).items():
            if names.get(name) == file:
                entries[name] = entry
            elif name not in names:
                extra.append(name)
    return entries, extra


def _safetensors_file(path: Path) -> dict[str, _Entry]:
    """Return its tensors by name. Raises BrokenTarget."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 0 < size <= 100_000_000:
                raise BrokenTarget(f"{path}: not a safetensors file; download it again")
            header, whole = json.loads(file.read(size)), os.fstat(file.fileno()).st_size
        entries, spans = dict[str, _Entry](), list[tuple[int, int]]()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            (begin, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
            numbers = (begin, end, *shape)
            if not all(isinstance(number, int) and 0 <= number < 1 << 48 for number in numbers):
                raise ValueError(f"tensor {name}")
            known = DTYPES.get(dtype)
            short = known and end - begin != math.prod(shape) * np.dtype(known).itemsize
            if short or 8 + size + end > whole:
                raise BrokenTarget(f"{path}: tensor {name} is cut short; download the file again")
            entries[name] = _Entry(path, name, str(dtype), shape, 8 + size + begin)
            spans.append((begin, end))
        spans.sort()
        if [begin for begin, _ in spans] != [0, *(end for _, end in spans)][: len(spans)]:
            raise ValueError("tensors overlap")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, BrokenTarget):
            raise
        raise BrokenTarget(f"{path}: its header is damaged; download it again") from None
    except OSError as error:
        raise BrokenTarget(f"{path} cannot be read: {error.strerror or error}; download it again") from None
    return entries


def stored_formats(folder: Path) -> Counter[str]:
    """Return how many numbers of a folder's safetensors files have each format. Raises BrokenTarget."""
    formats = Counter[str]()
    for entry in _safetensors_entries(folder)[0].values():
        formats[entry.dtype] += math.prod(entry.shape)
    return formats


def read_json(path: Path) -> Any:
    """Return the content of a model folder's JSON file. Raises BrokenTarget."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenTarget(f"{path} does not load: {error}; download it again") from None


def folder_weights(folder: Path) -> tuple[SafetensorsWeights, TargetConfig]:
    """Open a model folder's weights and shapes. Raises UnsupportedTarget and BrokenTarget."""
    values = read_json(folder / "config.json")
    config = TargetConfig.from_json(values)
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedTarget("it holds an adapter (adapter_config.json), which is not applied; merge it first")
    return SafetensorsWeights(folder, config, Quantisation.of(values)), config


class GgufWeights:
    """The tensors of a GGUF file, dequantised when read. Raises as SafetensorsWeights does."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.config = gguf_config(self._file)
        family = FAMILIES[self.config.family]
        self._places = _Places(self.config, lambda name: gguf_name(name, family))
        shapes = self._places.shapes
        _check_shapes(path, self.config, shapes, {name: each.shape for name, each in self._file.tensors.items()})
        if unused := self._file.tensors.keys() - shapes.keys() - set(rope_tensors(self._file)):
            raise UnsupportedTarget(f"it has a tensor {min(unused)}, which a {self.config.family} model does not have")

    @property
    def fields(self) -> Mapping[str, Any]:
        """The file's metadata."""
        return self._file.fields

    @property
    def values(self) -> dict[str, Any]:
        """Its values in the form of config.json."""
        return gguf_values(self._file)

    @property
    def eos_ids(self) -> list[int]:
        """Token ids that end an answer."""
        return gguf_ends(self.fields)

    @property
    def formats(self) -> Counter[str]:
        """How many numbers are stored in each format."""
        from gguf.constants import GGMLQuantizationType

        formats = Counter[str]()
        for tensor in self._file.tensors.values():
            formats[GGMLQuantizationType(tensor.kind).name] += math.prod(tensor.shape)
        return formats

    def read(self, name: str, rows: slice = ALL) -> Floats:
        """See Weights.read."""
        place = self._places.of[name]
        stored = self._file.values(place.name, place.rows(rows))
        values = _numbers(self._file.path, place.name, np.ascontiguousarray(stored))
        if FAMILIES[self.config.family].gguf_pairs and ".self_attn." in name:
            values = self._unpaired(name, values)
        return values

    def _unpaired(self, name: str, values: Floats) -> Floats:
        """Restore the order of query and key rows, which GGUF stores with rotary pairs side by side."""
        part = name.rpartition("self_attn.")[2].partition(".")[0]
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}.get(part)
        if heads is None:
            return values
        paired = values.reshape(heads, self.config.head_dim // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def open_weights(path: Path) -> tuple[Weights, TargetConfig]:
    """Open a model's weights and shapes, from its folder or GGUF file. Raises UnsupportedTarget and BrokenTarget."""
    if path.is_dir():
        return folder_weights(path)
    weights = GgufWeights(path)
    return weights, weights.config
