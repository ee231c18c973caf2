"""A graph's large tensors in one file that grows as they are made, so that an interrupted conversion goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from outrider_core.targets.bundle import DATA_FILE

Array = NDArray[Any]
INDEX_FILE = "tables.jsonl"
#: tensors begin at multiples of this many bytes, so that they can be mapped into memory
ALIGNMENT = 4096


class TableFile:
    """Tensors by name in `folder`. Use it as a context manager.

    A tensor counts once its line in the index is there; whatever lies behind the last such tensor is overwritten.
    """

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        self._data = (folder / DATA_FILE).open("ab")
        written = self._data.tell()
        index = folder / INDEX_FILE
        kept = [line for line in _lines(index) if line["offset"] + line["length"] <= written]
        index.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._index = index.open("a")
        for line in kept:
            self._entries[line["name"]] = line
        self._data.truncate(max((line["offset"] + line["length"] for line in kept), default=0))
        self._data.seek(0, 2)

    def __enter__(self) -> TableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._data.close()
        self._index.close()

    def tensor(self, name: str, make: Callable[[], Array]) -> onnx.TensorProto:
        """A reference to tensor `name`, which `make` computes unless it is there."""
        entry = self._entries.get(name) or self._write(name, make())
        proto = onnx.TensorProto(name=name, data_type=entry["type"], dims=entry["shape"])
        proto.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", DATA_FILE), ("offset", entry["offset"]), ("length", entry["length"])):
            proto.external_data.add(key=key, value=str(value))
        return proto

    def _write(self, name: str, array: Array) -> dict[str, Any]:
        self._data.write(bytes(-self._data.tell() % ALIGNMENT))
        offset = self._data.tell()
        self._data.write(np.ascontiguousarray(array).data)
        self._data.flush()
        entry = {
            "name": name,
            "type": helper.np_dtype_to_tensor_dtype(array.dtype),
            "shape": list(array.shape),
            "offset": offset,
            "length": array.nbytes,
        }
        self._index.write(json.dumps(entry) + "\n")
        self._index.flush()
        self._entries[name] = entry
        return entry


def _lines(index: Path) -> list[dict[str, Any]]:
    """The index, up to a line that was cut short."""
    lines = list[dict[str, Any]]()
    if index.exists():
        for line in index.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    return lines
