"""Checkpoints that cannot be imported: one line each, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from outrider_core.models.drafter_files import load_drafter
from tests.export.checkpoints import HEAD_DIM, HIDDEN, SHAPES, THETA, VOCAB, WIDTH, Place, port_config, refusal, shard
from tests.tiny import tiny_model

Refuse = Callable[..., str]


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_not_opened(place: Place, file: str) -> None:
    place.write()
    (place.source / "model.safetensors").unlink()
    (place.source / file).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    text = refusal(place)
    assert "no .safetensors weights there" in text
    assert "safetensors.torch.save_file" in text


@pytest.mark.parametrize("name", SHAPES)
def test_missing_reference_tensor(place: Place, name: str) -> None:
    del place.tensors[name]
    place.write()
    text = refusal(place)
    assert (
        (f"no tensor {name}" in text) if name == "Ekv2E.weight" else (f"tensor {name} " in text and "missing" in text)
    )


@pytest.mark.parametrize("name", [n for n in SHAPES if not n.endswith(("k_proj.weight", "gate_proj.weight"))])
def test_tensor_of_another_shape(place: Place, name: str) -> None:
    first, *rest = SHAPES[name]
    place.tensors[name] = torch.zeros(first + 1, *rest)
    place.write()
    text = refusal(place)
    assert f"tensor {name} has shape {[first + 1, *rest]}, expected {[first, *rest]}" in text


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        (
            "self_attention.self_attn.k_proj.weight",
            (HEAD_DIM + 1, HIDDEN),
            "9 rows, which is not a multiple of the head width 8",
        ),
        ("self_attention.self_attn.k_proj.weight", (0, HIDDEN), "has 0 rows"),
        ("self_attention.self_attn.k_proj.weight", (16,), "expected two dimensions"),
        ("self_attention.self_attn.k_proj.weight", (3 * HEAD_DIM, HIDDEN), "sa_kv_heads 3 must divide"),
        ("self_attention.self_attn.k_proj.weight", (4 * HEAD_DIM, HIDDEN), "v_proj.weight has shape [16, 64]"),
        ("cross_attention.self_attn.k_proj.weight", (HEAD_DIM, HIDDEN + 1), "has shape [8, 65], expected [8, 64]"),
        ("layer_self_attention.self_attn.k_proj.weight", (6, WIDTH), "not a multiple of the head width 4"),
        ("cross_attention.mlp.gate_proj.weight", (57, HIDDEN), "up_proj.weight has shape [56, 64], expected [57, 64]"),
        ("cross_attention.mlp.gate_proj.weight", (56, 63), "has shape [56, 63], expected [56, 64]"),
    ],
)  # fmt: skip
def test_widths_that_do_not_fit(place: Place, name: str, shape: tuple[int, ...], part: str) -> None:
    place.tensors[name] = torch.zeros(shape)
    place.write()
    assert part in refusal(place)


@pytest.mark.parametrize("layers", [1, 3])
def test_target_layer_inference(place: Place, layers: int) -> None:
    place.config["target_layer_inference"] = layers
    place.write()
    text = refusal(place)
    assert f"last {layers} layers" in text and "target_layer_inference" in text


def test_without_layer_self_attention(place: Place) -> None:
    place.config = {**port_config(place.target), "disable_LSA": True}
    place.tensors = {n: t for n, t in place.tensors.items() if not n.startswith(("layer_self_attention", "Ekv2E"))}
    place.write()
    assert "disable_LSA" in refusal(place)


@pytest.mark.parametrize(
    "name",
    [
        "self_attention.self_attn.q_proj.bias", "layer_self_attention.self_attn.v_proj.bias",
        "cross_attention.self_attn.o_proj.bias", "self_attention.mlp.down_proj.bias",
    ],
)  # fmt: skip
def test_biases(place: Place, name: str) -> None:
    place.tensors[name] = torch.zeros(4)
    place.write()
    text = refusal(place)
    assert name in text and "no biases" in text


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("spec_model_fc.weight", "does not belong to"), ("null_row", "does not belong to"),
        ("other.self_attention.self_attn.q_proj.weight", "does not belong to"),
        ("self_attention.self_attn.q_norm.weight", "is in no MoA block"),
        ("module.Ekv2E.weight", "2 tensors Ekv2E.weight"),
    ],
)  # fmt: skip
def test_unknown_tensors(place: Place, name: str, part: str) -> None:
    place.tensors[name] = torch.zeros(4)
    place.write()
    assert part in refusal(place)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0}}, "yarn"),
    ],
)
def test_rotary_scaling_of_the_checkpoint(place: Place, config: dict[str, Any], kind: str) -> None:
    place.config |= config
    place.write()
    assert f"{place.source.name}: rotary scaling {kind!r}" in refusal(place)


def test_rotary_scaling_of_the_target(place: Place, tmp_path: Path) -> None:
    place.write()
    config = json.loads((place.target / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": THETA, **LLAMA3}
    place.target = tmp_path / "scaled"
    place.target.mkdir()
    (place.target / "config.json").write_text(json.dumps(config))
    assert "the target: rotary scaling 'llama3'" in refusal(place)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 128), ("num_attention_heads", 4), ("num_hidden_layers", 4), ("num_key_value_heads", 4),
        ("vocab_size", 62), ("rms_norm_eps", 1e-5), ("rope_theta", 500000.0), ("rope_theta", "much"), ("head_dim", 16),
        ("model_type", "qwen2"),
    ],
)  # fmt: skip
def test_checkpoint_of_another_target(place: Place, key: str, value: Any) -> None:
    place.config[key] = value
    place.write()
    assert f"its config.json says {key} {value}, but the target has" in refusal(place)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("kv_hidden_size", 64, "the target has 32"), ("self_attention_num_key_value_heads", 4, "its tensors have 2"),
        ("cross_attention_intermediate_size", 6144, "its tensors have 56"),
        ("layer_self_attention_num_key_value_heads", 8, "its tensors have 4"), ("num_attention_heads", 4, "has 8"),
    ],
)  # fmt: skip
def test_port_config_that_contradicts(place: Place, key: str, value: int, part: str) -> None:
    place.config = {**port_config(place.target), key: value}
    place.write()
    text = refusal(place)
    assert f"says {key} {value}" in text and part in text


def test_other_activation(place: Place) -> None:
    place.config["hidden_act"] = "gelu"
    place.write()
    assert "hidden_act is 'gelu'" in refusal(place)


def test_heads_that_do_not_cut_the_keys_and_values(tmp_path: Path) -> None:
    model = tiny_model(layers=2, hidden=48, heads=6, kv_heads=2, vocab=VOCAB, dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    place = Place(tmp_path, model, tmp_path / "target").write()
    assert "lsa_heads 6, the target's, must cut 32" in refusal(place)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_no_numbers(place: Place, value: float) -> None:
    place.tensors["cross_attention.mlp.up_proj.weight"][3, 5] = value
    place.write()
    text = refusal(place)
    assert "cross_attention.mlp.up_proj.weight" in text and f"holds {value:g}" in text


def test_values_beyond_half_precision(place: Place) -> None:
    place.tensors = {name: tensor.bfloat16() for name, tensor in place.tensors.items()}
    place.tensors["cross_attention.mlp.up_proj.weight"][3, 5] = 1e5
    place.write().run()
    assert load_drafter(place.output)[1]["cross_attention.mlp.up_proj.weight"].max() > 65504


def test_quantised_weights(place: Place) -> None:
    place.tensors["Ekv2E.weight"] = place.tensors["Ekv2E.weight"].to(torch.int8)
    place.write()
    assert "tensor Ekv2E.weight is I8" in refusal(place)


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_broken_checkpoint_config(place: Place, content: str) -> None:
    path = place.write().source / "config.json"
    path.write_text(content)
    assert "config.json" in refusal(place)


def test_truncated_weights(place: Place) -> None:
    path = place.write().source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "is not a readable safetensors file" in refusal(place)


def test_several_files_without_an_index(place: Place) -> None:
    shard(place.write().source, place.tensors).unlink()
    assert "3 .safetensors files" in refusal(place)


def test_missing_shard(place: Place) -> None:
    shard(place.write().source, place.tensors)
    (place.source / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(place)


def test_index_that_lists_what_is_not_there(place: Place) -> None:
    index = shard(place.write().source, place.tensors)
    listed = json.loads(index.read_text())
    listed["weight_map"]["Ekv2E.bias"] = listed["weight_map"]["self_attention.mlp.up_proj.weight"]
    index.write_text(json.dumps(listed))
    assert "lacks Ekv2E.bias" in refusal(place)


@pytest.mark.parametrize("shards", [{"Ekv2E.weight": "../model.safetensors"}, {"Ekv2E.weight": 3}, [], None])
def test_index_that_points_elsewhere(place: Place, shards: Any) -> None:
    index = shard(place.write().source, place.tensors)
    index.write_text(json.dumps({"weight_map": shards}))
    assert "weight_map must map" in refusal(place)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c"])
def test_no_such_folder(place: Place, name: str) -> None:
    assert refusal(place, source=name) == f"{name}: no such folder"


def test_a_file_is_no_checkpoint(place: Place) -> None:
    assert "is a file; name the folder" in refusal(place, source=place.write().source / "model.safetensors")


def test_unreachable_hub(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert refusal(place, source="some/checkpoint").endswith("the model hub gave nothing: no route")


@pytest.mark.parametrize("content", ['{"model_type": "gpt2"}', "{", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_target_that_cannot_be_used(place: Place, tmp_path: Path, content: str) -> None:
    place.write()
    place.target = tmp_path / "bad"
    place.target.mkdir()
    (place.target / "config.json").write_text(content)
    assert str(place.target) in refusal(place)
