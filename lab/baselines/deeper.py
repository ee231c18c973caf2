"""MoA with a second block on the device, to measure its gain and its cost.

"self": another self-attention block before cross-attention, whose keys are cached beside the first one's. It is placed
there because cached values must not depend on the rows that have arrived. "cross": another cross-attention block after
the first, with its own queries on the same rows: nothing more is sent or cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from outrider_core.models.layers import Block, rotary
from outrider_core.models.moa import DeviceHalf, MoA, read_rows, see_own
from outrider_core.models.moa_config import MoAConfig


class DeeperHalf(DeviceHalf):
    """The device half with a second block. where: "self" or "cross"."""

    def __init__(self, config: MoAConfig, where: str) -> None:
        super().__init__(config)
        self.where = where
        kv_heads, mlp = (config.sa_kv_heads, config.sa_mlp) if where == "self" else (config.ca_kv_heads, config.ca_mlp)
        self.second = Block(config.hidden_size, config.heads, kv_heads, config.head_dim, mlp, config.norm_eps)
        if where == "cross":
            del self.second.self_attn.k_proj, self.second.self_attn.v_proj

    @property
    def cache_heads(self) -> int:
        """See DeviceHalf.cache_heads."""
        return self.config.sa_kv_heads * (2 if self.where == "self" else 1)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        sa_mask: Tensor,
        sa_keys: Tensor,
        sa_values: Tensor,
        row_keys: Tensor,
        row_values: Tensor,
        row_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See DeviceHalf.hidden; keys and values of own tokens have cache_heads heads."""
        angles = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x, own_keys, own_values = self.embedding(tokens), [], []
        own = [self.self_attention, *([self.second] if self.where == "self" else [])]
        for number, block in enumerate(own):
            heads = slice(number * self.config.sa_kv_heads, (number + 1) * self.config.sa_kv_heads)
            x, key, value = see_own(block, x, angles, sa_keys[:, :, heads], sa_values[:, :, heads], sa_mask)
            own_keys.append(key)
            own_values.append(value)
        for block in [self.cross_attention, *([self.second] if self.where == "cross" else [])]:
            x = read_rows(block, x, angles, row_keys, row_values, row_mask)
        return x if self.norm is None else self.norm(x), torch.cat(own_keys, 2), torch.cat(own_values, 2)


class DeeperMoA(MoA):
    """MoA whose second block has no effect before it is trained, so that training can start without one."""

    where: Literal["self", "cross"]

    def __init__(self, config: MoAConfig) -> None:
        half = DeeperHalf(config, self.where)
        super().__init__(config, half)
        nn.init.zeros_(half.second.self_attn.o_proj.weight)
        nn.init.zeros_(half.second.mlp.down_proj.weight)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See MoA.restore; after a drafter without a second block that block stays as it is."""
        begun = {name: own for name, own in self.trained().items() if name.startswith("second.")}
        super().restore(begun | dict(tensors))


class SecondSelfMoA(DeeperMoA):
    where = "self"


class SecondCrossMoA(DeeperMoA):
    where = "cross"
