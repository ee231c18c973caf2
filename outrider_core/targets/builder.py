"""Collect the nodes and tensors of an ONNX graph under construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

#: opset of the graph, and its version of the ONNX format
OPSET, IR_VERSION = 21, 10
#: domain of ONNX Runtime's own operators
MICROSOFT = "com.microsoft"


class Tables(Protocol):
    """Stores large tensors; see `outrider_core.targets.tables.TableFile`."""

    def tensor(self, name: str, make: Callable[[], NDArray[Any]]) -> onnx.TensorProto:
        """Return a reference to tensor `name`; `make` computes it unless it is stored already."""


class InlineTables:
    """Keeps tables in the graph's own file."""

    @staticmethod
    def tensor(name: str, make: Callable[[], NDArray[Any]]) -> onnx.TensorProto:
        """See Tables.tensor."""
        return numpy_helper.from_array(np.ascontiguousarray(make()), name)


@dataclass
class Builder:
    """Collects nodes and initialisers of a graph under construction. tables: stores the large ones."""

    tables: Tables
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: dict[str, onnx.TensorProto] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    _names: int = 0

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        """Add an initialiser, unless there is one of this name."""
        if name not in self.tensors:
            self.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def table(self, name: str, make: Callable[[], NDArray[Any]]) -> str:
        """Add a large initialiser, computed only if the table file lacks it."""
        if name not in self.tensors:
            self.tensors[name] = self.tables.tensor(name, make)
        return name

    def ints(self, *values: int) -> str:
        return self.constant("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def op(self, kind: str, *inputs: str, name: str = "", domain: str = "", **attributes: object) -> str:
        """Add a node with one output, named `name` or with a generated name."""
        return self.ops(kind, *inputs, names=[name or self.fresh()], domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, names: Sequence[str] | int, domain: str = "", **attributes: object
    ) -> list[str]:
        """Add a node with several outputs; the name "" stands for an output that is not needed."""
        outputs = [self.fresh() for _ in range(names)] if isinstance(names, int) else list(names)
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, domain=domain, **attributes))
        return outputs

    def model(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, list(self.tensors.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def fresh(self) -> str:
        """Return a name that no other output has."""
        self._names += 1
        return f"t{self._names}"
