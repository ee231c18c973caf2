"""Tensors are read without torch, bit for bit; damaged files get one clear line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider_core.models.target import model_folder
from outrider_core.targets.quantise import Rotation, hadamard_block, quantise8, rotate_blocks
from outrider_core.targets.source import DEFAULT_TARGET, TargetSource
from outrider_core.targets.weights import BrokenWeights, GgufWeights, SafetensorsWeights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_number_format(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"model.norm.weight": tensor, "lm_head.weight": tensor + 1}, tmp_path / "a.safetensors")
    weights = SafetensorsWeights(tmp_path)
    np.testing.assert_array_equal(weights.read("norm"), tensor.float().numpy())
    np.testing.assert_array_equal(weights.read("lm_head"), (tensor + 1).float().numpy())
    assert "norm" in weights and "embed_tokens" not in weights


def test_a_gguf_file_holds_what_transformers_makes_of_it() -> None:
    ours, theirs = (
        GgufWeights(TargetSource.resolve(DEFAULT_TARGET).path),
        SafetensorsWeights(model_folder(TargetSource.resolve())),
    )
    names = ("embed_tokens", "norm", "layers.3.input_layernorm", "layers.29.mlp.down_proj")
    for name in (*names, *(f"layers.7.self_attn.{part}_proj" for part in "qkvo")):
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
    assert "lm_head" not in ours and ours.config.tie_word_embeddings


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenWeights, match=r"no \*\.safetensors"):
        SafetensorsWeights(tmp_path)
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(BrokenWeights, match="not a safetensors file"):
        SafetensorsWeights(tmp_path)
    path.write_bytes(struct.pack("<Q", 4) + b"{{{{")
    with pytest.raises(BrokenWeights, match="header is damaged"):
        SafetensorsWeights(tmp_path)
    save_file({"model.norm.weight": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BrokenWeights, match="cut short"):
        SafetensorsWeights(tmp_path).read("norm")
    header = json.dumps({"model.norm.weight": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(BrokenWeights, match="F8_E4M3, which is not supported"):
        SafetensorsWeights(tmp_path).read("norm")
    with pytest.raises(BrokenWeights, match=r"no tensor model\.layers\.0"):
        SafetensorsWeights(tmp_path).read("layers.0.mlp.up_proj")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(BrokenWeights, match="not a GGUF file"):
        GgufWeights(tmp_path / "a.gguf")


def test_a_table_is_within_half_a_step() -> None:
    weight = np.random.default_rng(0).normal(size=(40, 91)).astype(np.float32)
    weight[3] = 0
    table, scales = quantise8(weight)
    assert table.shape == (40, 91) and scales.shape == (40,)
    assert (np.abs(table * scales[:, None] - weight) <= 0.501 * scales[:, None]).all()
    np.testing.assert_array_equal(table[3], 0)


@pytest.mark.parametrize("size", [32, 48, 576, 7])
def test_a_rotation_keeps_products_and_spreads_outliers(size: int) -> None:
    rotation, rng = Rotation(size), np.random.default_rng(1)
    a, b = rng.normal(size=(5, size)).astype(np.float32), rng.normal(size=(3, size)).astype(np.float32)
    np.testing.assert_allclose(rotation.apply(a) @ rotation.apply(b).T, a @ b.T, atol=1e-4)
    one_channel = np.eye(size, dtype=np.float32)
    assert np.abs(rotation.apply(one_channel)).max() <= 1.5 / np.sqrt(size)
    if (block := hadamard_block(size)) > 1:
        np.testing.assert_allclose(rotate_blocks(a, block) @ rotate_blocks(b, block).T, a @ b.T, atol=1e-4)


def written(path: Path, value: float) -> None:
    save_file({"model.embed_tokens.weight": torch.full((2, 2), value)}, path)


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    """Whatever else lies there, under a name that comes before or behind."""
    for name, value in (("a.safetensors", 1.0), ("model-1.safetensors", 2.0), ("z.safetensors", 3.0)):
        written(tmp_path / name, value)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}))
    assert SafetensorsWeights(tmp_path).read("embed_tokens")[0, 0] == 2
    written(tmp_path / "model.safetensors", 4.0)
    assert SafetensorsWeights(tmp_path).read("embed_tokens")[0, 0] == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"weight_map": {"model.embed_tokens.weight": "model-2.safetensors"}}', "model-2.safetensors is missing"),
        ('{"weight_map": 3}', "not an index"), ("[]", "not an index"), ("{", "not an index"),
        ('{"weight_map": {"a": "../../outside.safetensors"}}', "outside.safetensors is missing"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_followed_is_named(tmp_path: Path, text: str, says: str) -> None:
    written(tmp_path / "model-1.safetensors", 1.0)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BrokenWeights, match=says):
        SafetensorsWeights(tmp_path)
