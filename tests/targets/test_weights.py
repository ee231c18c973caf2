"""Tensors are read without torch, bit for bit; damaged files get one clear line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from outrider_core.models.target import model_folder
from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.quantise import Rotation, hadamard_block, quantise8, rotate_blocks
from outrider_core.targets.source import DEFAULT_TARGET, TargetSource
from outrider_core.targets.weights import GgufWeights, folder_weights
from tests.targets.gguf_files import LLAMA, random_arrays, write_folder

CONFIG = TargetConfig.from_json(LLAMA)


def test_every_number_format(tmp_path: Path) -> None:
    arrays = {name: torch.from_numpy(each) for name, each in random_arrays(CONFIG).items()}
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    mixed = {name: each.to(kinds[index % 4]) for index, (name, each) in enumerate(arrays.items())}
    write_folder(tmp_path, LLAMA, {})
    stored = {f"{'' if name == 'lm_head' else 'model.'}{name}.weight": each for name, each in mixed.items()}
    save_file(stored, tmp_path / "model.safetensors")
    weights, config = folder_weights(tmp_path)
    for name in config.tensors():
        np.testing.assert_array_equal(weights.read(name), mixed[name].float().numpy())


@pytest.mark.slow
def test_a_gguf_file_holds_what_transformers_makes_of_it() -> None:
    path = TargetSource.resolve(DEFAULT_TARGET).path
    ours = GgufWeights(path)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    folder, config = folder_weights(model_folder(TargetSource.resolve()))
    names = ("embed_tokens", "norm", "layers.3.input_layernorm", "layers.29.mlp.down_proj")
    for name in (*names, *(f"layers.7.self_attn.{part}_proj" for part in "qkvo")):
        np.testing.assert_array_equal(ours.read(name), theirs[f"model.{name}.weight"].numpy())
        np.testing.assert_array_equal(ours.read(name), folder.read(name))
    assert ours.config.tie_word_embeddings and config.tie_word_embeddings


def changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", LLAMA, random_arrays(CONFIG))


def refused(folder: Path) -> str:
    """The one line with which weights are refused, when they are opened or read."""
    with pytest.raises((BrokenTarget, UnsupportedTarget)) as caught:
        weights, config = folder_weights(folder)
        for name in config.tensors():
            weights.read(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def header(entry: Any) -> bytes:
    text = json.dumps(entry).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 40, "not a safetensors file"),
        (struct.pack("<Q", 4) + b"{{{{", "header is damaged"),
        (header([1]), "header is damaged"),
        (header({"model.norm.weight": {"dtype": "F32", "shape": [1]}}), "header is damaged"),
        (header({"model.norm.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "header is damaged"),
        (header({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), "header is damaged"),
        (header({"model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), "cut short"),
        (header({"a": ONE, "b": ONE}) + bytes(4), "header is damaged"),  # in the same place
        (header({"a": {**ONE, "data_offsets": [4, 8]}}) + bytes(8), "header is damaged"),
        (header({}), "there is no tensor model.embed_tokens.weight"),
    ],
)
def test_damage_is_named(folder: Path, content: bytes, says: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert says in refused(folder)


def test_missing_files_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BrokenTarget, match="cut short"):
        folder_weights(folder)  # before anything is read
    path.unlink()
    assert "there are no *.safetensors files" in refused(folder)
    (folder / "a.safetensors").symlink_to(folder / "nowhere")
    assert "a.safetensors cannot be read: No such file" in refused(folder)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_attention_heads": 2}, "tensor model.layers.0.self_attn.k_proj.weight has the shape [16, 32]; by its"),
        ({"num_key_value_heads": 3}, "4 heads, 3 key and value heads of 8 channels do not fit together"),
        ({"num_hidden_layers": None}, "config.json: num_hidden_layers is None, not a positive whole number"),
        ({"rms_norm_eps": "small"}, "config.json: rms_norm_eps is 'small', not a number"),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling is 'linear', not an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": "four"}},
            "no rotary positions follow from theta 10000.0 and {'factor': 'four'}",
        ),
        ({"rope_theta": 0}, "no rotary positions follow from theta 0"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "no rotary positions follow from theta 10000.0"),
        ({"vocab_size": 299}, "tensor model.embed_tokens.weight has the shape [300, 32]; by its"),
        ({"attention_bias": True}, "there is no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"num_hidden_layers": 1}, "it has a tensor model.layers.1."),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "of their own for layers of full_attention"),
        ({"tie_word_embeddings": True}, "ties the LM head to the embedding, but the weights hold another one"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_line(folder: Path, values: dict[str, Any], says: str) -> None:
    assert says in refused(changed(folder, **values))


@pytest.mark.parametrize("text", ["[]", "{", "null", '"llama"', "[" * 100_000])
def test_a_configuration_that_is_none_is_one_line(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


def test_a_tensor_that_nothing_reads_is_refused_by_name(tmp_path: Path) -> None:
    """A scale beside weights among them, which would be served without it."""
    arrays = random_arrays(CONFIG)
    extra = {**arrays, "layers.0.self_attn.q_proj.weight_scale": np.ones(1, np.float32)}
    write_folder(tmp_path, LLAMA, extra)
    assert "it has a tensor model.layers.0.self_attn.q_proj.weight_scale" in refused(tmp_path)


def test_an_adapter_is_not_left_out(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "it holds an adapter (adapter_config.json), which is not applied; merge it first" in refused(folder)


def test_a_head_that_is_stored_and_tied_may_be_the_embedding(tmp_path: Path) -> None:
    arrays = random_arrays(CONFIG)
    write_folder(tmp_path, {**LLAMA, "tie_word_embeddings": True}, {**arrays, "lm_head": arrays["embed_tokens"]})
    assert folder_weights(tmp_path)[1].tie_word_embeddings


def test_values_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    arrays = random_arrays(CONFIG)
    arrays["layers.1.mlp.down_proj"][1, 2] = np.inf
    write_folder(tmp_path, LLAMA, arrays)
    assert "layers.1.mlp.down_proj holds values that are not numbers" in refused(tmp_path)


def test_mistral_without_its_key_and_value_heads_has_eight(tmp_path: Path) -> None:
    values = {**LLAMA, "model_type": "mistral", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4}
    config = TargetConfig.from_json(values)
    del values["num_key_value_heads"]
    assert TargetConfig.from_json(values) == config


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "qwen2", "sliding_window": 64},
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
        {"model_type": "mistral", "sliding_window": 256},
        {"model_type": "mistral", "sliding_window": None},
    ],
)
def test_windows_that_never_bite_are_none(values: dict[str, Any]) -> None:
    assert TargetConfig.from_json({**LLAMA, **values}).windowed_layers == ()


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


def save(path: Path, value: float, part: str = "") -> None:
    """A model file whose norm holds `value`, or of a model only the tensors whose names contain `part`."""
    arrays = random_arrays(CONFIG) | {"norm": np.full(32, value, np.float32)}
    write_folder(path.parent, LLAMA, {name: each for name, each in arrays.items() if part in name}, path.name)


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    """Whatever else lies there, under a name that comes before or behind."""
    for name, value in (("a.safetensors", 1.0), ("model-1.safetensors", 2.0), ("z.safetensors", 3.0)):
        save(tmp_path / name, value)
    assert "is in a.safetensors and in model-1.safetensors; remove" in refused(tmp_path)
    names = [f"{'' if name == 'lm_head' else 'model.'}{name}.weight" for name in CONFIG.tensors()]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    assert folder_weights(tmp_path)[0].read("norm")[0] == 2
    # and which of them a tensor is read from
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "z.safetensors") | {names[0]: "a.safetensors"}}))
    assert folder_weights(tmp_path)[0].read("norm")[0] == 3
    save(tmp_path / "model.safetensors", 4.0)
    assert folder_weights(tmp_path)[0].read("norm")[0] == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"weight_map": {"model.embed_tokens.weight": "model-2.safetensors"}}', "model-2.safetensors is missing"),
        ('{"weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}', "there is no tensor"),
        ('{"weight_map": 3}', "not an index"), ("[]", "not an index"), ("{", "not an index"),
        ('{"weight_map": {"a": "../../outside.safetensors"}}', "outside.safetensors is missing"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_followed_is_named(tmp_path: Path, text: str, says: str) -> None:
    save(tmp_path / "model-1.safetensors", 1.0)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert says in refused(tmp_path)
