"""What a drafter is trained for: the target's distribution, its most likely tokens and its last hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: rows whose logits are worked on at once: on a CPU, what stays in its caches
ROWS_CPU, ROWS_GPU = 256, 8192


class HeadCrossEntropy(torch.autograd.Function):
    """sum_i weight_i * -sum_v t_iv log softmax(logits)_iv, and the share of rows with the target's first choice.

    t is the target's law softmax(truth @ head.T), plus top_weight times the same law where it is among its
    `top_tokens` most likely ones (HASS, arXiv 2408.15766, section 3.1). state, truth [N, hidden_size] are the drafter's
    and the target's last hidden states, head [V, hidden_size] is frozen, weight [N]; -> scalars float32. Logits of all
    rows never lie in memory at once, and the gradient weight * (sum(t) softmax(logits) - t) @ head is formed while they
    are at hand: on a CPU most of the composed form's time goes into moving them about.
    """

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, truth: Tensor, head: Tensor, weight: Tensor, top_weight: float, top_tokens: int
    ) -> tuple[Tensor, Tensor]:
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
                law = _teaching(wanted, top_weight, top_tokens)
                part, own = _cross_entropy(logits, law, weight[here])
                loss += part
                gradient[here] = own @ head
        ctx.save_for_backward(gradient)
        share = same / max(1, len(state))
        ctx.mark_non_differentiable(share)
        return loss, share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """See the class."""
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


def _teaching(wanted: Tensor, top_weight: float, top_tokens: int) -> Tensor:
    """t of HeadCrossEntropy [n, V] for the target's logits [n, V]."""
    law = torch.softmax(wanted, -1)
    if top_weight:
        top = wanted.topk(min(top_tokens, wanted.shape[-1]), -1).indices
        law.scatter_add_(-1, top, top_weight * law.gather(-1, top))
    return law


def _cross_entropy(logits: Tensor, law: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted sum, its gradient by the logits [n, V])."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    mass, large = law.sum(-1, dtype=wide), logits.to(wide)
    cross = mass * large.logsumexp(-1) - torch.linalg.vecdot(law.to(wide), large)
    own = torch.softmax(logits, -1).mul_(mass[:, None].to(law.dtype)).sub_(law)
    return (weight * cross).sum(), own.mul_(weight[:, None].to(law.dtype))
