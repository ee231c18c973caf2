"""Linear layers packed once for the CPU.

PyTorch's matrix product on a CPU rearranges the weights at every call, which for the few rows of a draft tree costs as
much as the arithmetic. oneDNN can do so once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: number of rows that the layout is optimised for; others work as well
TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """x @ weight.T + bias in the weight's own number format, with the weight in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return output


def pack_linears(model: Any) -> int:
    """Replace the model's CPU linears by packed ones; returns how many (0: oneDNN has no kernel for them)."""
    formats = _formats()
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype in formats:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def _formats() -> set[torch.dtype]:
    if not torch.backends.mkldnn.is_available():
        return set()
    return {torch.float32, torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else {torch.float32}
