"""The device half of an MoA drafter as an ONNX graph, built node by node from its tensors. No torch.

It computes one draft step, as `outrider_core.models.moa.DeviceHalf.forward` (arXiv 2410.03804, section 3): the token's
embedding, a self-attention block over the device's own tokens, a cross-attention block over feature rows, a norm and
the LM head. Projections that read the same row are one product, and caches are read in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from export.bundle.blocks import BLOCKS, Profile, places, quantise, rare_bits
from outrider_core.models.moa_config import MoAConfig
from outrider_core.targets.builder import MICROSOFT, Builder, Tables

Arrays = Mapping[str, NDArray[Any]]
#: arithmetic of MatMulNBits: 4 = int8 activations, with one scale per block; 1 = float32, which unpacks the weights
#: first and is several times slower. `export bundle` reports the argmax flips of both.
INT8_ACTIVATIONS = 4
FLOAT_ACTIVATIONS = 1


class DrafterGraph:
    """Builds the graph of one drafter.

    tensors: named as in a `DeviceHalf`'s state, with the target's "embedding.weight" [vocab, hidden] and "head.weight"
    [draft_vocab, hidden]. tables: stores large ones.
    """

    def __init__(self, config: MoAConfig, tensors: Arrays, profile: Profile, tables: Tables) -> None:
        self.config, self.tensors, self.profile = config, tensors, profile
        self.graph = Builder(tables)

    def build(self) -> onnx.ModelProto:
        """Build it with inputs and outputs named as in `outrider_core.drafting.engines`."""
        config, graph = self.config, self.graph
        heads, size = config.sa_kv_heads, config.head_dim
        integer, real = TensorProto.INT64, TensorProto.FLOAT
        tokens = graph.input("tokens", integer, ["width"])
        positions = graph.input("positions", integer, ["width"])
        wanted = graph.input("wanted", integer, ["wanted"])
        mask = graph.input("sa_mask", real, ["width", "past_and_width"])
        past = [graph.input(name, real, ["past", heads, size]) for name in ("sa_keys", "sa_values")]
        rows = [graph.input(name, real, ["rows", config.ca_kv_heads, size]) for name in ("row_keys", "row_values")]
        graph.output("logits", real, ["wanted", config.draft_vocab_size])
        for name in ("new_keys", "new_values"):
            graph.output(name, real, ["width", heads, size])

        frequencies = np.float32(config.rope_theta) ** -(np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
        angles = graph.op("Unsqueeze", graph.op("Cast", positions, to=real), graph.ints(1))
        angles = graph.op("Mul", angles, graph.constant("frequencies", frequencies.astype(np.float32)))
        turn = [graph.op("Cos", angles), graph.op("Sin", angles)]  # [width, head_dim / 2]

        x = self._embedding(tokens)
        gain = self._gain("self_attention.input_layernorm")
        normed = graph.op("SimplifiedLayerNormalization", x, gain, epsilon=config.norm_eps, axis=-1)
        attended = self._self_attention(normed, turn, past, mask)
        normed, x = self._add_and_norm(attended, x, "self_attention.post_attention_layernorm")
        mixed = self._mlp("self_attention.mlp", normed)
        normed, x = self._add_and_norm(mixed, x, "cross_attention.input_layernorm")
        attended = self._cross_attention(normed, turn, rows)
        normed, x = self._add_and_norm(attended, x, "cross_attention.post_attention_layernorm")
        mixed = self._mlp("cross_attention.mlp", normed)
        if config.final_norm:
            x, _ = self._add_and_norm(mixed, x, "norm")
        else:
            x = graph.op("Add", mixed, x)
        chosen = graph.op("Gather", x, wanted)
        self._product("head", chosen, self._float("head.weight"), self.profile.embedding_bits, "logits")
        return graph.model("drafter")

    # blocks

    def _self_attention(self, x: str, turn: list[str], past: list[str], mask: str) -> str:
        """Attend with normalised x [n, width] to the past [past, kv_heads, head_dim] and itself."""
        config, graph, name = self.config, self.graph, "self_attention.self_attn"
        heads, kv, size = config.heads, config.sa_kv_heads, config.head_dim
        joined = self._linear(f"{name}.qkv", x, *(f"{name}.{part}_proj" for part in "qkv"))
        query_key, value = graph.ops("Split", joined, graph.ints((heads + kv) * size, kv * size), names=2, axis=1)
        query_key = self._rotated(query_key, turn)
        query, key = graph.ops("Split", query_key, graph.ints(heads * size, kv * size), names=2, axis=1)
        key = graph.op("Reshape", key, graph.ints(-1, kv, size), name="new_keys")
        value = graph.op("Reshape", value, graph.ints(-1, kv, size), name="new_values")
        # joined, as ONNX Runtime's product of a transposed batch does not support an empty cache
        keys, values = (graph.op("Concat", old, new, axis=0) for old, new in zip(past, (key, value), strict=True))
        shape = graph.op("Concat", graph.ints(heads), graph.op("Shape", mask), axis=0)
        scores = graph.op("Reshape", self._scores(self._folded(query, kv), keys), shape)
        weights = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
        shape = graph.op("Concat", graph.ints(kv, -1), graph.op("Shape", mask, start=1, end=2), axis=0)
        mixed = self._mixed(graph.op("Reshape", weights, shape), values)
        return self._unfolded(name, mixed, kv)

    def _cross_attention(self, x: str, turn: list[str], rows: list[str]) -> str:
        """Attend with normalised x [n, width] to the feature rows [m, kv_heads, head_dim]."""
        graph, kv, name = self.graph, self.config.ca_kv_heads, "cross_attention.self_attn"
        query = self._folded(self._rotated(self._linear(f"{name}.q_proj", x, f"{name}.q_proj"), turn), kv)
        weights = graph.op("Softmax", self._scores(query, rows[0]), axis=-1)
        return self._unfolded(name, self._mixed(weights, rows[1]), kv)

    def _rotated(self, x: str, turn: list[str]) -> str:
        """Rotate x [n, heads * head_dim] by its positions; `turn` has a row for each of its rows."""
        graph = self.graph
        batched = graph.op("Unsqueeze", x, graph.ints(0))
        turned = graph.op("RotaryEmbedding", batched, graph.ints(0), *turn, domain=MICROSOFT)
        return graph.op("Squeeze", turned, graph.ints(0))

    def _folded(self, query: str, kv: int) -> str:
        """Reshape [n, heads * head_dim] to [kv, group * n, head_dim], stacking the heads that share keys."""
        config, graph = self.config, self.graph
        by_head = graph.op("Reshape", query, graph.ints(-1, kv, config.heads // kv, config.head_dim))
        return graph.op(
            "Reshape", graph.op("Transpose", by_head, perm=[1, 2, 0, 3]), graph.ints(kv, -1, config.head_dim)
        )

    def _unfolded(self, name: str, mixed: str, kv: int) -> str:
        """Reshape [kv, group * n, head_dim] to the attention's output [n, width]."""
        config, graph = self.config, self.graph
        by_head = graph.op("Reshape", mixed, graph.ints(kv, config.heads // kv, -1, config.head_dim))
        joined = graph.op("Transpose", by_head, perm=[2, 0, 1, 3])
        joined = graph.op("Reshape", joined, graph.ints(-1, config.heads * config.head_dim))
        return self._linear(f"{name}.o_proj", joined, f"{name}.o_proj")

    def _scores(self, query: str, keys: str) -> str:
        """Multiply query [kv, r, d] by keys [m, kv, d], which are read in place -> [kv, r, m]."""
        scale = self.config.head_dim**-0.5
        return self.graph.op("FusedMatMul", query, keys, domain=MICROSOFT, transB=1, transBatchB=1, alpha=scale)

    def _mixed(self, weights: str, values: str) -> str:
        """Multiply weights [kv, r, m] by values [m, kv, d] -> [kv, r, d]."""
        return self.graph.op("FusedMatMul", weights, values, domain=MICROSOFT, transBatchB=1)

    def _mlp(self, name: str, x: str) -> str:
        graph, inner = self.graph, self.tensors[f"{name}.gate_proj.weight"].shape[0]
        joined = self._linear(f"{name}.gate_up", x, f"{name}.gate_proj", f"{name}.up_proj")
        gate, up = graph.ops("Split", joined, graph.ints(inner, inner), names=2, axis=1)
        gate = graph.op("QuickGelu", gate, domain=MICROSOFT, alpha=1.0)  # SiLU
        return self._linear(f"{name}.down_proj", graph.op("Mul", gate, up), f"{name}.down_proj")

    def _add_and_norm(self, x: str, residual: str, norm: str) -> tuple[str, str]:
        """Return (the normalised sum, the sum)."""
        graph = self.graph
        names = [graph.fresh(), "", "", graph.fresh()]
        graph.ops(
            "SkipSimplifiedLayerNormalization", x, residual, self._gain(norm), names=names, domain=MICROSOFT,
            epsilon=self.config.norm_eps,
        )  # fmt: skip
        return names[0], names[3]

    # tables

    def _float(self, name: str) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.tensors[name], np.float32)

    def _gain(self, norm: str) -> str:
        return self.graph.constant(norm, self._float(f"{norm}.weight"))

    def _linear(self, name: str, x: str, *parts: str) -> str:
        """Multiply x [n, K] by the transposes of the weights of `parts`, side by side."""
        weight = np.concatenate([self._float(f"{part}.weight") for part in parts])
        return self._product(name, x, weight, self.profile.bits)

    def _product(self, name: str, x: str, weight: NDArray[np.float32], bits: int, output: str = "") -> str:
        """Multiply x [n, K] by the transpose of weight [N, K], stored as table `name`."""
        graph = self.graph
        if bits not in BLOCKS:
            return graph.op("Gemm", x, self._floats(name, weight, bits), transB=1, name=output)
        outputs, inputs = weight.shape
        return graph.op(
            "MatMulNBits", x, *self._blocks(name, weight, bits), name=output, domain=MICROSOFT, K=inputs, N=outputs,
            bits=bits, block_size=BLOCKS[bits], accuracy_level=INT8_ACTIVATIONS,
        )  # fmt: skip

    def _floats(self, name: str, weight: NDArray[np.float32], bits: int) -> str:
        """Return table `name` in float32, stored in 16 or 32 bits."""
        if bits == 32:
            return self.graph.table(name, lambda: weight)
        stored = self.graph.table(name, lambda: weight.astype(np.float16))
        return self.graph.op("Cast", stored, to=TensorProto.FLOAT)

    def _blocks(self, name: str, weight: NDArray[np.float32], bits: int) -> tuple[str, str]:
        """Return (packed, scales) of table `name`."""
        packed, scales = f"{name}.packed", f"{name}.scales"
        if packed not in self.graph.tensors:
            values = quantise(weight, bits)
            self.graph.table(packed, lambda: values[0])
            self.graph.table(scales, lambda: values[1])
        return packed, scales

    def _rows(self, name: str, weight: NDArray[np.float32], bits: int, index: str) -> str:
        """Return rows `index` of table `name` in float32."""
        graph = self.graph
        if bits not in BLOCKS:
            rows = graph.table(name, lambda: weight if bits == 32 else weight.astype(np.float16))
            chosen = graph.op("Gather", rows, index)
            return chosen if bits == 32 else graph.op("Cast", chosen, to=TensorProto.FLOAT)
        packed, scales = (graph.op("Gather", table, index) for table in self._blocks(name, weight, bits))
        if bits == 4:
            low = graph.op("BitwiseAnd", packed, graph.constant("nibble", np.array(15, np.uint8)))
            high = graph.op("BitShift", packed, graph.constant("nibble_bits", np.array(4, np.uint8)), direction="RIGHT")
            pairs = [graph.op("Unsqueeze", half, graph.ints(-1)) for half in (low, high)]
            packed = graph.op("Reshape", graph.op("Concat", *pairs, axis=-1), graph.ints(0, 0, -1))
        zero = graph.constant(f"zero_{bits}", np.array(2 ** (bits - 1), np.float32))
        values = graph.op("Sub", graph.op("Cast", packed, to=TensorProto.FLOAT), zero)
        values = graph.op("Mul", values, graph.op("Unsqueeze", scales, graph.ints(-1)))
        values = graph.op("Reshape", values, graph.ints(0, -1))
        if weight.shape[1] % BLOCKS[bits]:
            values = graph.op("Slice", values, graph.ints(0), graph.ints(weight.shape[1]), graph.ints(1))
        return values

    def _embedding(self, tokens: str) -> str:
        """Look up tokens [n] -> [n, width]. If the LM head is tied, its table serves the draft vocabulary's tokens."""
        graph, bits = self.graph, self.profile.embedding_bits
        weight, head, ids = self._float("embedding.weight"), self._float("head.weight"), self.tensors["draft_ids"]
        ids = ids.astype(np.int64)
        tied = np.array_equal(weight[ids], head)
        if len(ids) == len(weight):
            own = tied and np.array_equal(ids, np.arange(len(weight)))
            return self._rows("head" if own else "embedding", weight, bits, tokens)
        if not tied and rare_bits(bits) == bits:
            return self._rows("embedding", weight, bits, tokens)
        place, others = places(ids, len(weight))
        split = len(ids)
        row = graph.op("Gather", graph.table("embedding.place", lambda: place), tokens)
        last, none = (graph.constant(f"place_{value}", np.array(value, np.int32)) for value in (split - 1, 0))
        count = graph.constant(f"place_{split}", np.array(split, np.int32))
        drafted_at = graph.op("Min", row, last)
        rare_at = graph.op("Max", graph.op("Sub", row, count), none)
        drafted = self._rows("head" if tied else "embedding.drafted", weight[ids], bits, drafted_at)
        rare = self._rows("embedding.rare", weight[others], rare_bits(bits), rare_at)
        is_drafted = graph.op("Unsqueeze", graph.op("Less", row, count), graph.ints(-1))
        return graph.op("Where", is_drafted, drafted, rare)
