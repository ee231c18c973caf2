"""The training loss of a drafter: its distance from the target's distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: rows whose logits are computed at once: on a CPU, few enough for its caches
ROWS_CPU, ROWS_GPU = 256, 8192


class HeadLoss(torch.autograd.Function):
    """Computes sum_i weight_i * loss_i over rows, and the share of rows with the target's first choice.

    With q = softmax(state @ head.T) and the target's distribution t = softmax(truth @ head.T), loss_i is

        share * cross_entropy(t, q) + (1 - share) * total_variation(t, q),    share = exp(-eta * sum_v min(t_v, q_v))

    the hybrid of arXiv 2602.23881: total variation is the probability that one lossless draw is rejected, but it
    teaches little while q is still far from t. `share` is a constant of each row, so eta = 0 is cross entropy alone.
    state, truth [N, hidden_size] are the drafter's and the target's last hidden states, head [V, hidden_size] is
    frozen, weight [N]; -> scalars float32. Logits of all rows are never in memory at once, and the gradient is formed
    from them right away: on a CPU the composed form spends most of its time moving them.
    """

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, truth: Tensor, head: Tensor, weight: Tensor, eta: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss; see the class."""
        gradient = torch.empty_like(state)
        loss, same = weight.new_zeros(()), weight.new_zeros(())
        rows = ROWS_CPU if state.device.type == "cpu" else ROWS_GPU
        with torch.autocast(state.device.type, enabled=False):
            for start in range(0, len(state), rows):
                here = slice(start, start + rows)
                logits, wanted = state[here] @ head.T, truth[here] @ head.T
                first = wanted.argmax(-1, keepdim=True)
                same += (logits.gather(-1, first)[:, 0] >= logits.amax(-1)).sum()
                part, own = _hybrid(logits, torch.softmax(wanted, -1), weight[here], eta)
                loss += part
                gradient[here] = own @ head
        ctx.save_for_backward(gradient)
        share = same / max(1, len(state))
        ctx.mark_non_differentiable(share)
        return loss, share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradients; see the class."""
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


def _hybrid(logits: Tensor, wanted: Tensor, weight: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Return (weighted sum, its gradient by the logits [n, V]) for the target's distribution `wanted` [n, V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    large = logits.to(wide)
    loss = large.logsumexp(-1) - torch.linalg.vecdot(wanted.to(wide), large)
    own = torch.softmax(logits, -1)
    if not eta:
        return (weight * loss).sum(), own.sub_(wanted).mul_(weight[:, None].to(own.dtype))
    short = (own < wanted).to(own.dtype)  # elsewhere min(t, q) is t, which has no slope
    accepted = torch.minimum(own, wanted).sum(-1, dtype=wide)
    share = torch.exp(-eta * accepted)
    loss = share * loss + (1 - share) * (1 - accepted)
    reach = (own * short).sum(-1, keepdim=True)
    slope = own * (reach - short)  # of 1 - accepted
    share, weight = share[:, None].to(own.dtype), weight[:, None].to(own.dtype)
    return (weight[:, 0] * loss).sum(), (own.sub_(wanted).mul_(share) + slope.mul_(1 - share)).mul_(weight)
