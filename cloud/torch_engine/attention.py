"""The attention function that transformers' models call here: it writes to the KV pool and reads from it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from cloud.torch_engine.loop import SpanPlan, attend_spans
from cloud.torch_engine.plan import PoolPlan, attend_pool

ATTENTION = "outrider_pool"


def pool_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: SpanPlan | PoolPlan,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write key and value [1, kv_heads, T, head_dim] to the pool, then attend as the plan says.

    query [1, heads, T, head_dim] -> [1, T, heads, head_dim]. The mask of transformers is not used. sliding_window: of
    this layer, if it has one; it is the plan's then.
    """
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if isinstance(plan, SpanPlan):
        return attend_spans(plan, module.layer_idx, query, new_keys, new_values, scaling, bool(sliding_window)), None
    return attend_pool(plan, module.layer_idx, query, new_keys, new_values, scaling, bool(sliding_window)), None


AttentionInterface.register(ATTENTION, pool_attention)
