"""Read the header of a GGUF file: metadata and the places of its tensors. No torch, and nothing large is read."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.config import BrokenTarget, UnsupportedTarget

MAGIC = b"GGUF"
#: value types of metadata -> how `struct` and numpy read them
_SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
#: bounds of a header: far above any model's, and below what would fill the memory
_MOST_FIELDS, _MOST_TENSORS, _MOST_DIMENSIONS = 65_536, 1 << 20, 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's entry. shape: [outputs, inputs] or [outputs]. kind: ggml's format number. offset: in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """An open GGUF file. fields: metadata by name, numbers as int, float or bool, arrays as lists. tensors: by name.

    Raises BrokenTarget if the file does not match its header, UnsupportedTarget for a part of a split file and for a
    big-endian one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except (BrokenTarget, UnsupportedTarget):
            raise
        except (ValueError, struct.error, IndexError, OverflowError, OSError) as error:
            raise BrokenTarget(f"{path}: not a GGUF file, or damaged: {error}") from None
        finally:
            self.__dict__.pop("_data", None)

    @cached_property
    def _data(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _read(self) -> None:
        self._at = 4
        if self._data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version and version & 0xFFFF == 0:
            raise UnsupportedTarget("a big-endian GGUF file is not supported; convert it with gguf_convert_endian.py")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are read")
        tensors, fields = self._number("Q"), self._number("Q")
        if fields > _MOST_FIELDS or tensors > _MOST_TENSORS:
            raise ValueError(f"{fields} fields and {tensors} tensors")
        for _ in range(fields):
            name = self._text()
            if name in self.fields:
                raise ValueError(f"{name} occurs twice")
            self.fields[name] = self._value(self._number("I"))
        if self.fields.get("split.count", 1) not in (0, 1):
            raise UnsupportedTarget("this is one part of a split GGUF file; join them with llama-gguf-split --merge")
        found = [self._tensor() for _ in range(tensors)]
        alignment = self.fields.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"{_ALIGNMENT} {alignment}")
        begin = offset = -(-self._at // alignment) * alignment
        for tensor in found:
            if tensor.name in self.tensors:
                raise ValueError(f"tensor {tensor.name} occurs twice")
            if begin + tensor.offset != offset:
                raise ValueError(f"tensor {tensor.name} does not directly follow the one before it")
            self.tensors[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.kind, offset)
            end = offset + _stored_bytes(tensor)
            if end > len(self._data):
                raise ValueError(f"tensor {tensor.name} is cut short; download the file again")
            offset = -(-end // alignment) * alignment

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError("it is cut short")
        self._at += size
        return self._data[self._at - size : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(_scalar(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return self._texts(count)
        code = np.dtype(f"<{_scalar(kind)}")
        return np.frombuffer(self._take(count * code.itemsize), code).tolist()

    def _texts(self, count: int) -> list[str]:
        """Read `count` strings; there may be hundreds of thousands."""
        data, at, texts, length = self._data, self._at, list[str](), struct.Struct("<Q")
        for _ in range(count):
            begin = at + length.size
            at = begin + length.unpack_from(data, at)[0]
            if at > len(data):
                raise ValueError("it is cut short")
            texts.append(data[begin:at].decode())
        self._at = at
        return texts

    def _tensor(self) -> GgufTensor:
        name, dimensions = self._text(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = [self._number("Q") for _ in range(dimensions)]
        if math.prod(shape) > 1 << 48:
            raise ValueError(f"tensor {name} has the shape {shape}")
        return GgufTensor(name, tuple(reversed(shape)), self._number("I"), self._number("Q"))

    def values(self, name: str, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Return rows of a tensor, dequantised. Raises UnsupportedTarget."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        if not (count := math.prod(tensor.shape)):
            return np.empty(tensor.shape, np.float32)[rows]
        kind, row = GGMLQuantizationType(tensor.kind), tensor.shape[-1] if tensor.shape else 1
        shape = count // row, _stored_bytes(tensor) * row // count
        raw = np.memmap(self.path, np.uint8, "r", tensor.offset, shape)
        try:
            if len(tensor.shape) == 2:
                return dequantize(raw[rows], kind).astype(np.float32)
            return dequantize(raw, kind).astype(np.float32).reshape(tensor.shape)[rows]
        except NotImplementedError:
            raise UnsupportedTarget(
                f"tensor {name} is stored as {kind.name}, which is not supported; take a file of another quantisation"
            ) from None


def _stored_bytes(tensor: GgufTensor) -> int:
    """Return the bytes of a tensor. Raises ValueError if its format is unknown or does not divide its rows."""
    per_block, block_bytes = _blocks().get(tensor.kind, (0, 0))
    if not per_block:
        raise ValueError(f"tensor {tensor.name} is stored in format {tensor.kind}, which is unknown")
    if (tensor.shape[-1] if tensor.shape else 1) % per_block:
        raise ValueError(f"tensor {tensor.name} of shape {list(tensor.shape)} does not go into blocks of {per_block}")
    return math.prod(tensor.shape) // per_block * block_bytes


@cache
def _blocks() -> dict[int, tuple[int, int]]:
    """Return (numbers of a block, its bytes) by the number of the format."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do, whatever its name is."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of the unknown type {kind}")
    return _SCALARS[kind]
