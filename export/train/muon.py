"""Muon, an optimiser for matrices, in a number format that the machine multiplies fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

#: coefficients of the quintic iteration, and its steps (Jordan et al. 2024, as in torch.optim.Muon)
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Takes the steps of `torch.optim.Muon(params, lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")`.

    That one multiplies in bfloat16 on every machine, which CPUs without AVX-512 emulate: it took four fifths of a
    training step there. dtype: of the products.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, dtype: torch.dtype, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"], group["momentum"])

    def _step(self, parameter: Tensor, grad: Tensor, rate: float, momentum: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        update = orthogonal(grad.lerp(buffer, momentum), self.dtype)
        parameter.add_(update, alpha=-rate * 0.2 * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest orthogonal matrix, roughly: most singular values end between 0.7 and 1.2.

    Same shape [m, n].
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
