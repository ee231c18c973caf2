"""EAGLE-3 (arXiv 2503.01840): features of several layers, and training on its own predictions.

It differs from EAGLE-2 in three points. Beside every token it reads a learned mixture of several of the target's layers
at the token before: here the attention values of the layers that MoA reads, and the last hidden state (for the default
target as many numbers as the authors' three hidden states). It learns the target's distribution alone, not its
features. And in training it drafts after roots as at run time, from its own states ("training-time test"); MoA's
windows define the roots, so that a pass over the text teaches each position at one distance from its root, where the
authors' takes all of them in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lab.baselines.networks import Baseline, BaselineConfig, begin_small

#: tokens drafted after one root in training, like the authors' seven; longer windows are split
DRAFTED = 7
MASKED = -1e9


class Eagle3(Baseline):
    """A block over a token and the features of the token before it, each with its own norm."""

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__(config)
        self.mix = nn.Linear(config.known_width, config.hidden_size, bias=False)
        self.token_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feature_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mix.apply(begin_small)

    def enter(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        """See Baseline.enter."""
        assert features is not None and self.fuse is not None
        x = self.token_norm(self.embedding(tokens))
        return self.fuse(torch.cat([x, self.feature_norm(features.to(x.dtype))], -1))

    def known(self, kv: Tensor, hidden: Tensor) -> Tensor:
        """Return features [..., hidden_size] of tokens that the target has read.

        kv [..., layers, kv_width] as outrider_core.models.moa.ServerHalf reads it, hidden [..., hidden_size]. Keys are
        left out, as they are rotated by their positions.
        """
        heads = kv.unflatten(-1, (self.config.target_kv_heads, 2, self.config.target_head_dim))
        values = heads[..., 1, :].flatten(-3)
        return self.mix(torch.cat([values, hidden.to(values.dtype)], -1))

    def states(self, tokens: Tensor, kv: Tensor, hidden: Tensor, causal: Tensor, row_mask: Tensor) -> Tensor:
        """See `outrider_core.models.moa.MoA.states`. A position sees the rows of tokens before its root."""
        count, size = tokens.shape
        known = self.known(kv, hidden)
        before = torch.cat([torch.zeros_like(known[:, :1]), known[:, :-1]], 1)
        at = torch.arange(size, device=tokens.device).expand(count, size)
        behind = (at - (row_mask[:, :, 1:] == 0).sum(-1)).remainder(DRAFTED)  # a root has distance 0 from itself
        root = at - behind
        none = before.new_zeros(count, 0, self.config.layers * self.config.kv_heads, self.config.head_dim)
        states, keys, values = self.hidden(tokens, before, at, causal, none, none)
        key_at = at  # positions of the keys in `keys`: first all as roots, then drafts
        for step in range(1, min(DRAFTED, size)):
            here, real = _places(behind == step)
            if not here.shape[1]:
                break
            own = torch.take_along_dim(states, (here - 1).clamp(min=0)[..., None], 1)
            begin = torch.take_along_dim(root, here, 1)[..., None]
            drafted = (key_at[:, None] > begin) & (key_at[:, None] < here[..., None])
            drafted[..., :size] = at[:, None] <= begin  # the verified part of the text
            itself = torch.eye(here.shape[1], dtype=torch.bool, device=here.device).expand(count, -1, -1)
            mask = torch.where(torch.cat([drafted, itself], -1), 0.0, MASKED)
            ids = torch.take_along_dim(tokens, here, 1)
            state, key, value = self.hidden(ids, own, here, mask, keys, values)
            keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
            key_at = torch.cat([key_at, torch.where(real, here, -1)], 1)
            target = torch.where(real, here, size)[..., None].expand(-1, -1, state.shape[-1])  # one place for padding
            room = torch.cat([states, torch.zeros_like(states[:, :1])], 1)
            states = room.scatter(1, target, state.to(room.dtype))[:, :size]
        return states


def _places(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places [B, n] of True in each row of [B, S], padded with 0, and which of them are real [B, n]."""
    most = int(chosen.sum(-1).max())
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)[:, :most]
    real = torch.take_along_dim(chosen, order, 1)
    return torch.where(real, order, 0), real
