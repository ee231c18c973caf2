"""Exports that are refused: one line, and nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from export.__main__ import main
from export.bundle import bundle as module
from export.bundle import comparison, plan, to_executorch
from export.bundle.bundle import write_bundle
from export.options import OptionsError
from outrider_core.drafting.bundle import BundleError, open_bundle
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.moa_config import DrafterError
from outrider_core.targets.source import TargetError, TargetSource
from tests.export.conftest import (
    Folders,
    Reused,
    command,
    folders_of,
    snapshot,
)
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model


@pytest.fixture
def refused(folders: Folders, copied: Path, reused: Reused) -> Callable[..., str]:
    """Call it with options: the one line with which writing fails, for a new folder and over a bundle."""

    def refused(target: Path | None = None, **options: Any) -> str:
        before, beside, lines = snapshot(copied), folders_of(copied), []
        for output in (copied.parent / "new", copied):
            with pytest.raises((OptionsError, BundleError, TargetError, DrafterError)) as caught:
                source = {} if target is None else {"target": TargetSource.resolve(str(target))}
                write_bundle(replace(folders.options(output), **source, **options))
            lines.append(str(caught.value))
            assert folders_of(copied) == beside
        assert snapshot(copied) == before
        assert all(line and "\n" not in line for line in lines)
        return lines[-1]

    return refused


Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"format": ("tflite",)}, "--format tflite is unknown (known: onnx, executorch)"),
        ({"format": ()}, "--format must name each engine once, such as onnx,executorch"),
        ({"format": ("onnx", "onnx")}, "--format must name each engine once, such as onnx,executorch"),
        ({"quant": "int2"}, "--quant 'int2' is unknown; give one of fp32, fp16, int8, int4, 8da8w, 8da4w, none"),
        ({"embedding_bits": 5}, "--embedding-bits 5 is unknown; give one of 4, 8, 16, 32"),
        ({"backend": "vulkan"}, "--backend 'vulkan' is unknown; give one of xnnpack, coreml, qualcomm"),
        ({"max_context": 0}, "--max-context 0: the drafter was made for 1..256 tokens"),
        ({"max_context": 257}, "--max-context 257: the drafter was made for 1..256 tokens"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_options_that_cannot_be(refused: Refused, reused: Reused, options: dict[str, Any], line: str) -> None:
    assert refused(**options) == line
    assert not reused.lowered


@pytest.mark.parametrize(
    ("options", "system", "line"),
    [
        ({"quant": "fp16"}, "Linux", "--format executorch has no fp16; choose fp32, int8, int4"),
        ({"backend": "coreml"}, "Linux", "run the same command on macOS with Xcode"),
        ({"backend": "qualcomm"}, "Linux", "install it and set QNN_SDK_ROOT, or use --backend xnnpack"),
        ({"backend": "coreml", "quant": "int8"}, "Darwin", "chooses its own precision; use --quant fp32"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_backends_that_cannot_be(
    refused: Refused, reused: Reused, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], system: str, line: str
) -> None:
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    monkeypatch.setattr(to_executorch.platform, "system", lambda: system)
    assert line in refused(format=("executorch",), **options)
    assert not reused.lowered


def test_exporter_of_executorch_not_installed(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    assert refused(format=("executorch",)).endswith("run: pip install 'outrider[export]'")


def test_too_little_disk(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40_000_000))
    line = refused()
    assert "has 0.0 GB free" in line and line.endswith("free some or choose another --output-dir")


def test_too_little_memory(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900_000_000))
    line = refused()
    assert "GB of memory are needed, 0.9 GB are free" in line and "close other programs" in line


def own_target(folders: Folders, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of target and drafter that a test may change."""
    return (
        Path(shutil.copytree(folders.target, tmp_path / "target")),
        Path(shutil.copytree(folders.drafter, tmp_path / "drafter")),
    )


def test_drafter_of_another_target(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "target", tiny_model(seed=1, dtype=torch.float32))
    line = refused(target=tmp_path / "target")
    assert f"was trained on target {folders.target_hash}, but" in line and other in line


def test_target_without_chat_template(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    target, drafter = own_target(folders, tmp_path)
    (target / "chat_template.jinja").unlink()
    line = refused(target=target, drafter=drafter)
    assert line.endswith("no chat template; put a chat_template.jinja into its folder")
    (target / "chat_template.jinja").write_text("{{ 1 + messages }}")
    assert "its chat template fails: TypeError" in refused(target=target, drafter=drafter)


def test_target_without_eos(refused: Refused, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    target_hash = save_tiny_target(tmp_path / "target", model)
    save_tiny_drafter(tmp_path / "drafter", model, target_hash)
    line = refused(target=tmp_path / "target", drafter=tmp_path / "drafter")
    assert line.endswith("names no eos_token_id, so no answer would ever end; add it to config.json")


def test_drafter_of_other_shapes(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    save_tiny_drafter(tmp_path / "drafter", tiny_model(hidden=16, dtype=torch.float32), folders.target_hash)
    assert "the target's embedding is (199, 32)" in refused(drafter=tmp_path / "drafter")


def test_drafter_of_no_numbers(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    config, tensors, _ = load_drafter(folders.drafter)
    tensors["self_attention.mlp.up_proj.weight"][3, 4] = torch.inf
    save_drafter(tmp_path / "drafter", config, tensors, {})
    line = refused(drafter=tmp_path / "drafter")
    assert line.startswith("self_attention.mlp.up_proj.weight holds infinite") and "train or import again" in line


def test_missing_drafter(refused: Refused, tmp_path: Path) -> None:
    assert refused(drafter=tmp_path / "nowhere").endswith("so this is not a drafter folder")


def test_missing_target(refused: Refused, tmp_path: Path) -> None:
    assert "no such folder" in refused(target=tmp_path / "nowhere")


def test_tokenizer_without_a_fast_file(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    target, drafter = own_target(folders, tmp_path)
    (target / "tokenizer.json").unlink()
    assert "there is no tokenizer.json" in refused(target, drafter=drafter)


@pytest.mark.parametrize("engine", ["onnx", "executorch"])
def test_operator_that_cannot_be_lowered(
    folders: Folders, reused: Reused, copied: Path, exact: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reused.wrong[engine] = torch.onnx.OnnxExporterError("No translation for\n\n  aten.fancy\nSee the <long> report\n")
    assert main(command(folders, copied, "--format", engine)) == 1
    name = {"onnx": "drafter.onnx", "executorch": "drafter.pte"}[engine]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: lowering to {name} failed: OnnxExporterError: No translation for aten.fancy See the <long> report"
    )
    assert snapshot(copied) == snapshot(exact) and folders_of(copied) == {"copied"}


@pytest.mark.parametrize(("place", "name"), [(0, "top1"), (1, "top4")])
def test_engine_that_disagrees_is_not_shipped(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, place: int, name: str
) -> None:
    bounds = [0.0, 0.0]
    bounds[place] = 1.01
    monkeypatch.setitem(module.AGREEMENT, 32, tuple(bounds))
    assert refused() == (
        f"drafter.onnx: {name} agreement is 1.000, its bound is 1.01; nothing was written. Try --quant int8 or fp32, "
        "or more --embedding-bits"
    )


def test_engine_of_low_acceptance_is_not_shipped(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"prompts": 1, "max_new_tokens": 8, "eager": {"tau": 2.0, "rounds": 3},
               "engines": {"onnx": {"tau": 1.0, "ratio": 0.5, "rounds": 6}}}  # fmt: skip
    monkeypatch.setattr(comparison, "check_acceptance", lambda *_: figures)
    assert refused(check=True).startswith("drafter.onnx: acceptance ratio is 0.500, its bound is 0.97; nothing was")


def test_engine_with_other_metadata_is_not_shipped(refused: Refused) -> None:
    assert refused(max_context=100).endswith(
        "drafter.onnx says get_max_context_len is 256, the manifest 100; export the bundle again"
    )


def test_bundle_that_does_not_open_is_one_line(
    folders: Folders, copied: Path, reused: Reused, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, too, reports what the reader says of a bundle that was just written."""
    monkeypatch.setattr(module, "open_bundle", lambda folder: open_bundle(folder / "nowhere"))
    assert main(command(folders, copied)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert list(copied.parent.iterdir()) == [copied]
