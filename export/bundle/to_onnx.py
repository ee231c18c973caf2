"""Write the device half as an ONNX file that stock ONNX Runtime opens. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from export.bundle.blocks import Profile
from export.bundle.drafter_graph import FLOAT_ACTIVATIONS, INT8_ACTIVATIONS, Arrays, DrafterGraph
from outrider_core.drafting.engines.onnx import OnnxEngine
from outrider_core.models.moa_config import MoAConfig
from outrider_core.targets.builder import OPSET

#: tensors of at least this many bytes are stored in a separate file, which ONNX Runtime maps into memory: embedding
#: rows that no text needs then cost nothing. Smaller ones are read instead, and freed once packed
DATA_FROM = 1 << 21
#: their alignment in it, so that they can be mapped
ALIGNMENT = 4096


class LargeTensors:
    """Writes tensors of `DATA_FROM` bytes and more to the file `path`, which exists only if there are any.

    Use it as a context manager.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def __enter__(self) -> LargeTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._path.unlink(missing_ok=True)

    def tensor(self, name: str, make: Callable[[], NDArray[Any]]) -> onnx.TensorProto:
        """See `outrider_core.targets.builder.Tables`."""
        array = np.ascontiguousarray(make())
        if array.nbytes < DATA_FROM:
            return numpy_helper.from_array(array, name)
        with self._path.open("ab") as file:
            file.write(bytes(-file.tell() % ALIGNMENT))
            offset = file.tell()
            file.write(array.data)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        proto = onnx.TensorProto(name=name, data_type=kind, dims=array.shape, data_location=onnx.TensorProto.EXTERNAL)
        for key, value in (("location", self._path.name), ("offset", offset), ("length", array.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        return proto


def write_onnx(
    config: MoAConfig, tensors: Arrays, profile: Profile, path: Path, metadata: dict[str, str]
) -> dict[str, Any]:
    """Write a drafter's device half in `profile` to `path`, with `metadata` among the model's properties.

    tensors: see `DrafterGraph`. Large weights go to `data_file(path)`. Returns {"opset": n, "operators": {name: nodes}}
    with the number of nodes.
    """
    with LargeTensors(data_file(path)) as large:
        model = DrafterGraph(config, tensors, profile, large).build()
        helper.set_model_props(model, metadata)
        onnx.save(model, path)
    return {"opset": OPSET, "operators": dict(Counter(node.op_type for node in model.graph.node).most_common())}


def data_file(path: Path) -> Path:
    """Return the file with the large tensors of the ONNX file at `path`; it does not exist if there are none."""
    return path.with_name(f"{path.name}.data")


def accuracy_levels(path: Path) -> Iterator[tuple[int, OnnxEngine]]:
    """Open the quantised file at `path` with int8 and with float32 activations: (accuracy_level, engine)."""
    yield INT8_ACTIVATIONS, OnnxEngine(path)
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = FLOAT_ACTIVATIONS
    other = path.with_name(f".level{FLOAT_ACTIVATIONS}-{path.name}")  # beside it: both read the same weights
    try:
        onnx.save(model, other)
        yield FLOAT_ACTIVATIONS, OnnxEngine(other)
    finally:
        other.unlink(missing_ok=True)
