"""The measured distance of a copy from its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider_core.targets.answers import WrittenAnswer
from outrider_core.targets.convert import make_target_bundle
from outrider_core.targets.quality import compare
from outrider_core.targets.source import TargetSource
from outrider_core.targets.streamed import final_states, head_logits
from outrider_core.targets.weights import open_weights
from tests.targets.plain import lowered
from tests.tiny import FAMILIES, VARIANTS, tiny_model


@pytest.mark.parametrize("start", [1, 2, 70])
def test_a_copy_in_float32_is_the_model(start: int, tmp_path: Path) -> None:
    """Behind prompts of one token, of two, and of more than a block; every token written is judged."""
    tiny_model("llama", seed=2, hidden=64, dtype=torch.float32).save_pretrained(tmp_path / "source")
    bundle = make_target_bundle(TargetSource("tiny", tmp_path / "source"), tmp_path / "bundle", 256, bits=32)
    answers = [WrittenAnswer([5 + at % 190 for at in range(start + 100)], start), WrittenAnswer([7], 1)]
    quality = compare(bundle, *open_weights(tmp_path / "source"), answers)
    assert (quality.tokens, quality.agreement) == (100, 1.0)
    assert 0 <= quality.divergence < 1e-9


def test_a_rounded_copy_is_further_away(tmp_path: Path) -> None:
    bundle = lowered(tiny_model("llama", seed=2, hidden=64, dtype=torch.float32), tmp_path)
    answers = [WrittenAnswer([5 + at % 190 for at in range(100)], 10)]
    told = list[int]()
    quality = compare(bundle, *open_weights(tmp_path / "source"), answers, told.append)
    assert quality.tokens == 90 and 1e-6 < quality.divergence < 0.2
    assert told == [*range(1, bundle.config.num_hidden_layers + 1)]
    with pytest.raises(ValueError, match="no answer"):
        compare(bundle, *open_weights(tmp_path / "source"), [WrittenAnswer([7], 1)])


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_layer_by_layer_a_target_is_itself(family: str, tmp_path: Path) -> None:
    """Of every family; texts of several lengths, some of more than a block."""
    model = tiny_model(family, hidden=64, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    weights, config = open_weights(tmp_path)
    texts = [[5 + at % 90 for at in range(length)] for length in (1, 17, 100)]
    for text, states in zip(texts, final_states(weights, config, texts), strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([text])).logits[0].numpy()
        found = head_logits(weights, config, states)
        assert abs(found - wanted).max() < 2e-5 * abs(wanted).max()
