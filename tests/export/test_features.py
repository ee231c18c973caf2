"""Features of the target's text: computed, and kept in a file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from cloud.torch_engine.features import TorchFeatures
from cloud.torch_engine.runner import TorchRunner
from export.train.features import FeatureCache, OnlineFeatures
from export.train.training_set import TrainingSet
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target
from tests.export.tiny_training import fresh_moa, some_sequences
from tests.tiny import tiny_model, tiny_target

#: torch says once that its fused norm is not used where activations are bfloat16 and weights float32
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")


def one(features: OnlineFeatures, index: int) -> tuple[Tensor, Tensor]:
    kv, hidden = features.batch([index])
    return kv[0], hidden[0]


@torch.inference_mode()
def direct(target: Target, ids: list[int]) -> tuple[DynamicCache, Tensor]:
    cache = DynamicCache(config=target.config)
    out = target.model(torch.tensor([ids]), cache=cache, use_cache=True, output_hidden_states=True)
    return cache, out.hidden_states[-1][0]


def test_feature_rows_equal_a_direct_forward(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    for index in (0, 7, 22):
        kv, hidden = one(cache, index)
        layers, expected_hidden = direct(target, cache.sequences[index].ids)
        torch.testing.assert_close(hidden.float(), expected_hidden, rtol=2e-3, atol=2e-3)
        for place, layer in enumerate(config.target_layers):
            keys, values = layers.layers[layer].keys[0], layers.layers[layer].values[0]
            interleaved = torch.cat([keys[0], values[0], keys[1], values[1]], -1)  # [K_0|V_0|K_1|V_1]
            largest = interleaved.unflatten(-1, (4, -1)).abs().amax(-1, keepdim=True) / 127
            step = largest.expand(-1, -1, 8).flatten(1) * 0.51 + 1e-3
            assert ((kv[:, place] - interleaved).abs() <= step).all()


def test_cached_hidden_is_what_the_lm_head_sees(cache: FeatureCache, target: Target) -> None:
    _, hidden = one(cache, 4)
    logits = target.model(torch.tensor([cache.sequences[4].ids])).logits[0]
    torch.testing.assert_close(target.model.lm_head(hidden.float()), logits, rtol=5e-3, atol=2e-2)


def test_training_and_serving_read_one_layout(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    """The server half gives the verifier's rows from the verifier's cache, and training's from the features."""
    half = fresh_moa(target, config).server.requires_grad_(False).eval()
    layers, _ = direct(target, cache.sequences[0].ids)
    positions = list(range(len(cache.sequences[0].ids)))
    shape = target.config
    head_dim = shape.hidden_size // shape.num_attention_heads
    runner = TorchRunner(copy.deepcopy(target.model), len(positions), shape.num_key_value_heads, head_dim)
    for layer, cached in enumerate(layers.layers):
        runner.store.keys[layer][: len(positions)] = cached.keys[0].transpose(0, 1)
        runner.store.values[layer][: len(positions)] = cached.values[0].transpose(0, 1)
    kv = runner.gather(config.target_layers, positions)
    served = TorchFeatures(config, half, torch.device("cpu")).rows(kv, positions)
    trained = half(one(cache, 0)[0].float(), torch.tensor(positions))
    torch.testing.assert_close(trained, torch.from_numpy(served), rtol=2e-2, atol=2e-2)


def test_online_features_are_those_of_the_cache(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    """Also in a batch of several lengths; the cache rounds keys and values to int8."""
    online = OnlineFeatures(target, config, cache.sequences)
    (kv, hidden), (cached_kv, cached_hidden) = (source.batch([3, 8, 21]) for source in (online, cache))
    assert kv.shape == cached_kv.shape and hidden.shape == cached_hidden.shape
    for row, index in enumerate((3, 8, 21)):
        n = len(cache.sequences[index].ids)
        torch.testing.assert_close(hidden[row, :n], cached_hidden[row, :n].float(), rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(kv[row, :n], cached_kv[row, :n], rtol=0, atol=0.51 / 127 * float(kv.abs().max()))


def test_a_full_disk_is_told_before_anything_is_written(
    target: Target, config: MoAConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(OSError, match=r"GB free, the target's features take .* --features online"):
        FeatureCache(target, config, some_sequences(23), tmp_path / "features")
    assert not list((tmp_path / "features").iterdir())


def test_features_survive_reopening(cache: FeatureCache, config: MoAConfig, tmp_path: Path) -> None:
    expected = [one(cache, index) for index in (2, 5)]
    reopened = FeatureCache(None, config, cache.sequences, tmp_path / "features")  # type: ignore[arg-type]
    for index, (kv, hidden) in zip((2, 5), expected, strict=True):  # no target is asked again
        got = one(reopened, index)
        assert torch.equal(got[0], kv) and torch.equal(got[1], hidden)
    with pytest.raises(AttributeError):
        one(reopened, 3)  # was never computed


def test_features_of_other_sequences_are_computed_anew(target: Target, config: MoAConfig, tmp_path: Path) -> None:
    one(FeatureCache(target, config, some_sequences(3), tmp_path / "features"), 0)
    other = some_sequences(4, seed=8)
    kv, _ = one(FeatureCache(target, config, other, tmp_path / "features"), 0)
    fresh, _ = one(FeatureCache(target, config, other, tmp_path / "elsewhere"), 0)
    assert torch.equal(kv, fresh)


@pytest.mark.parametrize("kept", [0, 100])
def test_a_file_that_was_cut_short_is_made_again(cache: FeatureCache, target: Target, kept: int) -> None:
    expected = one(cache, 2)[0]
    cache.files[2].write_bytes(cache.files[2].read_bytes()[:kept])
    assert torch.equal(one(cache, 2)[0], expected)


def test_a_full_disk_leaves_no_half_file(cache: FeatureCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        one(cache, 2)
    assert not list(cache.files[2].parent.iterdir())


@pytest.mark.parametrize("where", [0, 900, -1])
def test_a_file_that_lost_a_page_is_made_again(cache: FeatureCache, target: Target, where: int) -> None:
    """As after a power cut: it is as long as it was, and has zeros in it."""
    expected = one(cache, 2)[0]
    content = bytearray(cache.files[2].read_bytes())
    begin = where % len(content)
    content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
    if where == -1:
        content[-1] = cache.files[2].read_bytes()[-1] ^ 1
    cache.files[2].write_bytes(content)
    assert torch.equal(one(cache, 2)[0], expected)
    assert cache.files[2].read_bytes() != content


def test_a_target_in_another_dtype_has_features_of_its_own(tmp_path: Path) -> None:
    """They differ, and one work folder may see a GPU today and a CPU tomorrow."""
    folders = set()
    for dtype in (torch.float32, torch.bfloat16):
        data = TrainingSet(tiny_target(tiny_model(dtype=dtype)), some_sequences(3), layers=2, draft_vocab=64)
        features = data.features("cache", tmp_path)
        assert isinstance(features, FeatureCache)
        _, hidden = one(features, 0)
        _, fresh_hidden = one(OnlineFeatures(data.target, data.config, data.sequences), 0)
        torch.testing.assert_close(hidden.float(), fresh_hidden.float(), rtol=2e-3, atol=2e-3)
        folders.add(features.files[0].parent)
    assert len(folders) == 2
