"""The tensors of a drafter's device half in numpy, checked against its config. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from outrider_core.models.drafter_arrays import Arrays
from outrider_core.models.moa_config import DrafterError, MoAConfig

Floats = NDArray[np.float32]


def device_arrays(config: MoAConfig, tensors: Arrays, embedding: Floats, lm_head: Floats) -> Arrays:
    """Return a drafter's device half by the names of `outrider_core.models.moa.DeviceHalf`'s state.

    embedding, lm_head: the target's tables, float32 [vocab, hidden_size]. Raises DrafterError if shapes do not fit.
    """
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise DrafterError(
            f"the target's embedding is {embedding.shape}, the drafter was made for "
            f"{(config.vocab_size, config.hidden_size)}; give the target it was trained on"
        )
    check_draft_ids(config, tensors)
    wanted = _shapes(config)
    for name, shape in wanted.items():
        if name not in tensors or tensors[name].shape != shape:
            raise DrafterError(
                f"drafter weights do not fit their config: {name} is missing or has another shape than {shape}"
            )
    own = {name: tensors[name] for name in wanted}
    ids = tensors["draft_ids"].astype(np.int64)
    whole = np.array_equal(ids, np.arange(len(lm_head)))
    return {**own, "draft_ids": tensors["draft_ids"], "embedding.weight": embedding,
            "head.weight": lm_head if whole else lm_head[ids]}  # fmt: skip


def check_draft_ids(config: MoAConfig, tensors: Mapping[str, NDArray[np.generic]]) -> None:
    """Raise DrafterError unless `draft_ids` holds different tokens, as many as the config says."""
    ids = np.asarray(tensors.get("draft_ids", np.empty(0, np.int32)))
    if len(np.unique(ids)) != config.draft_vocab_size or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise DrafterError("drafter weights do not fit their config: draft_ids is missing, repeated or out of range")


def _shapes(config: MoAConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every trained tensor of the device half."""
    width, inner = config.hidden_size, config.heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for block, kv_heads, mlp in (
        ("self_attention", config.sa_kv_heads, config.sa_mlp), ("cross_attention", config.ca_kv_heads, config.ca_mlp),
    ):  # fmt: skip
        shapes[f"{block}.self_attn.q_proj.weight"] = (inner, width)
        shapes[f"{block}.self_attn.o_proj.weight"] = (width, inner)
        if block == "self_attention":  # the server half computes keys and values of verified tokens
            for part in "kv":
                shapes[f"{block}.self_attn.{part}_proj.weight"] = (kv_heads * config.head_dim, width)
        for part in ("gate", "up"):
            shapes[f"{block}.mlp.{part}_proj.weight"] = (mlp, width)
        shapes[f"{block}.mlp.down_proj.weight"] = (width, mlp)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{norm}.weight"] = (width,)
    if config.null_row:
        shapes["null_row"] = (2, config.ca_kv_heads, config.head_dim)
    if config.final_norm:
        shapes["norm.weight"] = (width,)
    return shapes
