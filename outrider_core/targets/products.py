"""Which of a bundle's graphs this machine computes exactly: not every processor adds products of bytes exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.config import UnsupportedTarget

#: rows of the activations in the products that are tried: engines take different kernels for few and for many
ROWS = (1, 9, 150)
#: of the table that is tried
SHAPE = (256, 96)


def usable_graph(bundle: TargetBundle) -> Path:
    """The graph of `bundle` for this machine: the one with signed tables where that is exact, as it is faster.

    Raises UnsupportedTarget where neither is.
    """
    signed = choose(lambda: bundle.products.read_bytes(), lambda: bundle.unsigned_products.read_bytes())
    return bundle.graph if signed else bundle.unsigned_graph


def choose(signed: Callable[[], bytes], unsigned: Callable[[], bytes]) -> bool:
    """Whether this machine is to take signed tables. Both read a `products_graph`.

    Raises UnsupportedTarget where its products are not exact with either.
    """
    if exact(signed()):
        return True
    if exact(unsigned()):
        return False
    raise UnsupportedTarget(
        "ONNX Runtime does not multiply bytes exactly on this processor, so the text would be wrong"
    )


@cache
def exact(graph: bytes) -> bool:
    """Whether the products of a `products_graph` with the largest and with random activations are exact here."""
    table = _table().astype(np.int64)
    random = np.random.default_rng(1).integers(0, 256, (max(ROWS), len(table)), np.uint8)
    return all(
        bool((multiply(graph, activations[:rows]) == activations[:rows].astype(np.int64) @ table).all())
        for activations in (np.full_like(random, 255), random)
        for rows in ROWS
    )


def multiply(graph: bytes, activations: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Activations uint8 [m, k] times the constant table of a `products_graph`, as a target graph does it; [m, n]."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    product: NDArray[np.int32] = session.run(None, {"activations": activations})[0]
    return product


def products_graph(table: NDArray[np.int8] | None = None, *, unsigned: bool = False) -> bytes:
    """The ONNX file of one product with `table` int8 [k, n], by default the one that `exact` wants.

    unsigned: the table is unsigned there, as in a bundle's second graph.
    """
    from onnx import TensorProto, helper, numpy_helper  # takes memory, and only who makes a bundle needs it

    from outrider_core.targets.graph import IR_VERSION, OPSET
    from outrider_core.targets.unsigned import with_unsigned_tables

    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["activations", "table"], ["product"])],
        "products",
        [helper.make_tensor_value_info("activations", TensorProto.UINT8, ["rows", None])],
        [helper.make_tensor_value_info("product", TensorProto.INT32, None)],
        [numpy_helper.from_array(_table() if table is None else table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes((with_unsigned_tables(model) if unsigned else model).SerializeToString())


def _table() -> NDArray[np.int8]:
    """Weights int8 [k, n]: in the first columns those whose products with the largest activations add up to most."""
    depth, width = SHAPE
    table = np.random.default_rng(0).integers(-128, 128, SHAPE, np.int8)
    table[:, : width // 2] = np.where(np.arange(depth) % 3, 127, -128)[:, None]
    return table
