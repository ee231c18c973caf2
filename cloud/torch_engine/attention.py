"""Attention over the KV pool, registered with transformers: one packed row of tokens from many sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider_core.protocol.tree import TokenTree

ATTENTION = "outrider_pool"


@dataclass(frozen=True)
class Span:
    """Tokens begin..end-1 of the packed row: one session's. They see pool rows base..base+seen-1.

    mask: additive [end - begin, seen] in the model's dtype, once per query head of a KV head (see `pool_attention`),
    or None where all is seen (one token) or `causal` says it (a prompt's first chunk).
    """

    begin: int
    end: int
    base: int
    seen: int
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True)
class Plan:
    """What one forward does with the pool.

    rows [tokens] int64: where each new token's key and value go. A step may have more rows than tokens; the rest has
    no keys and attends to nothing.
    """

    keys: Tensor  # [layers, rows, kv_heads, head_dim]
    values: Tensor
    rows: Tensor
    spans: tuple[Span, ...]


def span_mask(past: int, chain: int, tree: TokenTree, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [n, past + n] for `chain` tokens in a row and a tree below the last, n = both together.

    Everything sees the past; the chain is causal; nodes see the chain, their ancestors and themselves.
    It is additive because sdpa turns a boolean mask into this form again in every layer.
    """
    nodes = len(tree)
    total = chain + nodes
    if total == 1 or (past == 0 and nodes == 0):
        return None
    seen = np.ones((total, past + total), bool)
    seen[:, past:] = np.tri(total, dtype=bool)
    if nodes:
        packed = b"".join(bits.to_bytes(32, "little") for bits in tree.ancestor_bits())
        bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(nodes, 32), axis=1, bitorder="little")
        seen[chain:, past + chain :] = bits[:, :nodes]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))


def pool_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: Plan,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write key and value [1, kv_heads, T, head_dim] to the pool, then attend span by span.

    query [1, heads, T, head_dim] -> [1, T, heads, head_dim]. The mask of transformers is not used. Query heads that
    share a KV head become rows of one head, so that its keys are read once; in a trial on a CPU in bfloat16 that was
    faster for trees and several times as fast for single tokens.
    """
    keys, values, tokens = plan.keys[module.layer_idx], plan.values[module.layer_idx], len(plan.rows)
    keys.index_copy_(0, plan.rows, key[0, :, :tokens].transpose(0, 1))
    values.index_copy_(0, plan.rows, value[0, :, :tokens].transpose(0, 1))
    heads, kv_heads, head_dim = query.shape[1], keys.shape[1], query.shape[3]
    outputs = []
    for span in plan.spans:
        rows = query[:, :, span.begin : span.end]
        if not span.causal:
            rows = rows.reshape(1, kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(
            rows,
            keys[span.base : span.base + span.seen].transpose(0, 1)[None],
            values[span.base : span.base + span.seen].transpose(0, 1)[None],
            attn_mask=span.mask,
            is_causal=span.causal,
            scale=scaling,
            enable_gqa=span.causal,
        )
        outputs.append(attended.reshape(1, heads, -1, head_dim))
    if tokens < query.shape[2]:
        outputs.append(query.new_zeros(1, heads, query.shape[2] - tokens, head_dim))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, pool_attention)
