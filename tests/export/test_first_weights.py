"""What a drafter begins with, and MoA with the target's last layer behind it (TLI 1)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from export.batches import TrainSettings, build_batch
from export.features import OnlineFeatures, Sequence
from export.run import TrainingSet
from models.baselines.networks import Baseline
from models.baselines.reused import ReusedLayerMoA
from models.drafter_files import load_drafter, save_drafter
from models.moa import MoA
from models.target import Target
from tests.tiny import tiny_model, tiny_target

SEQUENCES = [Sequence(list(range(4, 4 + size)), ((2, size),)) for size in (9, 30, 17)]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model("llama", dtype=torch.float32, layers=3)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    return tiny_target(model)


def moa_of(target: Target, **options: bool) -> MoA:
    moa = TrainingSet(target, SEQUENCES, layers=2, draft_vocab=64, **options).student("moa")
    assert isinstance(moa, MoA)
    return moa


def test_moa_begins_as_the_targets_first_and_last_layer(target: Target) -> None:
    device, layers = moa_of(target).device_half, target.model.model.layers
    assert torch.equal(device.self_attention.self_attn.k_proj.weight, layers[0].self_attn.k_proj.weight)
    assert torch.equal(device.self_attention.mlp.up_proj.weight, layers[0].mlp.up_proj.weight)
    assert torch.equal(device.cross_attention.self_attn.q_proj.weight, layers[2].self_attn.q_proj.weight)
    assert torch.equal(device.cross_attention.mlp.down_proj.weight, layers[2].mlp.down_proj.weight)
    assert torch.equal(device.norm.weight, target.model.model.norm.weight)
    device.norm.weight.data += 1.0  # its own copy
    assert not torch.equal(device.norm.weight, target.model.model.norm.weight)


def test_the_papers_drafter_has_neither(target: Target) -> None:
    device = moa_of(target, begin_as_target=False, final_norm=False).device_half
    first = target.model.model.layers[0]
    assert not torch.equal(device.self_attention.self_attn.k_proj.weight, first.self_attn.k_proj.weight)
    assert "norm.weight" not in device.state_dict()


@pytest.mark.parametrize(("kind", "sources"), [("eagle2", [2]), ("lm", [0, 2])])
def test_baselines_begin_as_the_target_too(target: Target, kind: str, sources: list[int]) -> None:
    """Their MLPs are wider, for the same number of parameters: the target's is the leading part."""
    student = TrainingSet(target, SEQUENCES, layers=2, draft_vocab=64).student(kind)
    assert isinstance(student, Baseline)
    for block, source in zip(student.blocks, sources, strict=True):
        layer, own = target.model.model.layers[source], dict(block.named_parameters())
        assert torch.equal(own["self_attn.o_proj.weight"], layer.self_attn.o_proj.weight)
        inner = layer.mlp.down_proj.weight.shape[1]
        assert own["mlp.down_proj.weight"].shape[1] > inner
        assert torch.equal(own["mlp.down_proj.weight"][:, :inner], layer.mlp.down_proj.weight)
        assert torch.equal(own["mlp.gate_proj.weight"][:inner], layer.mlp.gate_proj.weight)


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
