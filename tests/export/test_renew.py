"""`python -m export renew`: a drafter of an older version goes on with its target, and with no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from cloud.settings import Settings
from cloud.torch_engine.loading import load_model
from export.__main__ import main
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.identity import former_identity, model_identity
from outrider_core.models.moa_config import DrafterError
from tests.tiny import save_tiny_target, tiny_drafter_config, tiny_model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    save_tiny_target(tmp_path / "target", tiny_model(dtype=torch.float32))
    return tmp_path / "target"


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    """As version 0.2 wrote it."""
    config, tensors = tiny_drafter_config(tiny_model(dtype=torch.float32), former_identity(target))
    save_drafter(tmp_path / "drafter", config, tensors, {"target": str(target), "steps": 7})
    return tmp_path / "drafter"


def serve(drafter: Path, target: Path) -> str:
    """What a verifier of these would tell in its handshake."""
    settings = Settings(model=str(target), drafter=str(drafter), kv_tokens=4096, device="cpu")
    return load_model(settings).target_hash


def error(capsys: pytest.CaptureFixture[str]) -> str:
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_what_is_refused_tells_the_command_that_mends_it(
    drafter: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DrafterError) as caught:
        serve(drafter, target)
    told = str(caught.value).partition("run once: python -m ")[2].split()
    bundle = ["bundle", "--drafter", str(drafter), "--target", str(target), "--output-dir", str(tmp_path / "bundle")]
    assert main([*bundle, "--dry-run"]) == 1
    assert error(capsys) == f"error: {caught.value}"
    before = load_drafter(drafter)
    assert told[0] == "export" and main(told[1:]) == 0
    assert capsys.readouterr().out.endswith("next: python -m export bundle, for each of its bundles\n")
    assert serve(drafter, target) == model_identity(target)
    config, tensors, _ = load_drafter(drafter)
    assert config.target_hash == model_identity(target) and tensors.keys() == before[1].keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before[1].items())
    assert json.loads((drafter / "config.json").read_text())["notes"] == {"target": str(target), "steps": 7}


def test_the_target_is_the_one_that_the_notes_name(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["renew", str(drafter)]) == 0
    capsys.readouterr()
    before = (drafter / "config.json").stat().st_mtime_ns
    assert main(["renew", str(drafter)]) == 0
    assert capsys.readouterr().out == f"{drafter} names its target as it is; nothing to do\n"
    assert (drafter / "config.json").stat().st_mtime_ns == before


def test_a_drafter_of_another_target_stays_as_it_is(
    drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_target(tmp_path / "other", tiny_model(seed=1, dtype=torch.float32))
    before = (drafter / "config.json").read_bytes()
    assert main(["renew", str(drafter), "--target", str(tmp_path / "other")]) == 1
    assert error(capsys).endswith("give the one it was trained on with --target")
    assert (drafter / "config.json").read_bytes() == before


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"target_hash": "0", "notes": 3}'])
def test_a_folder_that_is_no_drafter(drafter: Path, capsys: pytest.CaptureFixture[str], text: str | None) -> None:
    if text is None:
        shutil.rmtree(drafter)
    else:
        (drafter / "config.json").write_text(text)
    assert main(["renew", str(drafter)]) == 1
    assert error(capsys).endswith("so this is not a drafter folder")
