"""Autoregressive drafters: EAGLE's feature head (arXiv 2401.15077, 2406.16858) and an independent small LM.

Both are decoder blocks over the target's frozen embedding with rows of its frozen LM head. EAGLE's also reads, beside
every token, the target's last hidden state of the token *before* it; after the last verified token it uses its own
states instead. The small LM reads tokens only. EAGLE-3 is in `lab.baselines.eagle3`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider_core.models.layers import Block, adopt_tables, rotary, rotate, tables_of
from outrider_core.models.moa_config import MoAConfig, check_temperature

KINDS = ("eagle2", "eagle3", "lm")
#: training noise on EAGLE's features, uniform, as a multiple of their own spread (the authors': 0.2 over spreads near
#: 1)
NOISE = 0.2


@dataclass(frozen=True)
class BaselineConfig:
    """Shapes of a baseline drafter. kind: one of KINDS.

    target_layers, target_kv_heads, target_head_dim: see MoAConfig; only EAGLE-3 reads that much of the target.
    """

    kind: str
    target_hash: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float
    norm_eps: float
    max_context: int
    final_norm: bool
    target_layers: tuple[int, ...] = ()
    target_kv_heads: int = 0
    target_head_dim: int = 0
    confidence_temperature: float = 1.0  # see MoAConfig

    @property
    def known_width(self) -> int:
        """Width of EAGLE-3's input per token: the values of the target's layers and its last hidden state."""
        return len(self.target_layers) * self.target_kv_heads * self.target_head_dim + self.hidden_size

    @classmethod
    def like(cls, kind: str, moa: MoAConfig, budget: int, layers: int = 1) -> BaselineConfig:
        """Return shapes with `budget` trained parameters, by choice of the MLP's width; the rest as in `moa`."""
        width, kv = moa.hidden_size, moa.sa_kv_heads
        config = cls(
            kind, moa.target_hash, moa.vocab_size, moa.draft_vocab_size, width, layers, moa.heads, kv, moa.head_dim,
            0, moa.rope_theta, moa.norm_eps, moa.max_context, moa.final_norm,
            moa.target_layers, moa.target_kv_heads, moa.target_head_dim,
        )  # fmt: skip
        attention = 2 * width * moa.head_dim * (moa.heads + kv) + 2 * width
        entering = {"eagle2": 2 * width * width, "eagle3": (2 * width + config.known_width) * width, "lm": 0}
        mlp = (budget - layers * attention - entering[kind]) // (3 * width * layers)
        if mlp < 1:
            raise ValueError(f"{budget:,} parameters are too few for {layers} layers of width {width}")
        return replace(config, mlp=mlp)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BaselineConfig:
        """Read a folder's config.json; an older one lacks fields that only EAGLE-3 uses."""
        given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        config = cls(**given | {"target_layers": tuple(given.get("target_layers", ()))})
        check_temperature(config.confidence_temperature)
        return config


def begin_small(module: nn.Module) -> None:
    """Draw a linear layer's first weights."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


class Baseline(nn.Module):
    """Maps tokens (and features) to states before the LM head."""

    draft_ids: Tensor

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__()
        self.config = config
        width, shape = config.hidden_size, (config.heads, config.kv_heads, config.head_dim)
        self.blocks = nn.ModuleList(Block(width, *shape, config.mlp, config.norm_eps) for _ in range(config.layers))
        self.fuse = nn.Linear(2 * width, width, bias=False) if config.kind != "lm" else None
        self.norm = nn.RMSNorm(width, config.norm_eps) if config.final_norm else nn.Identity()
        self.embedding = nn.Embedding(config.vocab_size, width).requires_grad_(False)
        self.head = nn.Linear(width, config.draft_vocab_size, bias=False).requires_grad_(False)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size, dtype=torch.int32))
        self.apply(begin_small)

    def enter(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        """Return the first block's input for tokens [B, n] and features [B, n, hidden_size] of the tokens before."""
        x = self.embedding(tokens)
        if self.fuse is None:
            return x
        assert features is not None
        return self.fuse(torch.cat([x, features.to(x.dtype)], -1))

    def hidden(
        self, tokens: Tensor, features: Tensor | None, positions: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, positions [B, n]; features [B, n, hidden_size] of the tokens before; mask additive [B, n, past + n].

        keys, values [B, past, layers * kv_heads, head_dim]. Returns (states [B, n, hidden_size], new keys, new values).
        """
        config, x = self.config, self.enter(tokens, features)
        angles = rotary(positions, config.head_dim, config.rope_theta)
        new_keys, new_values = [], []
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            attn, heads = block.self_attn, slice(layer * config.kv_heads, (layer + 1) * config.kv_heads)
            u = block.input_layernorm(x)
            key, value = rotate(attn.key(u), *angles), attn.value(u)
            query = rotate(attn.query(u), *angles)
            x = block.finish(x, attn.attend_past(query, keys[:, :, heads], values[:, :, heads], key, value, mask))
            new_keys.append(key)
            new_values.append(value)
        return self.norm(x), torch.cat(new_keys, 2), torch.cat(new_values, 2)

    def states(self, tokens: Tensor, kv: Tensor, hidden: Tensor, causal: Tensor, row_mask: Tensor) -> Tensor:
        """See `outrider_core.models.moa.MoA.states`, for training. EAGLE reads only `hidden` [B, S, hidden_size]."""
        count, size = tokens.shape
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        if self.training:
            before = before + (torch.rand_like(before) - 0.5) * NOISE * before.std()
        empty = before.new_zeros(count, 0, self.config.layers * self.config.kv_heads, self.config.head_dim)
        positions = torch.arange(size, device=tokens.device).expand(count, size)
        return self.hidden(tokens, before, positions, causal, empty, empty)[0]

    def adopt(self, target_model: Any, draft_ids: Tensor) -> None:
        """See MoA.adopt."""
        adopt_tables(self.embedding, self.head, self.draft_ids, tables_of(target_model), draft_ids)

    def trained(self) -> dict[str, Tensor]:
        """Return trained tensors, plus the draft vocabulary map."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith(("embedding.", "head."))}
