"""A norm before the LM head, and the target's last layer behind MoA (TLI 1)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from export.train.batches import build_batch
from export.train.features import OnlineFeatures, Sequence
from export.train.recipe import TrainSettings
from export.train.training_set import TrainingSet
from lab.baselines.reused import ReusedLayerMoA
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.moa import MoA
from outrider_core.models.target import Target
from tests.tiny import tiny_model, tiny_target

SEQUENCES = [Sequence(list(range(4, 4 + size)), ((2, size),)) for size in (9, 30, 17)]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model("llama", dtype=torch.float32, layers=3)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    return tiny_target(model)


def moa_of(target: Target, **options: bool) -> MoA:
    moa = TrainingSet(target, SEQUENCES, layers=2, draft_vocab=64, **options).student()
    assert isinstance(moa, MoA)
    return moa


@pytest.mark.parametrize("final_norm", [False, True])
def test_a_drafter_folder_keeps_the_norm(
    target: Target, tmp_path_factory: pytest.TempPathFactory, final_norm: bool
) -> None:
    moa = moa_of(target, final_norm=final_norm)
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(folder, moa.config, moa.trained(), {})
    config, tensors, _ = load_drafter(folder)
    assert config == moa.config and ("norm.weight" in tensors) == final_norm


def test_tli1_with_perfect_predictions_is_the_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters the last layer predicted without error, the target's own last hidden states come out."""
    features = OnlineFeatures(target, TrainingSet(target, SEQUENCES, layers=2, draft_vocab=64).config, SEQUENCES)
    reused = ReusedLayerMoA(features.config)
    reused.adopt(target.model, torch.arange(64))
    for seed in range(6):
        batch = build_batch(features, [0, 1, 2], random.Random(seed), TrainSettings(long_windows=0.5))
        kv, hidden = features.batch([0, 1, 2])
        with torch.no_grad():
            entering = target.model(batch.tokens, output_hidden_states=True).hidden_states[-2]

            def predicted(*_: Tensor, given: Tensor = entering) -> Tensor:
                return given

            monkeypatch.setattr(MoA, "states", predicted)
            got = reused.states(batch.tokens, kv, hidden, batch.sa_mask, batch.row_mask)
        for row, sequence in enumerate(SEQUENCES):
            size = len(sequence.ids)
            torch.testing.assert_close(got[row, :size], hidden[row, :size], rtol=1e-4, atol=1e-4)


def test_tli1_trains_moa_alone(target: Target) -> None:
    config = TrainingSet(target, SEQUENCES, layers=2, draft_vocab=64).config
    reused = ReusedLayerMoA(config)
    reused.adopt(target.model, torch.arange(64))
    trained = {name for name, parameter in reused.named_parameters() if parameter.requires_grad}
    assert trained == {n for n, p in MoA(config).named_parameters() if p.requires_grad} - {"device_half.norm.weight"}
