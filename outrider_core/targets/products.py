"""Check that this machine's kernels compute what a target graph relies on."""

from __future__ import annotations

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.quantise import ZERO, as_bytes

#: numbers of rows in the products that are tried: kernels differ for few and for many
ROWS, MANY_ROWS = 9, 150
#: shape of the weights if they are not integers: large enough that kernels work in blocks of both axes
PROBE_SHAPE = (160, 288)


def open_session(graph: str | bytes, threads: int = 0) -> onnxruntime.InferenceSession:
    """Open an ONNX file, or its bytes, on the CPU. threads: 0: all cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    # While it opens, ONNX Runtime would search all free buffers for one to reuse, for a second or two, and find none,
    # as shapes are open. Without the search, buffers come from the arena: as fast, and no larger
    options.enable_mem_reuse = False
    # a graph is stored ready to run: looking for more fusions takes a quarter of the opening and finds nothing
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # threads that wait for each other within a run spin; between runs others need the cores
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def check_products(graph: bytes) -> None:
    """Raise UnsupportedTarget if products would be wrong, or a row's result depended on the rows beside it.

    graph: a `products_graph` or `rows_graph`.
    """
    session = open_session(graph)
    if session.get_inputs()[0].type == "tensor(uint8)":
        table = _table().astype(np.int64)
        mixed = np.random.default_rng(1).integers(0, 256, (MANY_ROWS, len(table)), np.uint8)
        for tried in (np.full_like(mixed, 255), mixed):
            for count in (1, ROWS, MANY_ROWS):
                if not (_run(session, tried[:count]) == tried[:count].astype(np.int64) @ table).all():
                    raise UnsupportedTarget("products of bytes are not exact on this processor: logits would be wrong")
        return
    rows = np.random.default_rng(1).standard_normal((4 * ROWS, PROBE_SHAPE[1]), np.float32)
    alone = np.concatenate([_run(session, row[None]) for row in rows])
    if any((_run(session, rows[:count]) != alone[:count]).any() for count in (2, 3, 4, 5, ROWS, 17, len(rows))):
        raise UnsupportedTarget(
            "on this processor a row of a product depends on the rows beside it, so trees would not be exact; "
            "use a target bundle of 8 bits"
        )


def _run(session: onnxruntime.InferenceSession, activations: NDArray[np.generic]) -> NDArray[np.generic]:
    product: NDArray[np.generic] = session.run(None, {"activations": activations})[0]
    return product


def products_graph(table: NDArray[np.int8] | None = None) -> bytes:
    """Return the ONNX file of one 8-bit product with `table` int8 [k, n], by default the one for `check_products`."""
    from onnx import TensorProto, helper, numpy_helper  # imported only here, as it takes memory

    from outrider_core.targets.builder import IR_VERSION, OPSET

    weights = as_bytes(_table() if table is None else table)
    zeros = [numpy_helper.from_array(np.array(value, np.uint8), f"zero_{value}") for value in (0, ZERO)]
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["activations", "table", *(zero.name for zero in zeros)], ["product"])],
        "products",
        [helper.make_tensor_value_info("activations", TensorProto.UINT8, ["rows", None])],
        [helper.make_tensor_value_info("product", TensorProto.INT32, None)],
        [numpy_helper.from_array(weights, "table"), *zeros],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes(model.SerializeToString())


def rows_graph(bits: int) -> bytes:
    """Return the ONNX file of one linear layer with 4 or 32 bits, on sample weights."""
    from onnx import TensorProto

    from outrider_core.targets.builder import Builder, InlineTables
    from outrider_core.targets.linears import linears_of

    graph, weight = Builder(InlineTables()), np.random.default_rng(0).standard_normal(PROBE_SHAPE, np.float32)
    x = graph.input("activations", TensorProto.FLOAT, ["rows", PROBE_SHAPE[1]])
    graph.output("product", TensorProto.FLOAT, ["rows", PROBE_SHAPE[0]])
    linears_of(bits, graph, lambda name: None).product("probe", x, lambda: weight, PROBE_SHAPE, "product")
    return bytes(graph.model("rows").SerializeToString())


def _table() -> NDArray[np.int8]:
    """Return the weights int8 [64, 48] whose products with the largest activations have the largest sums."""
    return np.where(np.arange(64)[:, None] % 3, 127, -128).astype(np.int8) * np.ones((1, 48), np.int8)
