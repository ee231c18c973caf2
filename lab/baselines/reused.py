"""MoA with the target's own last layer after it: target layer inference, TLI 1 (arXiv 2410.03804).

If target and drafter share a process it costs a layer; a device behind a link would keep that layer (frozen) and
receive its keys and values of every verified token beside the feature row, which doubles the traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_core.models.layers import Block, adopt_tables, copy_weights, rotary, rotate, tables_of
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import MoAConfig
from outrider_core.protocol.rows import RowShape

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
HIDDEN = -1e9


class ReusedLayerMoA(MoA):
    """MoA whose states pass through the target's last layer and norm. `adopt` takes both, and they stay unchanged."""

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

    def trained(self) -> dict[str, Tensor]:
        """See MoA.trained; it includes the layer and the norm, so that a drafter folder is complete."""
        own = {f"target_layer.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {**super().trained(), **own, "target_norm.weight": self.norm.weight.detach()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See MoA.restore; after a MoA drafter the target's layer and norm stay as they were adopted."""
        adopted = {name: own for name, own in self.trained().items() if name.startswith("target_")}
        super().restore(adopted | dict(tensors))

    def states(self, tokens: Tensor, kv: Tensor, hidden: Tensor, causal: Tensor, row_mask: Tensor) -> Tensor:
        """See MoA.states. Verified tokens use the states of the target's last layer, drafts those that MoA predicts."""
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


class ReusedLayerEngine:
    """The device's half of it with the interface of outrider_core.drafting.engines.Engine, eager.

    A row's heads are those of the feature row, then those of the target's last layer. The first row is the null row,
    which that layer does not see, and the others are those of the text's first tokens.
    """

    def __init__(self, model: ReusedLayerMoA) -> None:
        self._model = model
        self.row_shape = RowShape(model.config.ca_kv_heads + model.config.target_kv_heads, model.config.head_dim)
        self.cache_heads = model.config.sa_kv_heads + model.config.target_kv_heads

    @torch.inference_mode()
    def step(
        self,
        tokens: Ints,
        positions: Ints,
        wanted: Ints,
        sa_mask: Floats,
        sa_keys: Floats,
        sa_values: Floats,
        row_keys: Floats,
        row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:
        """See Engine.step."""
        model, config = self._model, self._model.config
        inputs = (tokens, positions, sa_mask, sa_keys, sa_values, row_keys, row_values)
        ids, at, mask, *known = (torch.from_numpy(x)[None] for x in inputs)
        (own_keys, last_keys), (own_values, last_values) = (x.tensor_split([config.sa_kv_heads], 2) for x in known[:2])
        (moa_keys, row_last_keys), (moa_values, row_last_values) = (
            x.tensor_split([config.ca_kv_heads], 2) for x in known[2:]
        )
        x, key, value = model.device_half.hidden(ids, at, mask, own_keys, own_values, moa_keys, moa_values, None)
        attn = model.layer.self_attn
        angles = rotary(at, config.head_dim, config.rope_theta)
        u = model.layer.input_layernorm(x)
        last_key, last_value = rotate(attn.key(u), *angles), attn.value(u)
        verified = row_last_keys.shape[1] - 1
        seen = torch.cat([mask.new_zeros(1, len(tokens), verified), mask], -1)
        seen[..., verified : 2 * verified] = HIDDEN  # the rows hold the target's own for these tokens
        attended = attn.attend_past(
            rotate(attn.query(u), *angles),
            torch.cat([row_last_keys[:, 1:], last_keys], 1),
            torch.cat([row_last_values[:, 1:], last_values], 1),
            last_key,
            last_value,
            seen,
        )
        state = model.norm(model.layer.finish(x, attended))
        logits = model.head(state[0, torch.from_numpy(wanted)])
        keys, values = torch.cat([key, last_key], 2)[0], torch.cat([value, last_value], 2)[0]
        return logits.numpy(), keys.numpy(), values.numpy()
