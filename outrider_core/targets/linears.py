"""The number formats of a target graph: how weights are stored and multiplied, at 8 bits, 4 bits or in float32.

In each of them a row's result does not depend on the rows computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from outrider_core.targets.blocks import BLOCK, quantise4_blocks, quantise8_blocks
from outrider_core.targets.builder import MICROSOFT, Builder
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.quantise import ROWS_AT_ONCE, ZERO, as_bytes, quantise8
from outrider_core.targets.weights import Floats, Rows

#: statistics of a linear layer's inputs, by its name; see `quantise8`
Moments = Callable[[str], NDArray[np.float64] | None]
Weight = Callable[[], Floats | Rows]
Array = NDArray[Any]
#: outputs and inputs of a weight
Shape = tuple[int, int]

#: suffixes of a layer's input: the input itself; at 8 bits rounded (128 is zero), and each row's largest absolute value
#: (127)
INPUT, LARGEST = ".input", ".largest"
#: suffix of a linear layer's table [inputs, outputs], or [outputs, inputs] in float32
TABLE = ".table"
HEAD = "lm_head"
#: random inputs with which an 8-bit copy of a weight is compared with it, and by what share products may differ:
#: rounding changes them by a hundredth, and by a fifth where a single weight of a row outweighs all others
SAMPLES, MOST_OFF = 8, 0.5
#: least size of an embedding's largest number: below, the first layer's norm leaves inputs that are too small for the
#: integers to which values are rounded, as `rms_norm_eps` outweighs their squares
LEAST_EMBEDDING = 2**-10


class Linears(Protocol):
    """Embedding and linear layers of one number format.

    rotated: it needs inputs in coordinates where no channel stands out (`quantise.Rotation`).
    """

    rotated: ClassVar[bool]

    def embedding(self, name: str, ids: str, weight: Weight, shape: Shape) -> str:
        """Look up rows `ids` of weight [vocab, width], float32; may share the table of a linear layer of this name."""

    def product(self, name: str, x: str, weight: Weight, shape: Shape, output: str) -> str:
        """Multiply x [T, K] by the transpose of weight [N, K], which is only computed if its table is missing."""


def linears_of(bits: int, graph: Builder, moments: Moments) -> Linears:
    """Return the layers of 4, 8 or 32 bits."""
    if bits == 8:
        return RowIntegers(graph, moments)
    return BlockIntegers(graph, moments) if bits == 4 else SingleFloats(graph)


class RowIntegers:
    """8 bits: each row of the input is rounded to 8 bits by its own largest value, and integers are summed."""

    rotated: ClassVar[bool] = True

    def __init__(self, graph: Builder, moments: Moments) -> None:
        self._graph, self._moments = graph, moments

    def embedding(self, name: str, ids: str, weight: Weight, shape: Shape) -> str:
        """See Linears.embedding; its table is a separate float16 one."""
        table = self._graph.table("embedding", lambda: _halves(weight()))
        return self._graph.op("Cast", self._graph.op("Gather", table, ids), to=TensorProto.FLOAT)

    def product(self, name: str, x: str, weight: Weight, shape: Shape, output: str) -> str:
        """See Linears.product."""
        graph = self._graph
        quantised = cache(lambda: self._quantised(name, weight()))
        largest = graph.op("ReduceMax", graph.op("Abs", x), graph.ints(1), keepdims=1, name=name + LARGEST)
        step = graph.constant("activation_step", np.array(1 / 127, np.float32))
        zero = graph.constant("whole_zero", np.array(ZERO, np.uint8))
        product = graph.op(
            "MatMulIntegerToFloat",
            graph.op("QuantizeLinear", graph.op("Div", x, largest), step, zero, name=name + INPUT),
            graph.table(name + TABLE, lambda: quantised()[0]),
            step,
            graph.table(f"{name}.scales", lambda: quantised()[1]),
            zero,
            zero,
            domain=MICROSOFT,
        )
        return graph.op("Mul", product, largest, name=output)

    def _quantised(self, name: str, weight: Floats | Rows) -> tuple[Array, Floats]:
        """Return the table [K, N] and its scales [N]. Raises UnsupportedTarget if their products are far off."""
        source = _Sampled(weight)
        table, scales = quantise8(source.rows, self._moments(name))
        stored = as_bytes(table).T
        if not (off := source.largest_error(stored, scales)) <= MOST_OFF:
            raise UnsupportedTarget(f"products of {name} at 8 bits are {off:.0%} off; export it at 32 bits")
        return stored, scales


class _Sampled:
    """A weight [N, K], and its products with a few random inputs, computed as `rows` are read."""

    def __init__(self, weight: Floats | Rows) -> None:
        self.rows = Rows(weight.shape, self._read)
        self._weight, self._products = weight, np.zeros((len(weight), SAMPLES), np.float32)
        self._inputs = np.random.default_rng(0).standard_normal((weight.shape[1], SAMPLES), np.float32)

    def _read(self, rows: slice) -> Floats:
        values = self._weight[rows]
        self._products[rows] = values @ self._inputs
        return values

    def largest_error(self, stored: Array, scales: Floats) -> float:
        """Return by what share of itself the product of a row differs most if `stored` [K, N] is multiplied instead."""
        errors, sizes = np.empty(len(scales)), np.linalg.norm(self._products, axis=1)
        for start in range(0, len(scales), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            values = (stored.T[rows] ^ np.uint8(ZERO)).view(np.int8).astype(np.float32)
            found = (values @ self._inputs) * scales[rows, None]
            errors[rows] = np.linalg.norm(found - self._products[rows], axis=1)
        return float((errors / (sizes + 1e-6 * sizes.max() + np.finfo(np.float32).tiny)).max())


def _halves(values: Floats | Rows) -> Array:
    """Convert to float16. Raises UnsupportedTarget for values that are too large or too small."""
    halves, error, largest = np.empty(values.shape, np.float16), 0.0, 0.0
    for start in range(0, len(values), ROWS_AT_ONCE):
        rows = values[start : start + ROWS_AT_ONCE]
        with np.errstate(over="ignore"):
            halves[start : start + len(rows)] = rows
        error = max(error, float(np.abs(halves[start : start + len(rows)] - rows).max()))
        largest = max(largest, float(np.abs(rows).max()))
    if not (error <= 1e-3 * largest and largest >= LEAST_EMBEDDING):
        raise UnsupportedTarget("its embeddings lie beyond the range of 16 bits; export it at 4 or 32 bits")
    return halves


class BlockIntegers:
    """4 bits, embedding and LM head 8, in blocks with their own scales; inputs are rounded to 8 bits block by block.

    Weights of 4 bits are unpacked to 8 while the graph is loaded: ONNX Runtime's own 4-bit kernels compute a row
    differently alone than beside others, and take longer for trees.
    """

    rotated: ClassVar[bool] = False

    def __init__(self, graph: Builder, moments: Moments) -> None:
        self._graph, self._moments = graph, moments
        self._scale_names = dict[str, str]()

    def embedding(self, name: str, ids: str, weight: Weight, shape: Shape) -> str:
        """See Linears.embedding."""
        graph = self._graph
        values, scales = self._bytes(name, weight)
        zero = graph.constant("byte_zero", np.array(ZERO, np.float32))
        rows = graph.op("Sub", graph.op("Cast", graph.op("Gather", values, ids), to=TensorProto.FLOAT), zero)
        scale = graph.op("Unsqueeze", graph.op("Gather", scales, ids), graph.ints(-1))
        rows = graph.op("Reshape", graph.op("Mul", rows, scale), graph.ints(0, -1))
        if shape[1] % BLOCK:
            rows = graph.op("Slice", rows, graph.ints(0), graph.ints(shape[1]), graph.ints(1))
        return rows

    def product(self, name: str, x: str, weight: Weight, shape: Shape, output: str) -> str:
        """See Linears.product."""
        table = self._bytes(name, weight) if name == HEAD else self._nibbles(name, weight)
        outputs, inputs = shape
        sizes = {"K": inputs, "N": outputs, "bits": 8, "block_size": BLOCK, "accuracy_level": 4}
        return self._graph.op("MatMulNBits", x, *table, name=output, domain=MICROSOFT, **sizes)

    def _bytes(self, name: str, weight: Weight) -> tuple[str, str]:
        """Return bytes [N, blocks, BLOCK] and scales [N, blocks] of an 8-bit table."""
        graph, quantised = self._graph, cache(lambda: quantise8_blocks(np.asarray(weight())))
        values = graph.table(name + TABLE, lambda: quantised()[0])
        return values, self._scales(name, lambda: quantised()[1], lambda: quantised()[2])

    def _nibbles(self, name: str, weight: Weight) -> tuple[str, str, str]:
        """Return the same for a 4-bit table, and its zero points.

        Nothing in it depends on an input, so ONNX Runtime computes it once. All of it is bytes, as intermediate results
        are only freed once the last table is unpacked.
        """
        graph, quantised = self._graph, cache(lambda: quantise4_blocks(np.asarray(weight()), self._moments(name)))
        packed = graph.table(name + TABLE, lambda: quantised()[0])
        zeros = graph.table(f"{name}.zeros", lambda: quantised()[1])
        scales = self._scales(name, lambda: quantised()[2], lambda: quantised()[3])
        lower, upper = (graph.constant(f"nibble_{mask}", np.array(mask, np.uint8)) for mask in (15, 240))
        three, one = (graph.constant(f"shift_{bits}", np.array(bits, np.uint8)) for bits in (3, 1))
        # bytes from one level to the next
        first = graph.op("BitShift", graph.op("BitwiseAnd", packed, lower), three, direction="LEFT")
        second = graph.op("BitShift", graph.op("BitwiseAnd", packed, upper), one, direction="RIGHT")
        return graph.op("Concat", first, second, axis=-1), scales, zeros

    def _scales(self, name: str, halves: Callable[[], Array], factor: Callable[[], Array]) -> str:
        graph = self._graph
        if (found := self._scale_names.get(name)) is None:
            stored = graph.op("Cast", graph.table(f"{name}.scales", halves), to=TensorProto.FLOAT)
            found = graph.op("Mul", stored, graph.table(f"{name}.factor", factor))
            self._scale_names[name] = found
        return found


class SingleFloats:
    """float32, provided that the order in which products are summed does not depend on the rows: see `products`."""

    rotated: ClassVar[bool] = False

    def __init__(self, graph: Builder) -> None:
        self._graph = graph

    def embedding(self, name: str, ids: str, weight: Weight, shape: Shape) -> str:
        """See Linears.embedding."""
        return self._graph.op("Gather", self._graph.table(name + TABLE, lambda: np.asarray(weight())), ids)

    def product(self, name: str, x: str, weight: Weight, shape: Shape, output: str) -> str:
        """See Linears.product."""
        table = self._graph.table(name + TABLE, lambda: np.asarray(weight()))
        return self._graph.op("FusedMatMul", x, table, name=output, domain=MICROSOFT, transB=1)
