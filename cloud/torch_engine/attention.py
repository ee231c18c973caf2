"""The attention function that transformers' models call here: session by session, on views of the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cloud.torch_engine.kvstore import KVStore
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part

ATTENTION = "outrider_pool"


@dataclass(frozen=True)
class RowSpan:
    """Tokens begin..end-1 of the packed row: one session's. They see pool rows base..base+seen-1.

    mask: additive [end - begin, seen] in the model's dtype, once per query head of a KV head (see `attend_pool`), or
    None if everything is seen (one token) or `causal` implies it (a prompt's first chunk). window_mask: of layers with
    a sliding window, or None if the window is longer than what is seen.
    """

    begin: int
    end: int
    base: int
    seen: int
    mask: Tensor | None
    causal: bool
    window_mask: Tensor | None


@dataclass(frozen=True)
class SpanPlan:
    """A forward's use of the pool.

    keys, values: one tensor [rows, kv_heads, head_dim] per layer. rows [tokens] int64: rows for each new token's key
    and value. A step may have more rows than tokens; the others have no keys and attend to nothing.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    rows: Tensor
    spans: tuple[RowSpan, ...]


def span_plan(store: KVStore, parts: Sequence[Part], rows: Tensor, group: int, window: int = 0) -> SpanPlan:
    """Make the plan of these parts, packed one after the other.

    group: query heads that share a KV head. window: tokens that layers with a sliding window see, 0: there are none.
    """
    spans, begin = list[RowSpan](), 0
    for part in parts:
        chain, seen = len(part.chain), part.past + len(part)
        masks = [span_mask(part.past, chain, part.tree, store.dtype)]
        masks.append(span_mask(part.past, chain, part.tree, store.dtype, window) if 0 < window < seen else None)
        mask, window_mask = (
            None if each is None else each.to(store.device, non_blocking=True).repeat(group, 1) for each in masks
        )
        causal = mask is None and len(part) > 1
        spans.append(RowSpan(begin, begin + len(part), part.base, seen, mask, causal, window_mask))
        begin += len(part)
    return SpanPlan(store.keys, store.values, rows, tuple(spans))


def span_mask(past: int, chain: int, tree: TokenTree, dtype: torch.dtype, window: int = 0) -> Tensor | None:
    """Return an additive mask [n, past + n] for `chain` tokens in a row and a tree below the last, n = both together.

    All tokens see the past; the chain is causal; nodes see the chain, their ancestors and themselves. None: no mask is
    needed for that. window: tokens see nothing this many positions back. It is additive because sdpa converts a boolean
    mask to this form again in every layer.
    """
    nodes = len(tree)
    total = chain + nodes
    if not window and (total == 1 or (past == 0 and nodes == 0)):
        return None
    seen = np.ones((total, past + total), bool)
    seen[:, past:] = np.tri(total, dtype=bool)
    if nodes:
        packed = b"".join(bits.to_bytes(32, "little") for bits in tree.ancestor_bits())
        bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(nodes, 32), axis=1, bitorder="little")
        seen[chain:, past + chain :] = bits[:, :nodes]
    if window:
        positions = np.array([*range(past + chain), *(past + chain - 1 + depth for depth in tree.depths)])
        seen &= positions[past:, None] - positions < window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))


def attend_pool(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: SpanPlan,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write key and value [1, kv_heads, T, head_dim] to the pool, then attend by the plan.

    query [1, heads, T, head_dim] -> [1, T, heads, head_dim]. The mask of transformers is not used. sliding_window: of
    this layer, if it has one; it equals the plan's then. Query heads that share a KV head become rows of one head, so
    that its keys are read once; in a trial on a CPU in bfloat16 that was faster for trees and several times as fast for
    single tokens.
    """
    keys, values, tokens = plan.keys[module.layer_idx], plan.values[module.layer_idx], len(plan.rows)
    keys.index_copy_(0, plan.rows, key[0].transpose(0, 1)[:tokens])
    values.index_copy_(0, plan.rows, value[0].transpose(0, 1)[:tokens])
    heads, kv_heads, head_dim = query.shape[1], keys.shape[1], query.shape[3]
    outputs = []
    for span in plan.spans:
        rows = query[:, :, span.begin : span.end]
        limited = bool(sliding_window) and span.window_mask is not None
        causal = span.causal and not limited
        if not causal:
            rows = rows.reshape(1, kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(
            rows,
            keys[span.base : span.base + span.seen].transpose(0, 1)[None],
            values[span.base : span.base + span.seen].transpose(0, 1)[None],
            attn_mask=span.window_mask if limited else span.mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=causal,
        )
        outputs.append(attended.reshape(1, heads, -1, head_dim))
    if tokens < query.shape[2]:
        outputs.append(query.new_zeros(1, heads, query.shape[2] - tokens, head_dim))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend_pool)
