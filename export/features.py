"""What the target knows about its own answers: K and V of chosen layers, and the last hidden state.

Computed once per sequence, on first use, and kept in a memory-mapped file, so that later epochs cost no
target forward pass and an interrupted run loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from models.moa import MoAConfig
from models.target import Target

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sequence:
    """A conversation: all its token ids, and [begin, end) of each of the target's answers in them."""

    ids: list[int]
    answers: Spans

    @property
    def answered(self) -> int:
        return sum(end - begin for begin, end in self.answers)


class FeatureCache:
    """Lazily filled features of `sequences`, float16 on disk.

    Row of a token: [layers * kv_width] K and V as models.moa.ServerHalf reads them, then [hidden_size]
    the target's last hidden state after its final norm (what the LM head sees).
    """

    def __init__(self, target: Target, config: MoAConfig, sequences: list[Sequence], path: Path) -> None:
        self.target, self.config, self.sequences = target, config, sequences
        self.offsets = np.cumsum([0] + [len(s.ids) for s in sequences])
        self.kv = len(config.target_layers) * config.kv_width
        shape = (int(self.offsets[-1]), self.kv + config.hidden_size)
        fresh = not path.is_file() or path.stat().st_size != shape[0] * shape[1] * 2
        self.rows = np.memmap(path, np.float16, "w+" if fresh else "r+", shape=shape)
        flags = path.with_suffix(".filled")
        if fresh or not flags.is_file():
            np.zeros(len(sequences), np.uint8).tofile(flags)
        self.filled = np.memmap(flags, np.uint8, "r+", shape=(len(sequences),))

    def get(self, index: int) -> tuple[Tensor, Tensor]:
        """(kv [S, layers, kv_width], hidden [S, hidden_size]) float16 on the CPU."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        if not self.filled[index]:
            self.rows[span] = self._compute(self.sequences[index].ids)
            self.filled[index] = 1
        rows = torch.from_numpy(np.array(self.rows[span]))
        return rows[:, : self.kv].unflatten(1, (-1, self.config.kv_width)), rows[:, self.kv :]

    @torch.inference_mode()
    def _compute(self, ids: list[int]) -> np.ndarray:
        model = self.target.model
        cache = DynamicCache(config=model.config)
        tokens = torch.tensor([ids], device=model.device)
        hidden = model.model(tokens, past_key_values=cache, use_cache=True).last_hidden_state[0]
        parts = []
        for layer in self.config.target_layers:
            key, value = cache.layers[layer].keys[0], cache.layers[layer].values[0]  # [heads, S, head_dim]
            parts.append(torch.stack([key, value], 1).permute(2, 0, 1, 3).flatten(1))
        return torch.cat([*parts, hidden], 1).clamp(-65504, 65504).to(torch.float16).cpu().numpy()
