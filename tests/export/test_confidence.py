"""One temperature calibrates a drafter's confidence."""

from __future__ import annotations

import pytest
import torch

from export.train.calibration import LEAST_ROWS, Calibrator


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.6])
def test_it_finds_the_temperature_that_choices_were_drawn_at(temperature: float) -> None:
    generator = torch.Generator().manual_seed(7)
    calibrator = Calibrator()
    for _ in range(8):
        logits = 2 * torch.randn(2000, 40, generator=generator)
        drawn = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]
        calibrator.add(logits, drawn)
    result = calibrator.result()
    assert result
    assert result.temperature == pytest.approx(temperature, abs=0.051)
    assert result.error < 0.02
    assert (result.error_before > 0.05) == (temperature != 1.0)


def test_errors_are_gaps_between_confidence_and_accuracy() -> None:
    """Two bins by hand: 0.9 sure and right in 3 of 4, 0.6 sure and right in 1 of 2, at temperature 1."""
    sure = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.6, 0.6])
    logits = torch.stack([sure, 1 - sure], 1).log()
    calibrator = Calibrator()
    for _ in range(LEAST_ROWS):
        calibrator.add(logits, torch.tensor([0, 0, 0, 1, 0, 1]))
    result = calibrator.result()
    assert result and result.error_before == pytest.approx((4 * 0.15 + 2 * 0.1) / 6, abs=1e-4)


@pytest.mark.parametrize("rows", [0, LEAST_ROWS - 1])
def test_too_little_text_says_nothing(rows: int) -> None:
    calibrator = Calibrator()
    calibrator.add(torch.zeros(rows, 40), torch.zeros(rows, dtype=torch.long))
    assert calibrator.result() is None
