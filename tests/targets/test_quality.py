"""How near a copy is to another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider_core.targets.answers import WrittenAnswer
from outrider_core.targets.quality import compare
from tests.targets.plain import lowered
from tests.tiny import tiny_model


@pytest.mark.parametrize("start", [1, 2, 70])
def test_a_copy_is_as_near_as_can_be_to_itself(start: int, tmp_path: Path) -> None:
    """Behind prompts of one token, of two, and of more than a block; every token written is judged."""
    bundle = lowered(tiny_model("llama", seed=2, hidden=64, dtype=torch.float32), tmp_path)
    answers = [WrittenAnswer([5 + at % 190 for at in range(start + 100)], start)]
    quality = compare(bundle, bundle, answers)
    assert (quality.tokens, quality.agreement, quality.divergence, quality.excess) == (100, 1.0, 0.0, 0.0)
    assert quality.surprise > 0
