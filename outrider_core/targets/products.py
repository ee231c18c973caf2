"""Whether this machine adds 8-bit products exactly."""

from __future__ import annotations

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from outrider_core.targets.config import UnsupportedTarget

#: rows of the activations in the product that is tried
ROWS = 9


def check_products(graph: bytes) -> None:
    """Raise UnsupportedTarget where ONNX Runtime's kernels for unsigned times signed bytes saturate.

    x86 processors without VNNI add two products in 16 bits, which is too few for the largest ones: logits would be
    wrong, if by little. graph: a `products_graph`.
    """
    largest = np.full((ROWS, len(_table())), 255, np.uint8)
    if not (multiply(graph, largest) == largest.astype(np.int64) @ _table().astype(np.int64)).all():
        raise UnsupportedTarget(
            "this processor adds 8-bit products with too few bits (it lacks VNNI), so the 8-bit engine would be wrong"
        )


def multiply(graph: bytes, activations: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Activations uint8 [m, k] times the constant table of a `products_graph`, as a target graph does it; [m, n]."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    product: NDArray[np.int32] = session.run(None, {"activations": activations})[0]
    return product


def products_graph(table: NDArray[np.int8] | None = None) -> bytes:
    """The ONNX file of one product with `table` int8 [k, n], by default the one that `check_products` wants."""
    from onnx import TensorProto, helper, numpy_helper  # takes memory, and only who makes a bundle needs it

    from outrider_core.targets.graph import IR_VERSION, OPSET

    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["activations", "table"], ["product"])],
        "products",
        [helper.make_tensor_value_info("activations", TensorProto.UINT8, ["rows", None])],
        [helper.make_tensor_value_info("product", TensorProto.INT32, None)],
        [numpy_helper.from_array(_table() if table is None else table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes(model.SerializeToString())


def _table() -> NDArray[np.int8]:
    """Weights whose products with the largest activations add up to most: int8 [64, 48]."""
    return np.where(np.arange(64)[:, None] % 3, 127, -128).astype(np.int8) * np.ones((1, 48), np.int8)
