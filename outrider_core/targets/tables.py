"""A graph's large tensors in one file that grows as they are made, so that an interrupted conversion can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from outrider_core import durable
from outrider_core.targets.bundle import DATA_FILE

Array = NDArray[Any]
INDEX_FILE = "tables.jsonl"
#: tensors begin at multiples of this many bytes, so that they can be mapped into memory
ALIGNMENT = 4096


class TableFile:
    """Tensors by name in `folder`. Use it as a context manager.

    A tensor counts once the index has its line and its bytes match; everything after the last such tensor is
    overwritten.
    """

    def __init__(self, folder: Path) -> None:
        self._data = (folder / DATA_FILE).open("a+b")
        index = folder / INDEX_FILE
        self._entries = {line["name"]: line for line in _whole(self._data, index)}
        durable.write(index, "".join(json.dumps(line) + "\n" for line in self._entries.values()))
        self._index = index.open("a")
        self._data.truncate(max((line["offset"] + line["length"] for line in self._entries.values()), default=0))
        self._data.seek(0)
        self._digest = hashlib.file_digest(self._data, "sha256")

    def __enter__(self) -> TableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._data.close()
        self._index.close()

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file so far, 64 hex digits."""
        return self._digest.hexdigest()

    def tensor(self, name: str, make: Callable[[], Array]) -> onnx.TensorProto:
        """Return a reference to tensor `name`; `make` computes it unless it is stored already."""
        entry = self._entries.get(name) or self._write(name, make())
        proto = onnx.TensorProto(name=name, data_type=entry["type"], dims=entry["shape"])
        proto.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", DATA_FILE), ("offset", entry["offset"]), ("length", entry["length"])):
            proto.external_data.add(key=key, value=str(value))
        return proto

    def _write(self, name: str, array: Array) -> dict[str, Any]:
        gap, values = bytes(-self._data.tell() % ALIGNMENT), np.ascontiguousarray(array).data
        offset = self._data.tell() + len(gap)
        for part in (gap, values):
            self._data.write(part)
            self._digest.update(part)
        durable.settle(self._data)
        entry = {
            "name": name,
            "type": helper.np_dtype_to_tensor_dtype(array.dtype),
            "shape": list(array.shape),
            "offset": offset,
            "length": array.nbytes,
            "sha256": hashlib.sha256(values).hexdigest(),
        }
        self._index.write(json.dumps(entry) + "\n")
        durable.settle(self._index)
        self._entries[name] = entry
        return entry


def _whole(data: IO[bytes], index: Path) -> Iterator[dict[str, Any]]:
    """Yield the index's lines up to one that is cut short or whose tensor is damaged; the rest is made again."""
    for line in index.read_bytes().splitlines() if index.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            return
        data.seek(entry["offset"])
        if hashlib.sha256(data.read(entry["length"])).hexdigest() != entry.get("sha256"):
            return
        yield entry
