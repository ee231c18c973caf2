"""Tensors are read without torch, bit for bit; damaged files get one clear line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider_core.models.target import DEFAULT_TARGET, gguf_of, resolve_target
from outrider_core.targets.quantise import BLOCK, dequantise8, quantise8
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
    ours, theirs = GgufWeights(gguf_of(DEFAULT_TARGET)), SafetensorsWeights(resolve_target(DEFAULT_TARGET))
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
    weight = np.random.default_rng(0).normal(size=(40, 3 * BLOCK - 5)).astype(np.float32)
    weight[3] = 0
    table, scales = quantise8(weight)
    assert table.shape == (40, 3, BLOCK) and scales.shape == (40, 3)
    steps = np.repeat(np.abs(scales), BLOCK, 1)[:, : weight.shape[1]]
    # one step where +128 would be needed: the range reaches one step further on the side of the largest weight
    assert (np.abs(dequantise8(table, scales, weight.shape[1]) - weight) <= 1.001 * steps).all()
    assert np.median(np.abs(dequantise8(table, scales, weight.shape[1]) - weight) / steps) < 0.5
    np.testing.assert_array_equal(dequantise8(table, scales, weight.shape[1])[3], 0)
