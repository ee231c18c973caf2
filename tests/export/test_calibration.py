"""One temperature makes a drafter's confidence what it says."""

from __future__ import annotations

import pytest
import torch

from export.calibration import TEMPERATURES, Calibrator


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.6])
def test_it_finds_the_temperature_that_choices_were_drawn_at(temperature: float) -> None:
    generator = torch.Generator().manual_seed(7)
    calibrator = Calibrator()
    for _ in range(8):
        logits = 2 * torch.randn(2000, 40, generator=generator)
        drawn = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]
        calibrator.add(logits, drawn)
    result = calibrator.result()
    assert result.temperature == pytest.approx(temperature, abs=0.051)
    assert result.error < 0.02
    assert (result.error_before > 0.05) == (temperature != 1.0)


def test_errors_are_gaps_between_confidence_and_accuracy() -> None:
    """Two bins by hand: 0.9 sure and right in 3 of 4, 0.6 sure and right in 1 of 2, at temperature 1."""
    sure = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.6, 0.6])
    logits = torch.stack([sure, 1 - sure], 1).log()
    calibrator = Calibrator()
    calibrator.add(logits, torch.tensor([0, 0, 0, 1, 0, 1]))
    assert calibrator.result().error_before == pytest.approx((4 * 0.15 + 2 * 0.1) / 6, abs=1e-4)


def test_without_held_out_text_nothing_changes() -> None:
    assert Calibrator().result() == (1.0, 0.0, 0.0) and 1.0 in TEMPERATURES
