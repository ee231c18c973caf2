"""A graph's twin with unsigned tables, for processors that add products of unsigned and signed bytes inexactly.

x86 processors without VNNI add two such products in 16 bits, which is too few for the largest ones. Products of
two unsigned bytes are added in 32 bits, exactly and somewhat more slowly. The twin reads the same table file: a signed
byte w is the unsigned byte w ^ 128 whose zero is 128, and the engine turns one into the other once, while it loads.
Every sum is the same integer, so logits are the same bits with either graph.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: in MatMulInteger and MatMulIntegerToFloat: which input is the table's zero point
_ZERO_POINT = {"MatMulInteger": 3, "MatMulIntegerToFloat": 5}
_SIGN, _SUFFIX = "table_zero", ".unsigned"


def with_unsigned_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` in which the constant int8 tables of integer products are uint8."""
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    graph = twin.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.op_type in _ZERO_POINT and tensors[node.input[1]].data_type == TensorProto.INT8:
            table = node.input[1]
            tensors[table].data_type = TensorProto.UINT8
            graph.node.append(helper.make_node("BitwiseXor", [table, _SIGN], [table + _SUFFIX]))
            absent = [""] * (_ZERO_POINT[node.op_type] - len(node.input))
            inputs = [node.input[0], table + _SUFFIX, *node.input[2:], *absent, _SIGN]
            del node.input[:]
            node.input.extend(inputs)
        graph.node.append(node)
    graph.initializer.append(numpy_helper.from_array(np.array(128, np.uint8), _SIGN))
    return twin
