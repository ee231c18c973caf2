"""MoA with the target's own last layer behind it: target layer inference, TLI 1 (arXiv 2410.03804).

For training and held-out agreement alone. A device that drafts this way would keep that layer (frozen) and be sent its
keys and values of every verified token beside the feature row, which doubles what travels; `lab.ablations` shows
what that would buy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider_core.models.layers import Block, adopt_tables, copy_weights, rotary, rotate, tables_of
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import MoAConfig

HIDDEN = -1e9


class ReusedLayerMoA(MoA):
    """MoA's states go through the target's last layer and norm. `adopt` takes both, and they stay as they are."""

    def __init__(self, config: MoAConfig) -> None:
        super().__init__(config)
        if not config.final_norm:
            raise ValueError("a reused layer wants the target's last norm behind it")
        self.layer = Block(
            config.hidden_size, config.heads, config.target_kv_heads, config.head_dim, config.sa_mlp, config.norm_eps
        )
        self.norm, self.device_half.norm = torch.nn.RMSNorm(config.hidden_size, config.norm_eps), None

    def adopt(self, target_model: Any, draft_ids: Tensor) -> None:
        """See MoA.adopt. The target must have the drafter's own widths, as MoAConfig.for_target gives it."""
        adopt_tables(
            self.device_half.embedding, self.head, self.device_half.draft_ids, tables_of(target_model), draft_ids
        )  # fmt: skip
        copy_weights(self.layer, target_model.model.layers[-1])
        copy_weights(self.norm, target_model.model.norm)
        self.layer.requires_grad_(False)
        self.norm.requires_grad_(False)

    def states(self, tokens: Tensor, kv: Tensor, hidden: Tensor, causal: Tensor, row_mask: Tensor) -> Tensor:
        """As MoA.states. Verified tokens are seen as the target's last layer has them, drafts as MoA predicts them."""
        x = super().states(tokens, kv, hidden, causal, row_mask)
        config, attn = self.config, self.layer.self_attn
        angles = rotary(torch.arange(tokens.shape[1], device=tokens.device), config.head_dim, config.rope_theta)
        u = self.layer.input_layernorm(x)
        own = torch.stack([rotate(attn.key(u), *angles), attn.value(u)], 3)  # [B, S, kv_heads, 2, head_dim]
        last = kv[:, :, -1].unflatten(-1, own.shape[2:]).to(own.dtype)
        keys, values = torch.cat([last, own], 1).unbind(3)
        verified = row_mask[:, :, 1:]
        drafted = torch.where(verified < 0, causal, HIDDEN)
        attended = attn.attend(rotate(attn.query(u), *angles), keys, values, torch.cat([verified, drafted], -1))
        return self.norm(self.layer.finish(x, attended))
