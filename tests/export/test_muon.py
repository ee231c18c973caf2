"""Our Muon takes the steps of torch's own, in any number format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from export.train.muon import Muon, orthogonal

SHAPES = ((24, 8), (8, 24), (16, 16))


def walked(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Matrices after three steps of an optimiser on the same gradients."""
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimiser = make(matrices)
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape)
        optimiser.step()
    return [matrix.detach() for matrix in matrices]


def test_in_bfloat16_it_is_torchs_bit_for_bit() -> None:
    theirs = walked(lambda of: torch.optim.Muon(of, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    ours = walked(lambda of: Muon(of, 0.01, torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_in_float32_it_is_torchs_but_for_rounding() -> None:
    fine = walked(lambda of: Muon(of, 0.01, torch.float32))
    rough = walked(lambda of: Muon(of, 0.01, torch.bfloat16))
    assert max(float((a - b).abs().max()) for a, b in zip(fine, rough, strict=True)) < 2e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_nearly_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(matrix, torch.float32))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_a_matrix_without_a_gradient_stays() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    Muon([matrix], 0.1, torch.float32).step()
    assert torch.equal(matrix, torch.ones(4, 4))
