"""Whether this machine adds 8-bit products exactly."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.graph import IR_VERSION, OPSET


@cache
def check_products() -> None:
    """Raise UnsupportedTarget where ONNX Runtime's kernels for unsigned times signed bytes saturate.

    x86 processors without VNNI add two products in 16 bits, which is too few for the largest ones: logits would be
    wrong, if by little.
    """
    a = np.full((9, 64), 255, np.uint8)
    b = np.where(np.arange(64)[:, None] % 3, 127, -128).astype(np.int8) * np.ones((1, 48), np.int8)
    if not (multiply(a, b) == a.astype(np.int64) @ b.astype(np.int64)).all():
        raise UnsupportedTarget(
            "this processor adds 8-bit products with too few bits (it lacks VNNI), so the 8-bit engine would be wrong "
            "here; use --engine torch"
        )


def multiply(a: NDArray[np.uint8], b: NDArray[np.int8]) -> NDArray[np.int32]:
    """a uint8 [m, k] times a constant b int8 [k, n], as a target graph does it; int32 [m, n]."""
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["product"])],
        "products",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, a.shape)],
        [helper.make_tensor_value_info("product", TensorProto.INT32, None)],
        [numpy_helper.from_array(b, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    product: NDArray[np.int32] = session.run(None, {"a": a})[0]
    return product
