"""Layers that all drafters here are made of, and the tables they take from the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., head_dim] of float32 angles for integer `positions` [...]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [..., heads, head_dim]; cos, sin [..., head_dim]."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """Grouped-query attention projections without bias; masks and caches are the caller's."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def query(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))

    def key(self, x: Tensor) -> Tensor:
        return self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))

    def value(self, x: Tensor) -> Tensor:
        return self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, n, heads, d], k and v [B, m, kv_heads, d], mask additive [B or 1, n, m] -> [B, n, width]."""
        scores = self._scores(q, k)
        if mask is not None:
            scores = scores + mask[:, None, None]
        return self._join(self._mix(torch.softmax(scores.float(), -1).to(v.dtype), v))

    def attend_past(self, q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Like `attend` over past and new keys, mask [B or 1, n, past + n], without copying past keys or values."""
        past = past_k.shape[1]
        scores = torch.cat([self._scores(q, past_k), self._scores(q, k)], -1) + mask[:, None, None]
        weights = torch.softmax(scores.float(), -1).to(v.dtype)
        return self._join(self._mix(weights[..., :past], past_v) + self._mix(weights[..., past:], v))

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """-> [B, kv_heads, groups, n, m]. Query heads that share a key head are folded together: no key repeats."""
        batch, n, heads, d = q.shape
        folded = q.unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4) * d**-0.5
        scores = torch.bmm(folded.flatten(2, 3).flatten(0, 1), k.permute(0, 2, 3, 1).flatten(0, 1))
        return scores.view(batch, self.kv_heads, heads // self.kv_heads, n, k.shape[1])

    def _mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """weights [B, kv_heads, groups, n, m], v [B, m, kv_heads, d] -> [B, kv_heads, groups, n, d]."""
        batch, kv_heads, groups, n, _ = weights.shape
        mixed = torch.bmm(weights.flatten(2, 3).flatten(0, 1), v.permute(0, 2, 1, 3).flatten(0, 1))
        return mixed.view(batch, kv_heads, groups, n, v.shape[-1])

    def _join(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed.permute(0, 3, 1, 2, 4).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm decoder layer: attention and SwiGLU MLP, each with a residual."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, mlp: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(width, heads, kv_heads, head_dim)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, mlp)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def tables_of(target_model: Any) -> tuple[Tensor, Tensor]:
    """Return a loaded target's embedding and LM head, each [vocab, hidden_size]."""
    return target_model.get_input_embeddings().weight, target_model.get_output_embeddings().weight


def adopt_tables(
    embedding: nn.Embedding, head: nn.Linear, ids: Tensor, tables: tuple[Tensor, Tensor], draft_ids: Tensor
) -> None:
    """Copy the target's embedding, the LM head rows of `draft_ids` [draft_vocab], and these ids themselves."""
    with torch.no_grad():
        embedding.weight.copy_(tables[0])
        head.weight.copy_(tables[1][draft_ids.long()])
        ids.copy_(draft_ids)


def copy_weights(module: nn.Module, other: nn.Module) -> None:
    """Give `module` the weights that `other` has under the same names."""
    given = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(given[name])
