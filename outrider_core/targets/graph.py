"""Lower a target to one ONNX graph for every step shape, exact to the last bit.

A step computes T tokens of one session: any mixture of prompt, single tokens and tree nodes. Their keys and values go
into the session's blocks of the KV pool in place; each token attends to what its row of the mask allows.

**Why a token's logits do not depend on the step it is computed in.** Norms and rotary positions are
computed row by row. A linear layer rounds each row of its input to 8 bits by that row's own largest value and sums
integers, so other rows do not matter. A query-key score
sums over one head's width in one fixed order. What would break is the sum over the tokens attended to, whose
order and grouping depend on where their rows lie. So values and softmax weights are rounded to multiples of a power of
two, small enough that every partial sum of their products fits the 53 bits of a float64: then the sum is exact, and
the same in any order. The grid is finer than float32's own rounding would leave of such a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from outrider_core.targets.config import TargetConfig
from outrider_core.targets.quantise import Rotation, hadamard, hadamard_block, quantise8, rotate_blocks
from outrider_core.targets.tables import TableFile
from outrider_core.targets.weights import Floats, Weights

#: rows of the KV pool that lie together, head by head
POOL_BLOCK = 64
#: a softmax weight is a multiple of 2^-WEIGHT_BITS of the largest one
WEIGHT_BITS = 18
#: bits of a value's magnitude; with WEIGHT_BITS and 15 bits for 32,768 tokens they are the 53 of a float64
VALUE_BITS = 20
#: opset of the graph, and the intermediate representation that goes with it
OPSET, IR_VERSION = 21, 10
_MICROSOFT = "com.microsoft"


@dataclass
class Builder:
    """Collects nodes and initialisers of a graph under construction. tables: where the large ones go."""

    tables: TableFile
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: dict[str, onnx.TensorProto] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    _names: int = 0

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        """An initialiser; one of the same name is taken to be the same."""
        if name not in self.tensors:
            self.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def table(self, name: str, make: Callable[[], NDArray[Any]]) -> str:
        """A large initialiser, computed where the table file lacks it."""
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
        """A node with one output, which is called `name` or gets a name of its own."""
        return self.ops(kind, *inputs, names=[name or self.fresh()], domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, names: Sequence[str] | int, domain: str = "", **attributes: object
    ) -> list[str]:
        """A node with several outputs; the name "" stands for one that is not wanted."""
        outputs = [self.fresh() for _ in range(names)] if isinstance(names, int) else list(names)
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, domain=domain, **attributes))
        return outputs

    def model(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, list(self.tensors.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(_MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def fresh(self) -> str:
        """A name that no other output has."""
        self._names += 1
        return f"t{self._names}"


class TargetGraph:
    """Builds the graph of one target. `done` is told of every layer that is quantised, for a progress bar."""

    def __init__(
        self,
        config: TargetConfig,
        weights: Weights,
        max_context: int,
        tables: TableFile,
        done: Callable[[int], None] = lambda layer: None,
    ) -> None:
        self.config, self.weights, self.max_context, self.done = config, weights, max_context, done
        self.graph = Builder(tables)
        self._rotation = Rotation(config.hidden_size)

    def build(self) -> onnx.ModelProto:
        """The whole model.

        Inputs: ids int64 [T]; positions int64 [1, T]; mask float32 [blocks, 1, group * T, POOL_BLOCK] (0 or -inf; the
        tokens' rows again for each query head of a group); slots int64 [1, kv_heads, T, 3] (block, head and row of each
        new token); wanted int64 [R]; keys_<layer> float32 and values_<layer> float64 [blocks, kv_heads, POOL_BLOCK,
        head_dim].
        Outputs: logits float32 [R, vocab], and new_keys_<layer>, new_values_<layer>, to be bound to the inputs' own
        memory.
        """
        config, graph = self.config, self.graph
        ids = graph.input("ids", TensorProto.INT64, ["tokens"])
        graph.input("positions", TensorProto.INT64, [1, "tokens"])
        graph.input("mask", TensorProto.FLOAT, ["blocks", 1, "queries", POOL_BLOCK])
        graph.input("slots", TensorProto.INT64, [1, config.num_key_value_heads, "tokens", 3])
        wanted = graph.input("wanted", TensorProto.INT64, ["wanted"])
        cosines, sines = config.rope.tables(self.max_context, config.head_dim)
        graph.table("cosines", lambda: cosines)
        graph.table("sines", lambda: sines)

        def embedding() -> NDArray[np.float16]:
            return self._rotation.apply(self.weights.read("embed_tokens")).astype(np.float16)

        residual = graph.op("Gather", graph.table("embedding", embedding), ids)
        residual = graph.op("Cast", residual, to=TensorProto.FLOAT)
        graph.output("logits", TensorProto.FLOAT, ["wanted", config.vocab_size])
        ones = graph.constant("ones", np.ones(config.hidden_size, np.float32))
        normed = graph.op("SimplifiedLayerNormalization", residual, ones, epsilon=config.rms_norm_eps, axis=-1)
        for layer in range(config.num_hidden_layers):
            mixed = self._attention(layer, normed)
            normed, residual = self._add_and_norm(mixed, residual)
            normed, residual = self._add_and_norm(self._mlp(layer, normed), residual)
            self.done(layer)
        head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
        chosen = graph.op("Gather", normed, wanted)
        self._linear("lm_head", chosen, lambda: self._reading(self.weights.read(head), "norm"), output="logits")
        return graph.model("target")

    def _attention(self, layer: int, x: str) -> str:
        config, graph = self.config, self.graph
        heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        name = f"layers.{layer}.self_attn"
        exponent = self.value_exponent(layer)
        query_scale = np.float32(1.0 if config.head_norms else width**-0.5)

        def joined_rows(suffix: str) -> Floats:
            return np.concatenate(
                [
                    self.weights.read(f"{name}.q_proj{suffix}") * query_scale,
                    self.weights.read(f"{name}.k_proj{suffix}"),
                    self.weights.read(f"{name}.v_proj{suffix}") * np.float32(2.0**exponent),
                ]
            )

        bias = joined_rows(".bias") if config.attention_bias else None
        norm = f"layers.{layer}.input_layernorm"
        joined = self._linear(f"{name}.qkv", x, lambda: self._reading(joined_rows(""), norm), bias)
        by_head = graph.op("Reshape", joined, graph.ints(1, -1, heads + 2 * kv, width))
        by_head = graph.op("Transpose", by_head, perm=[0, 2, 1, 3])  # [1, heads, T, width]
        query_key, value = graph.ops("Split", by_head, graph.ints(heads + kv, kv), names=2, axis=1)
        if config.head_norms:
            query, key = graph.ops("Split", query_key, graph.ints(heads, kv), names=2, axis=1)
            query = self._norm(query, f"{name}.q_norm", width**-0.5)
            query_key = graph.op("Concat", query, self._norm(key, f"{name}.k_norm"), axis=1)
        query_key = graph.op("RotaryEmbedding", query_key, "positions", "cosines", "sines", domain=_MICROSOFT)
        query, key = graph.ops("Split", query_key, graph.ints(heads, kv), names=2, axis=1)
        query = graph.op("Reshape", query, graph.ints(1, kv, -1, width))
        value = graph.op("Cast", graph.op("Round", value), to=TensorProto.DOUBLE)
        keys = self._store(f"keys_{layer}", key, TensorProto.FLOAT)
        values = self._store(f"values_{layer}", value, TensorProto.DOUBLE)
        mixed = graph.op("Reshape", self._mix(query, keys, values), graph.ints(1, heads, -1, width))
        mixed = graph.op("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = graph.op("Reshape", mixed, graph.ints(-1, heads * width))

        def output() -> Floats:
            return self._writing(self.weights.read(f"{name}.o_proj") * np.float32(2.0**-exponent))

        return self._linear(f"{name}.o_proj", mixed, output, self._written_bias(f"{name}.o_proj", config.output_bias))

    def _store(self, name: str, fresh: str, kind: int) -> str:
        """Write the new tokens' rows into their slots of a pool. The output is bound to the input's own memory."""
        shape: list[int | str] = ["blocks", self.config.num_key_value_heads, POOL_BLOCK, self.config.head_dim]
        pool = self.graph.input(name, kind, shape)
        self.graph.output(f"new_{name}", kind, shape)
        return self.graph.op("ScatterND", pool, "slots", fresh, name=f"new_{name}")

    def _mix(self, query: str, keys: str, values: str) -> str:
        """Attention of query [1, kv, group * T, width] over the pool: weights and values are integers, sums exact."""
        graph = self.graph
        single = self.config.group == 1
        if single:  # a product of one row is summed in another order than one of several
            query = graph.op("Concat", query, query, axis=2)
        scores = graph.op("FusedMatMul", query, keys, domain=_MICROSOFT, transB=1)  # [blocks, kv, queries, rows]
        if single:
            scores, _ = graph.ops("Split", scores, names=2, axis=2, num_outputs=2)
        scores = graph.op("Add", scores, "mask")
        largest = graph.op("ReduceMax", scores, graph.ints(0, 3), keepdims=1)
        shift = graph.constant("weight_shift", np.array(WEIGHT_BITS * math.log(2), np.float32))
        shares = graph.op("Exp", graph.op("Sub", scores, graph.op("Sub", largest, shift)))
        shares = graph.op("Cast", graph.op("Round", shares), to=TensorProto.DOUBLE)
        total = graph.op("ReduceSum", shares, graph.ints(0, 3), keepdims=1)
        summed = graph.op("ReduceSum", graph.op("MatMul", shares, values), graph.ints(0), keepdims=1)
        return graph.op("Cast", graph.op("Div", summed, total), to=TensorProto.FLOAT)

    def value_exponent(self, layer: int) -> int:
        """The power of two by which a layer's values are multiplied before they are rounded to integers.

        A norm's output has a Euclidean length of at most sqrt(hidden_size) before its gains, which bounds every value;
        half as much again is left for what quantising the norm's output adds.
        """
        name = f"layers.{layer}.self_attn.v_proj"
        gains = self.weights.read(f"layers.{layer}.input_layernorm")
        lengths = np.linalg.norm(self.weights.read(name) * gains, axis=1) * math.sqrt(self.config.hidden_size)
        bias = np.abs(self.weights.read(f"{name}.bias")) if self.config.attention_bias else 0.0
        return math.floor(math.log2(2.0**VALUE_BITS / (1.5 * float(np.max(lengths + bias)))))

    def _mlp(self, layer: int, x: str) -> str:
        config, graph = self.config, self.graph
        name = f"layers.{layer}.mlp"

        def both(suffix: str) -> Floats:
            names = (f"{name}.gate_proj{suffix}", f"{name}.up_proj{suffix}")
            return np.concatenate([self.weights.read(each) for each in names])

        norm = f"layers.{layer}.post_attention_layernorm"
        bias = both(".bias") if config.mlp_bias else None
        joined = self._linear(f"{name}.gate_up", x, lambda: self._reading(both(""), norm), bias)
        gate, up = graph.ops("Split", joined, names=2, axis=-1, num_outputs=2)
        gated = graph.op("Mul", graph.op("QuickGelu", gate, domain=_MICROSOFT, alpha=1.0), up)  # SiLU(gate) * up
        block = hadamard_block(config.intermediate_size)
        if block > 1:
            matrix = graph.constant("hadamard", hadamard(block))
            turned = graph.op("MatMul", graph.op("Reshape", gated, graph.ints(-1, block)), matrix)
            gated = graph.op("Reshape", turned, graph.ints(-1, config.intermediate_size))

        def down() -> Floats:
            return rotate_blocks(self._writing(self.weights.read(f"{name}.down_proj")), block)

        return self._linear(f"{name}.down_proj", gated, down, self._written_bias(f"{name}.down_proj", config.mlp_bias))

    def _reading(self, weight: Floats, norm: str) -> Floats:
        """The weight of a layer that reads the normalised residual: gains taken in, inputs rotated."""
        return self._rotation.apply(weight * self.weights.read(norm))

    def _writing(self, weight: Floats) -> Floats:
        """The weight of a layer that adds to the residual: outputs rotated."""
        return np.ascontiguousarray(self._rotation.apply(weight.T).T)

    def _written_bias(self, name: str, biased: bool) -> Floats | None:
        return self._rotation.apply(self.weights.read(f"{name}.bias")) if biased else None

    def _linear(
        self, name: str, x: str, weight: Callable[[], Floats], bias: Floats | None = None, output: str = ""
    ) -> str:
        """x [T, K] times the 8-bit table of weight [N, K], which is computed only if the table is not there yet.

        Each row of x is rounded to 8 bits by its own largest value. The products are summed as integers, so a row's
        result does not depend on the other rows.
        """
        graph = self.graph
        quantised = cache(lambda: quantise8(weight()))
        largest = graph.op("ReduceMax", graph.op("Abs", x), graph.ints(1), keepdims=1)
        step = graph.constant("activation_step", np.array(1 / 127, np.float32))
        zero = graph.constant("activation_zero", np.array(128, np.uint8))
        product = graph.op(
            "MatMulIntegerToFloat",
            graph.op("QuantizeLinear", graph.op("Div", x, largest), step, zero),
            graph.table(f"{name}.table", lambda: quantised()[0].T),
            step,
            graph.table(f"{name}.scales", lambda: quantised()[1]),
            zero,
            domain=_MICROSOFT,
        )
        if bias is None:
            return graph.op("Mul", product, largest, name=output)
        product = graph.op("Mul", product, largest)
        return graph.op("Add", product, graph.constant(f"{name}.bias", bias), name=output)

    def _norm(self, x: str, name: str, scale: float = 1.0) -> str:
        gains = self.graph.constant(name, self.weights.read(name) * np.float32(scale))
        return self.graph.op("SimplifiedLayerNormalization", x, gains, epsilon=self.config.rms_norm_eps, axis=-1)

    def _add_and_norm(self, x: str, residual: str) -> tuple[str, str]:
        """(the normalised sum without gains, the sum)."""
        normed, _, _, total = self.graph.ops(
            "SkipSimplifiedLayerNormalization",
            x,
            residual,
            "ones",
            names=[self.graph.fresh(), "", "", self.graph.fresh()],
            domain=_MICROSOFT,
            epsilon=self.config.rms_norm_eps,
        )
        return normed, total
