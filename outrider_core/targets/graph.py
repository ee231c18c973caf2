"""Lower a target to one ONNX graph for every step shape, exact to the last bit.

A step computes T tokens of one or several sessions: any mixture of prompt, single tokens and tree nodes. Their keys
and values go into the sessions' blocks of the KV pool in place; each token attends to what its row of the mask allows.

**Why a token's logits do not depend on the step it is computed in.** Norms, rotary positions and linear layers
(`linears`) are computed row by row, and a query-key score sums over one head's width in a fixed order. Only the sum
over the tokens attended to has an order that depends on where their rows are. So values are rounded to integers of 10
bits and a sign, and softmax weights to 16 bits, which are multiplied eight at a time: the sum over a block of the pool
then fits the 24 bits of a float32, sums over blocks fit the 53 of a float64, and exact sums are the same in any order.
With float32 weights, values and softmax weights get as many bits as still leave room in a float64 for sums over the
longest context.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from outrider_core.targets.batch import JOINED_TOKENS
from outrider_core.targets.builder import MICROSOFT, Builder, Tables
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.linears import HEAD, Moments, Shape, linears_of
from outrider_core.targets.part import POOL_BLOCK
from outrider_core.targets.quantise import Rotation, hadamard, hadamard_block, rotate_blocks
from outrider_core.targets.rope import Rope
from outrider_core.targets.weights import Floats, Rows, Weights

#: bits of an integer that a float64 stores exactly
DOUBLE_BITS = 53


@dataclass(frozen=True)
class Sums:
    """The rounding of values and softmax weights to integers, so that their sums are exact.

    largest_value: integer of the largest value. largest_spread: value that it stands for, in root mean squares of
    values of inputs without a preferred direction. weight_bits: bits of a weight as a fraction of the largest one.
    halves: multiply the upper and the lower half of weights separately in float32, instead of whole in float64.
    """

    largest_value: int
    largest_spread: float
    weight_bits: int
    halves: bool

    @classmethod
    def of(cls, bits: int, config: TargetConfig, max_context: int) -> Sums:
        """Return the rounding for weights with this many bits."""
        if bits < 32:
            # of a block of the pool 64 products of 11 bits and 8 fit the 24 bits of a float32
            return cls(2**10, 12.0, 16, halves=True)
        each = (DOUBLE_BITS - math.ceil(math.log2(max_context))) // 2
        # float32 holds integers of 24 bits; a normalised input is no longer than the root of its width
        return cls(2 ** min(each, 23), math.sqrt(config.hidden_size), min(each, 24), halves=False)


class TargetGraph:
    """Builds the graph of one target.

    bits: of its weights, 4, 8 or 32. done: called after every stored layer, for a progress bar. moments: statistics of
    each linear layer's inputs by its name; see `quantise8`.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: Weights,
        max_context: int,
        tables: Tables,
        done: Callable[[int], None] = lambda layer: None,
        moments: Moments = lambda name: None,
        bits: int = 8,
    ) -> None:
        self.config, self.weights, self.max_context, self.done = config, weights, max_context, done
        self.graph = Builder(tables)
        self._linears = linears_of(bits, self.graph, moments)
        # the gains of a norm before a sum are not merged into a layer, so its channels have to be the model's own
        rotated = self._linears.rotated and not config.post_norms
        self._rotation = Rotation(config.hidden_size) if rotated else None
        self._sums = Sums.of(bits, config, max_context)
        layers = range(config.num_hidden_layers)
        self._norm_names = [*(name for layer in layers for name in config.norms(layer)[::2]), "norm"]

    def build(self) -> onnx.ModelProto:
        """Build the whole model.

        Inputs: ids int64 [T]; positions int64 [1, T]; slots int64 [1, kv_heads, T, 3] (block, head and row of each new
        token); wanted int64 [R]; keys_<layer> and values_<layer> float32 [blocks, kv_heads, POOL_BLOCK, head_dim].
        Each session's part is padded to the P tokens of the longest. queries int64 [blocks, kv_heads, group * P]: rows
        of the queries [heads * T, head_dim] that attend to each block; mask float32 [blocks, 1, group * P, POOL_BLOCK],
        0 or -inf; blocks_of_part int64 [parts, most], the blocks of each part, padded with one of them; part_of_block
        int64 [blocks]; shares_of_blocks float64 [parts, blocks], 1 for a part's own blocks, else 0; answers int64 [T,
        heads]: each token's rows of the sums [parts * heads * P, head_dim]. With a single part, queries and
        part_of_block may have a single block, for all. window_mask: the mask of layers with sliding windows. Outputs:
        logits float32 [R, vocab], and new_keys_<layer>, new_values_<layer>, to be bound to the memory of the inputs.
        """
        config, graph = self.config, self.graph
        ids = graph.input("ids", TensorProto.INT64, ["tokens"])
        self._declare()
        wanted = graph.input("wanted", TensorProto.INT64, ["wanted"])
        head = HEAD if config.tie_word_embeddings else "embed_tokens"
        shape = (config.vocab_size, config.hidden_size)
        residual = self._linears.embedding(head, ids, lambda: Rows(shape, self._embedded), shape)
        residual = self._times("embedding_scale", residual, config.embedding_scale)
        graph.output("logits", TensorProto.FLOAT, ["wanted", config.vocab_size])
        normed = residual
        if first := self._gains(0):
            normed = graph.op("SimplifiedLayerNormalization", residual, first, epsilon=config.rms_norm_eps, axis=-1)
        for layer in range(config.num_hidden_layers):
            normed, residual = self._layer(layer, normed, residual)
            self.done(layer)
        chosen = graph.op("Gather", normed, wanted)
        scaled = config.logit_scale != 1.0
        name = "" if scaled else "logits"
        logits = self._linear(HEAD, chosen, lambda: Rows(shape, self._head), shape, output=name)
        if scaled:
            self._times("logit_scale", logits, config.logit_scale, "logits")
        return graph.model("target")

    def piece(self, layer: int) -> onnx.ModelProto:
        """Build one layer alone.

        Inputs: `normed` and `residual` float32 [T, hidden_size], what it reads and adds to, and those of `build` except
        ids and wanted. Outputs: the same for the next layer, `next_normed` and `next_residual`. The last layer's
        `next_normed` is the input of the LM head.
        """
        graph = self.graph
        shape: list[int | str] = ["tokens", self.config.hidden_size]
        self._declare()
        before = [graph.input(name, TensorProto.FLOAT, shape) for name in ("normed", "residual")]
        for name, value in zip(("next_normed", "next_residual"), self._layer(layer, *before), strict=True):
            graph.output(graph.op("Identity", value, name=name), TensorProto.FLOAT, shape)
        return graph.model("layer")

    def _declare(self) -> None:
        """Declare the inputs of every layer."""
        config, graph = self.config, self.graph
        graph.input("positions", TensorProto.INT64, [1, "tokens"])
        graph.input("queries", TensorProto.INT64, ["query_blocks", config.num_key_value_heads, "queries"])
        graph.input("mask", TensorProto.FLOAT, ["blocks", 1, "queries", POOL_BLOCK])
        if config.windowed_layers:
            graph.input("window_mask", TensorProto.FLOAT, ["blocks", 1, "queries", POOL_BLOCK])
        graph.input("blocks_of_part", TensorProto.INT64, ["parts", "most_blocks"])
        graph.input("part_of_block", TensorProto.INT64, ["query_blocks"])
        graph.input("shares_of_blocks", TensorProto.DOUBLE, ["parts", "blocks"])
        graph.input("answers", TensorProto.INT64, ["tokens", config.num_attention_heads])
        graph.input("slots", TensorProto.INT64, [1, config.num_key_value_heads, "tokens", 3])
        self._rotary_tables("", config.rope)
        if config.window_rope:
            self._rotary_tables("window_", config.window_rope)

    def _layer(self, layer: int, normed: str, residual: str) -> tuple[str, str]:
        """Return (the input of the next layer, the residual that it adds to)."""
        norms = self.config.norms(layer)
        mixed = self._attention(layer, normed)
        normed, residual = self._add_and_norm(mixed, residual, self._gains(2 * layer + 1), norms[1])
        mixed = self._mlp(layer, normed)
        return self._add_and_norm(mixed, residual, self._gains(2 * layer + 2), norms[3])

    def _embedded(self, rows: slice) -> Floats:
        return self._turned(self.weights.read("embed_tokens", rows))

    def _head(self, rows: slice) -> Floats:
        name = "embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self._reading(self.weights.read(name, rows), "norm")

    def _rotary_tables(self, kind: str, rope: Rope) -> None:
        # RotaryEmbedding needs as many rows as a run has tokens
        cosines, sines = rope.tables(max(self.max_context, JOINED_TOKENS), self.config.rotary_width)
        self.graph.table(f"{kind}cosines", lambda: cosines)
        self.graph.table(f"{kind}sines", lambda: sines)

    def _times(self, name: str, x: str, factor: float, output: str = "") -> str:
        """Multiply x by `factor`; return x itself if that is 1."""
        if factor == 1.0:
            return x
        return self.graph.op("Mul", x, self.graph.constant(name, np.array(factor, np.float32)), name=output)

    def _gains(self, index: int) -> str:
        """Return the gains of a norm of the residual stream, counted from the first layer's.

        Ones if they are merged into the layer that reads it; "" if there is no norm.
        """
        if self._rotation:
            return self.graph.constant("ones", np.ones(self.config.hidden_size, np.float32))
        name = self._norm_names[index]
        return self.graph.constant(name, self.weights.read(name)) if name else ""

    def _attention(self, layer: int, x: str) -> str:
        config, graph = self.config, self.graph
        heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        name = f"layers.{layer}.self_attn"
        value_scale = np.float32(self.value_scale(layer))
        query_scale = np.float32(1.0 if config.head_norms or config.joined_norms else config.score_scale)

        def joined_rows(suffix: str) -> Floats:
            return np.concatenate(
                [
                    self.weights.read(f"{name}.q_proj{suffix}") * query_scale,
                    self.weights.read(f"{name}.k_proj{suffix}"),
                    self.weights.read(f"{name}.v_proj{suffix}") * value_scale,
                ]
            )

        bias = joined_rows(".bias") if config.attention_bias else None
        norm = config.norms(layer)[0]
        shape = ((heads + 2 * kv) * width, config.hidden_size)
        joined = self._linear(f"{name}.qkv", x, lambda: self._reading(joined_rows(""), norm), shape, bias)
        if config.joined_norms:
            query, key, value = graph.ops(
                "Split", joined, graph.ints(heads * width, kv * width, kv * width), names=3, axis=-1
            )
            query = self._norm(query, f"{name}.q_norm", config.score_scale)
            joined = graph.op("Concat", query, self._norm(key, f"{name}.k_norm"), value, axis=-1)
        by_head = graph.op("Reshape", joined, graph.ints(1, -1, heads + 2 * kv, width))
        by_head = graph.op("Transpose", by_head, perm=[0, 2, 1, 3])  # [1, heads, T, width]
        query_key, value = graph.ops("Split", by_head, graph.ints(heads + kv, kv), names=2, axis=1)
        if config.head_norms:
            query, key = graph.ops("Split", query_key, graph.ints(heads, kv), names=2, axis=1)
            query = self._norm(query, f"{name}.q_norm", config.score_scale)
            query_key = graph.op("Concat", query, self._norm(key, f"{name}.k_norm"), axis=1)
        windowed = layer in config.windowed_layers
        if layer not in config.unrotated_layers:
            query_key = self._rotated(query_key, "window_" if windowed and config.window_rope else "")
        query, key = graph.ops("Split", query_key, graph.ints(heads, kv), names=2, axis=1)
        query = self._grown(query)
        query = graph.op("Gather", graph.op("Reshape", query, graph.ints(-1, width)), "queries", axis=0)
        least = graph.constant("least_value", np.array(-self._sums.largest_value, np.float32))
        most = graph.constant("largest_value", np.array(self._sums.largest_value, np.float32))
        value = graph.op("Clip", graph.op("Round", value), least, most)
        keys = self._store(f"keys_{layer}", key)
        values = self._store(f"values_{layer}", value)
        mask = "window_mask" if windowed else "mask"
        mixed = graph.op("Gather", self._mix(query, keys, values, mask), "answers", axis=0)  # [T, heads, width]
        mixed = graph.op("Reshape", mixed, graph.ints(-1, heads * width))

        def output() -> Floats:
            return self._writing(self.weights.read(f"{name}.o_proj") * self._residual_scale / value_scale)

        bias = self._written_bias(f"{name}.o_proj", config.output_bias)
        return self._linear(f"{name}.o_proj", mixed, output, (config.hidden_size, heads * width), bias)

    def _rotated(self, x: str, kind: str) -> str:
        """Rotate queries and keys [1, heads, T, width] by their positions; if partial, only the first channels."""
        config, graph = self.config, self.graph
        rest = config.head_dim - config.rotary_width
        kept = ""
        if rest:
            x, kept = graph.ops("Split", x, graph.ints(config.rotary_width, rest), names=2, axis=-1)
        x = graph.op("RotaryEmbedding", x, "positions", f"{kind}cosines", f"{kind}sines", domain=MICROSOFT)
        return graph.op("Concat", x, kept, axis=-1) if rest else x

    def _grown(self, query: str) -> str:
        """Multiply queries [1, heads, T, width] by a factor that grows with their positions (Ministral 3)."""
        factors = self.config.query_factors(self.max_context)
        if (factors == 1.0).all():
            return query
        graph = self.graph
        factor = graph.op("Gather", graph.constant("query_factors", factors), "positions")
        return graph.op("Mul", query, graph.op("Reshape", factor, graph.ints(1, 1, -1, 1)))

    def _store(self, name: str, fresh: str) -> str:
        """Write the new tokens' rows into their slots of a pool. The output is bound to the input's own memory."""
        shape: list[int | str] = ["blocks", self.config.num_key_value_heads, POOL_BLOCK, self.config.head_dim]
        pool = self.graph.input(name, TensorProto.FLOAT, shape)
        self.graph.output(f"new_{name}", TensorProto.FLOAT, shape)
        return self.graph.op("ScatterND", pool, "slots", fresh, name=f"new_{name}")

    def _mix(self, query: str, keys: str, values: str, mask: str) -> str:
        """Compute attention of query [blocks or 1, kv, group * P, width] over the bound blocks.

        Values and both halves of a weight are integers, so that their sums are exact. Returns [rows, width], a row for
        each part, KV head, head of its group and token.
        """
        graph, width = self.graph, self.config.head_dim
        single = self.config.group == 1
        if single:  # a product of one row is summed in another order than one of several
            query = graph.op("Concat", query, query, axis=2)
        scores = graph.op("FusedMatMul", query, keys, domain=MICROSOFT, transB=1)  # [blocks, kv, queries, rows]
        if single:
            scores, _ = graph.ops("Split", scores, names=2, axis=2, num_outputs=2)
        scores = graph.op("Add", scores, mask)
        largest = graph.op("ReduceMax", scores, graph.ints(3), keepdims=1)
        of_parts = graph.op("Gather", largest, "blocks_of_part", axis=0)  # [parts, most blocks, kv, queries, 1]
        of_parts = graph.op("ReduceMax", of_parts, graph.ints(1), keepdims=0)
        shift = graph.constant("weight_shift", np.array(self._whole_bits * math.log(2), np.float32))
        largest = graph.op("Gather", graph.op("Sub", of_parts, shift), "part_of_block", axis=0)
        weights = graph.op("Exp", graph.op("Sub", scores, largest))
        if self._sums.halves:
            high = graph.op("Round", weights)
            low_scale = graph.constant("low_scale", np.array(2.0**self._whole_bits, np.float32))
            low = graph.op("Round", graph.op("Mul", graph.op("Sub", weights, high), low_scale))
            weights = graph.op("Concat", high, low, axis=2)  # [blocks, kv, 2 * queries, rows]
        else:
            weights = graph.op("Cast", graph.op("Round", weights), to=TensorProto.DOUBLE)
            values = graph.op("Cast", values, to=TensorProto.DOUBLE)
        total = graph.op("ReduceSum", weights, graph.ints(3), keepdims=1)
        sums = graph.op("Concat", graph.op("MatMul", weights, values), total, axis=3)
        sums = graph.op("Reshape", graph.op("Cast", sums, to=TensorProto.DOUBLE), graph.ints(0, -1))
        sums = graph.op("MatMul", "shares_of_blocks", sums)  # [parts, kv * halves * queries * (width + 1)]
        if self._sums.halves:
            sums = graph.op("Reshape", sums, graph.ints(0, self.config.num_key_value_heads, 2, -1))
            factors = graph.constant("factors", np.array([[2.0**self._whole_bits], [1.0]]))
            sums = graph.op("ReduceSum", graph.op("Mul", sums, factors), graph.ints(2), keepdims=0)
        sums = graph.op("Reshape", sums, graph.ints(-1, width + 1))
        sums, total = graph.ops("Split", sums, graph.ints(width, 1), names=2, axis=-1)
        return graph.op("Cast", graph.op("Div", sums, total), to=TensorProto.FLOAT)

    @property
    def _whole_bits(self) -> int:
        """Bits of a softmax weight's upper half, or of all of it if it is not split."""
        return self._sums.weight_bits // 2 if self._sums.halves else self._sums.weight_bits

    def value_scale(self, layer: int) -> float:
        """Return the factor by which a layer's values are multiplied before they are rounded to integers.

        A value is a row of v_proj times a normalised input of length sqrt(hidden_size). The largest integer stands for
        `largest_spread` times the value's size at inputs without a preferred direction; the few values beyond are
        clipped.
        """
        name = f"layers.{layer}.self_attn.v_proj"
        gains = self.weights.read(norm) if (norm := self.config.norms(layer)[0]) else self._stream_size(layer)
        lengths = np.linalg.norm(self.weights.read(name) * gains, axis=1)
        bias = np.abs(self.weights.read(f"{name}.bias")) if self.config.attention_bias else 0.0
        return self._sums.largest_value / float(np.max(self._sums.largest_spread * lengths + bias))

    def _stream_size(self, layer: int) -> np.float32:
        """Return the root mean square of a layer's unnormalised input: embeddings plus the branches before it."""
        config = self.config
        total = np.square(self.weights.read("embed_tokens")).mean() * config.embedding_scale**2
        for each in range(layer):
            total += sum(np.square(self.weights.read(norm)).mean() for norm in config.norms(each)[1::2])
        return np.float32(math.sqrt(total))

    @property
    def _residual_scale(self) -> np.float32:
        return np.float32(self.config.residual_scale)

    def _mlp(self, layer: int, x: str) -> str:
        config, graph = self.config, self.graph
        name = f"layers.{layer}.mlp"

        def both(suffix: str) -> Floats:
            names = (f"{name}.gate_proj{suffix}", f"{name}.up_proj{suffix}")
            return np.concatenate([self.weights.read(each) for each in names])

        norm = config.norms(layer)[2]
        bias = both(".bias") if config.mlp_bias else None
        shape = (2 * config.intermediate_size, config.hidden_size)
        joined = self._linear(f"{name}.gate_up", x, lambda: self._reading(both(""), norm), shape, bias)
        gate, up = graph.ops("Split", joined, names=2, axis=-1, num_outputs=2)
        gated = graph.op("Mul", self._activated(gate), up)
        block = hadamard_block(config.intermediate_size) if self._rotation else 1
        if block > 1:
            matrix = graph.constant("hadamard", hadamard(block))
            turned = graph.op("MatMul", graph.op("Reshape", gated, graph.ints(-1, block)), matrix)
            gated = graph.op("Reshape", turned, graph.ints(-1, config.intermediate_size))

        def down() -> Floats:
            return rotate_blocks(self._writing(self.weights.read(f"{name}.down_proj") * self._residual_scale), block)

        bias = self._written_bias(f"{name}.down_proj", config.mlp_bias)
        return self._linear(f"{name}.down_proj", gated, down, (config.hidden_size, config.intermediate_size), bias)

    def _activated(self, gate: str) -> str:
        if self.config.activation == "silu":
            return self.graph.op("QuickGelu", gate, domain=MICROSOFT, alpha=1.0)
        return self.graph.op("Gelu", gate, approximate="tanh")

    def _reading(self, weight: Floats, norm: str) -> Floats:
        """Return the weight of a layer that reads the normalised residual.

        If the stream is rotated, the norm's gains are merged into it.
        """
        return self._rotation.apply(weight * self.weights.read(norm)) if self._rotation else weight

    def _turned(self, rows: Floats) -> Floats:
        """Return vectors of the residual stream in its rotated coordinates."""
        return self._rotation.apply(rows) if self._rotation else rows

    def _writing(self, weight: Floats) -> Floats:
        """Return the weight of a layer that adds to the residual stream."""
        return np.ascontiguousarray(self._turned(weight.T).T)

    def _written_bias(self, name: str, biased: bool) -> Floats | None:
        return self._turned(self.weights.read(f"{name}.bias") * self._residual_scale) if biased else None

    def _linear(
        self,
        name: str,
        x: str,
        weight: Callable[[], Floats | Rows],
        shape: Shape,
        bias: Floats | None = None,
        output: str = "",
    ) -> str:
        """Multiply x [T, K] by the transpose of weight [N, K]; its `shape` is given, as it may not be computed."""
        if bias is None:
            return self._linears.product(name, x, weight, shape, output)
        product = self._linears.product(name, x, weight, shape, "")
        return self.graph.op("Add", product, self.graph.constant(f"{name}.bias", bias), name=output)

    def _norm(self, x: str, name: str, scale: float = 1.0) -> str:
        gains = self.graph.constant(name, self.weights.read(name) * np.float32(scale))
        return self.graph.op("SimplifiedLayerNormalization", x, gains, epsilon=self.config.rms_norm_eps, axis=-1)

    def _add_and_norm(self, x: str, residual: str, gains: str, post: str) -> tuple[str, str]:
        """Return (the normalised sum, the sum). gains "": no norm. post: norm of x alone before the sum, or ""."""
        if post:
            x = self._norm(x, post)
        if not gains:
            total = self.graph.op("Add", x, residual)
            return total, total
        normed, _, _, total = self.graph.ops(
            "SkipSimplifiedLayerNormalization",
            x,
            residual,
            gains,
            names=[self.graph.fresh(), "", "", self.graph.fresh()],
            domain=MICROSOFT,
            epsilon=self.config.rms_norm_eps,
        )
        return normed, total
