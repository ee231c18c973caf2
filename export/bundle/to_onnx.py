"""Lower the device half to an ONNX file that stock ONNX Runtime opens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass
from onnxscript import values

from export.bundle.quant import Profile, rebuild
from export.bundle.steps import example_inputs
from outrider_core.drafting.engines import INPUTS, OUTPUTS
from outrider_core.drafting.engines.onnx import OnnxEngine
from outrider_core.models.moa import DeviceHalf

OPSET = 20
#: what MatMulNBits computes in: 4 = int8 activations, with one scale per block; 1 = float32, which unpacks the
#: weights first and is several times slower. `export bundle` reports the argmax flips of both.
INT8_ACTIVATIONS = 4
FLOAT_ACTIVATIONS = 1
#: tensors of at least this many bytes stand in a file of their own, which ONNX Runtime maps into memory: the rows of
#: an embedding that no text needs then cost nothing. Smaller ones are better read: once packed, they are freed.
DATA_FROM = 1 << 20

_INTEGERS = ("K", "N", "bits", "block_size", "accuracy_level")
#: the part of ONNX Runtime's operator that is used here; the exporter wants a schema
_MATMUL_NBITS = onnx.defs.OpSchema(
    "MatMulNBits", "com.microsoft", 1,
    inputs=[onnx.defs.OpSchema.FormalParameter(name, kind) for name, kind in
            (("A", "T1"), ("B", "tensor(uint8)"), ("scales", "T1"))],
    outputs=[onnx.defs.OpSchema.FormalParameter("Y", "T1")],
    type_constraints=[("T1", ["tensor(float)", "tensor(float16)"], "")],
    attributes=[onnx.defs.OpSchema.Attribute(name, onnx.defs.OpSchema.AttrType.INT) for name in _INTEGERS],
)  # fmt: skip


def _matmul_nbits(accuracy_level: int) -> Callable[..., Any]:
    op = values.Op(values.Opset("com.microsoft", 1), "MatMulNBits", _MATMUL_NBITS)

    def translate(x: Any, packed: Any, scales: Any, inputs: int, bits: int, block: int) -> Any:
        return op(
            x, packed, scales, K=inputs, N=int(packed.shape[0]), bits=bits, block_size=block,
            accuracy_level=accuracy_level,
        )  # fmt: skip

    return translate


def write_onnx(
    half: DeviceHalf, profile: Profile, path: Path, metadata: dict[str, str], accuracy_level: int = INT8_ACTIVATIONS
) -> dict[str, Any]:
    """Write `half` in `profile` to `path`, with `metadata` among the model's properties.

    Large weights go to `data_file(path)`. Returns {"opset": n, "operators": {name: nodes}}.
    """
    width, past, rows, wanted = (torch.export.Dim(name) for name in ("width", "past", "rows", "wanted"))
    shapes = (
        {0: width}, {0: width}, {0: wanted}, {0: width, 1: torch.export.Dim.AUTO}, {0: past}, {0: past}, {0: rows},
        {0: rows},
    )  # fmt: skip
    inputs = list(example_inputs(half.config, 5, 7, 9))
    inputs[2] = torch.tensor([0, 2, 4])
    program = torch.onnx.export(
        rebuild(half, profile), tuple(inputs), input_names=list(INPUTS), output_names=list(OUTPUTS),
        opset_version=OPSET, dynamo=True, dynamic_shapes=shapes, verbose=False, optimize=True,
        custom_translation_table={torch.ops.outrider.matmul_nbits.default: _matmul_nbits(accuracy_level)},
    )  # fmt: skip
    assert program is not None
    model = program.model
    DeduplicateInitializersPass()(model)
    model.metadata_props.update(metadata)
    for node in model.graph:
        node.metadata_props.clear()  # stack traces, with the folders of this machine
    sizes = [value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None]
    data = data_file(path).name if max(sizes) >= DATA_FROM else None
    onnx_ir.save(model, path, external_data=data, size_threshold_bytes=DATA_FROM)
    onnx.checker.check_model(str(path))
    return {"opset": OPSET, "operators": dict(Counter(node.op_type for node in model.graph).most_common())}


def data_file(path: Path) -> Path:
    """Where the large tensors of the ONNX file at `path` stand; not there if it has none."""
    return path.with_name(f"{path.name}.data")


def accuracy_levels(path: Path) -> Iterator[tuple[int, OnnxEngine]]:
    """The quantised file at `path` with int8 and with float32 activations: (accuracy_level, engine)."""
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
