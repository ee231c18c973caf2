"""A drafter of odd widths, all its weights random."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import MoAConfig

#: no width equals another, and none fits the target's heads
ODD = MoAConfig(
    target_hash="0123456789abcdef", target_layers=(0, 2, 3), target_kv_heads=3, target_head_dim=6, vocab_size=50,
    draft_vocab_size=17, hidden_size=20, lsa_heads=6, lsa_kv_heads=2, lsa_mlp=14, heads=4, head_dim=10,
    sa_kv_heads=2, sa_mlp=26, ca_kv_heads=1, ca_mlp=22, rope_theta=500.0, norm_eps=1e-5, max_context=64,
    null_row=True, final_norm=False,
)  # fmt: skip


def random_moa(config: MoAConfig = ODD, seed: int = 0, dtype: torch.dtype = torch.float64) -> MoA:
    """Every weight random, norms and biases and the null row too."""
    moa = MoA(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moa.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
    return moa.eval()


def random_sequence(config: MoAConfig, length: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(tokens [S], kv [S, layers, kv_width])."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
    shape = (length, len(config.target_layers), config.kv_width)
    return tokens, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
