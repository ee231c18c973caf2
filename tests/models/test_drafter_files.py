"""Drafter folders: what is written comes back, hashes, and files that cannot be used."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE, read_drafter
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.moa import SERVER_PREFIXES, MoA, device_half, server_half
from outrider_core.models.moa_config import DrafterError
from tests.models.odd_moa import ODD, random_moa, random_sequence
from tests.tiny import tiny_drafter_config, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "drafter", ODD, random_moa().trained(), {"note": "random"})
    return tmp_path / "drafter"


def test_save_and_load_round_trip(folder: Path) -> None:
    config, tensors, _ = load_drafter(folder)
    assert config == ODD
    expected = random_moa().trained()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        half = expected[name].half().float() if expected[name].is_floating_point() else expected[name]
        torch.testing.assert_close(tensor, half, rtol=0, atol=0)


def test_drafter_without_a_null_row_goes_through_its_folder(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    config = replace(tiny_drafter_config(model)[0], null_row=False)
    moa = MoA(config)
    save_drafter(tmp_path, config, moa.trained(), {})
    loaded, tensors, _ = load_drafter(tmp_path)
    assert loaded == config and "null_row" not in tensors
    assert device_half(loaded, tensors, model).null_row is None


def test_weights_are_half_precision_on_disk_and_leave_the_target_out(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS_FILE)
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert kinds.pop("draft_ids") == torch.int32
    assert set(kinds.values()) == {torch.float16}
    assert not any(name.startswith(("embedding", "head")) for name in stored)


def test_halves_from_a_folder_equal_the_trained_drafter(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    config, tensors = tiny_drafter_config(model)
    save_drafter(tmp_path, config, tensors, {})
    config, tensors, _ = load_drafter(tmp_path)
    moa = MoA(config)
    moa.adopt(model, tensors["draft_ids"])
    moa.server.load_state_dict({k: v for k, v in tensors.items() if k in moa.server.state_dict()})
    moa.device_half.load_state_dict({k: v for k, v in tensors.items() if k in moa.device_half.state_dict()}, False)
    for built, trained in (
        (server_half(config, tensors), moa.server),
        (device_half(config, tensors, model), moa.device_half),
    ):
        assert built.state_dict().keys() == trained.state_dict().keys()
        for name, tensor in built.state_dict().items():
            torch.testing.assert_close(tensor, trained.state_dict()[name], rtol=0, atol=0)
        assert not built.training and not any(p.requires_grad for p in built.parameters())


def test_server_half_needs_its_own_tensors_only(folder: Path) -> None:
    config, tensors, _ = load_drafter(folder)
    encoder = {k: v for k, v in tensors.items() if k.startswith(SERVER_PREFIXES)}
    assert len(encoder) < len(tensors)
    _, kv = random_sequence(ODD, 3, 1, torch.float32)
    rows = server_half(config, encoder)(kv, torch.arange(3))
    torch.testing.assert_close(rows, server_half(config, tensors)(kv, torch.arange(3)), rtol=0, atol=0)


def test_adopted_embedding_and_head_are_the_targets() -> None:
    model = tiny_model(dtype=torch.float32)
    config, _ = tiny_drafter_config(model)
    moa, ids = MoA(config), torch.arange(64) * 3
    moa.adopt(model, ids)
    torch.testing.assert_close(moa.device_half.head.weight.detach(), model.lm_head.weight[ids], rtol=0, atol=0)
    torch.testing.assert_close(moa.device_half.embedding.weight.detach(), model.model.embed_tokens.weight)
    assert moa.device_half.draft_ids.tolist() == ids.tolist()
    assert not moa.device_half.head.weight.requires_grad and not moa.device_half.embedding.weight.requires_grad


def test_drafter_hash_is_stable_and_ignores_notes(folder: Path, tmp_path: Path) -> None:
    save_drafter(tmp_path / "again", ODD, random_moa().trained(), {"other": "notes"})
    first, again = load_drafter(folder)[2], load_drafter(tmp_path / "again")[2]
    assert first == again == load_drafter(folder)[2]
    assert len(first) == 16


@pytest.mark.parametrize("name", ["Ekv2E.weight", "null_row", "draft_ids", "self_attention.mlp.up_proj.weight"])
def test_drafter_hash_counts_every_tensor(folder: Path, name: str) -> None:
    before = load_drafter(folder)[2]
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, folder / WEIGHTS_FILE)
    assert load_drafter(folder)[2] != before


@pytest.mark.parametrize(
    "change", [{"rope_theta": 501.0}, {"target_layers": [0, 1, 3]}, {"target_hash": "other"}, {"null_row": False}]
)
def test_drafter_hash_counts_the_config(folder: Path, change: dict[str, Any]) -> None:
    before = load_drafter(folder)[2]
    (folder / CONFIG_FILE).write_text(json.dumps({**asdict(ODD), **change}))
    assert load_drafter(folder)[2] != before


def refusal(folder: Path) -> str:
    with pytest.raises(DrafterError) as caught:
        config, tensors, _ = load_drafter(folder)
        server_half(config, tensors)
        model = SimpleNamespace(weight=torch.zeros(ODD.vocab_size, ODD.hidden_size))
        device_half(config, tensors, SimpleNamespace(
            get_input_embeddings=lambda: model, get_output_embeddings=lambda: model
        ))  # fmt: skip
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_folder_without_a_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert refusal(folder) == f"{folder}: no {name} there, so this is not a drafter folder"


@pytest.mark.parametrize("content", ["{", "[]", "null", '"text"'])
def test_broken_config(folder: Path, content: str) -> None:
    (folder / CONFIG_FILE).write_text(content)
    assert "broken drafter files" in refusal(folder)


def test_config_without_a_field(folder: Path) -> None:
    values = {k: v for k, v in asdict(ODD).items() if k not in ("heads", "sa_mlp")}
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    assert refusal(folder) == "drafter config lacks heads, sa_mlp"


def test_truncated_drafter_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-10])
    assert "broken drafter files" in refusal(folder)


@pytest.mark.parametrize("name", ["Ekv2E.bias", "null_row", "draft_ids"])
def test_missing_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors[name]
    save_file(tensors, folder / WEIGHTS_FILE)
    assert name in refusal(folder)


def test_weights_of_another_width(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps({**asdict(ODD), "sa_mlp": 30}))
    assert "do not fit" in refusal(folder)


@pytest.mark.parametrize("token", [-1, ODD.vocab_size])
def test_draft_id_outside_the_vocabulary(folder: Path, token: int) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors["draft_ids"][3] = token
    save_file(tensors, folder / WEIGHTS_FILE)
    assert "draft_ids" in refusal(folder)


def test_the_confidence_temperature_is_no_part_of_the_hash(folder: Path) -> None:
    path = folder / "config.json"
    values, before = json.loads(path.read_text()), load_drafter(folder)[2]
    path.write_text(json.dumps(values | {"confidence_temperature": 0.8}))
    config, _, surer = load_drafter(folder)
    assert config.confidence_temperature == 0.8 and surer == before


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numpy_reads_what_torch_wrote(tmp_path: Path, kind: torch.dtype) -> None:
    """Values and hash of every number format, without torch."""
    wanted = {k: v.to(kind) if v.is_floating_point() else v for k, v in random_moa().trained().items()}
    save_drafter(tmp_path, ODD, wanted, {}, as_given=True)
    config, arrays, drafter_hash = read_drafter(tmp_path)
    assert config == ODD and arrays.keys() == wanted.keys()
    for name, tensor in load_file(tmp_path / WEIGHTS_FILE).items():
        assert arrays[name].dtype == (np.float32 if tensor.is_floating_point() else np.int32)
        np.testing.assert_array_equal(arrays[name], tensor.float().numpy() if tensor.is_floating_point() else tensor)
    assert load_drafter(tmp_path)[2] == drafter_hash


def test_a_number_format_that_is_not_read(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors["null_row"] = tensors["null_row"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / WEIGHTS_FILE)
    assert "broken drafter files: a tensor is stored as F8_E4M3" in refusal(folder)
