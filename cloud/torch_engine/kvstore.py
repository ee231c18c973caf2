"""The KV pool's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVStore:
    """The tensors: keys and values [layers, rows, kv_heads, head_dim]."""

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, rows, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over rows, in all layers. Sources and targets may overlap: sources are read first."""
        source = torch.tensor(sources, device=self.keys.device)
        target = torch.tensor(targets, device=self.keys.device)
        for tensor in (self.keys, self.values):
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.keys[:, 0].numel() * self.keys.element_size()
