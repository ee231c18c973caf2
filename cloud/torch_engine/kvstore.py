"""The KV pool's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: rows that attention on a GPU reads at once; a store has whole blocks of them
BLOCK = 128


class KVStore:
    """keys and values: one tensor [rows, kv_heads, head_dim] per layer.

    There are at least as many rows as are asked for, and the last one, `spare`, is nobody's: rows that only fill a step
    up write there. A layer has a tensor of its own because a compiled step writes to it in place.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = ((rows // BLOCK + 1) * BLOCK, kv_heads, head_dim)
        self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
        self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
        self.rows, self.spare = shape[0], shape[0] - 1
        self.dtype, self.device = dtype, device

    def empty(self) -> None:
        """Set all rows to zero, as at the beginning."""
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over rows, in all layers. Sources and targets may overlap: sources are read first."""
        source, target = torch.tensor([sources, targets], device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """[rows, layers, kv_heads * 2 * head_dim]: of each of these rows, layers and heads the key, then the value."""
        index = torch.tensor(rows, device=self.device)
        both = [torch.stack([self.keys[layer][index], self.values[layer][index]], 2) for layer in layers]
        return torch.stack(both, 1).flatten(2)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * len(self.keys) * self.keys[0][0].numel() * self.dtype.itemsize
