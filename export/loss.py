"""What a drafter is trained for: the target's distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: rows whose logits are worked on at once: on a CPU, what stays in its caches
ROWS_CPU, ROWS_GPU = 256, 8192


class HeadCrossEntropy(torch.autograd.Function):
    """sum_i weight_i * -sum_v t_iv log softmax(logits)_iv, and the share of rows with the target's first choice.

    t is the target's distribution softmax(truth @ head.T). state, truth [N, hidden_size] are the drafter's and the
    target's last hidden states, head [V, hidden_size] is frozen, weight [N]; -> scalars float32. Logits of all rows are
    never in memory at once, and the gradient weight * (softmax(logits) - t) @ head is formed while they are at hand: on
    a CPU most of the composed form's time goes into moving them about.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, truth: Tensor, head: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        gradient = torch.empty_like(state)
        loss, same = weight.new_zeros(()), weight.new_zeros(())
        rows = ROWS_CPU if state.device.type == "cpu" else ROWS_GPU
        with torch.autocast(state.device.type, enabled=False):
            for start in range(0, len(state), rows):
                here = slice(start, start + rows)
                logits, wanted = state[here] @ head.T, truth[here] @ head.T
                first = wanted.argmax(-1, keepdim=True)
                same += (logits.gather(-1, first)[:, 0] >= logits.amax(-1)).sum()
                part, own = _cross_entropy(logits, torch.softmax(wanted, -1), weight[here])
                loss += part
                gradient[here] = own @ head
        ctx.save_for_backward(gradient)
        share = same / max(1, len(state))
        ctx.mark_non_differentiable(share)
        return loss, share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """See the class."""
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def _cross_entropy(logits: Tensor, wanted: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted sum, its gradient by the logits [n, V]) for the target's distribution `wanted` [n, V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    large = logits.to(wide)
    cross = large.logsumexp(-1) - torch.linalg.vecdot(wanted.to(wide), large)
    own = torch.softmax(logits, -1).sub_(wanted)
    return (weight * cross).sum(), own.mul_(weight[:, None].to(own.dtype))
