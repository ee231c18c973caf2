"""The KV pool's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVStore:
    """keys and values: one tensor [rows, kv_heads, head_dim] per layer."""

    def __init__(
        self, layers: int, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (rows, kv_heads, head_dim)
        self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
        self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
        self.dtype, self.device = dtype, device

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over rows, in all layers. Sources and targets may overlap: sources are read first."""
        source, target = torch.tensor([sources, targets], device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return [rows, layers, kv_heads * 2 * head_dim]: for each row, layer and head the key, then the value."""
        index = torch.tensor(rows, device=self.device)
        both = [torch.stack([self.keys[layer][index], self.values[layer][index]], 2) for layer in layers]
        return torch.stack(both, 1).flatten(2)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * len(self.keys) * self.keys[0][0].numel() * self.dtype.itemsize
