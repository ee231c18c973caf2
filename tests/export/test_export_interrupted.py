"""An interrupted export continues, and a failed one leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from export.__main__ import main
from export.bundle import bundle as module
from export.bundle import comparison
from export.bundle.bundle import DRAFT_IDS_FILE, write_bundle
from outrider_core.drafting.bundle import MANIFEST, SERVER_HALF_FILE, BundleError, open_bundle
from outrider_core.targets.source import TargetSource
from tests.export.conftest import (
    ENGINE_FILE,
    Folders,
    Reused,
    command,
    folders_of,
    snapshot,
)
from tests.power import forgotten, watched_disk
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model


@pytest.fixture
def interrupted(folders: Folders, reused: Reused, copied: Path) -> Path:
    """A bundle that was about to be replaced when Ctrl-C came, behind the first of two engines."""
    reused.wrong["executorch"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        write_bundle(folders.options(copied, "fp32", "onnx", "executorch"))
    return copied


def test_interrupt_keeps_finished_engines_aside(interrupted: Path, exact: Path) -> None:
    assert snapshot(interrupted) == snapshot(exact)
    assert folders_of(interrupted) == {"copied", ".copied.partial"}
    kept = interrupted.parent / ".copied.partial" / ENGINE_FILE
    assert kept.read_bytes() == (exact / ENGINE_FILE).read_bytes()


@pytest.mark.slow
def test_the_same_command_goes_on(
    interrupted: Path, folders: Folders, reused: Reused, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    assert reused.lowered == ["onnx", "executorch", "executorch"]
    assert "continuing the interrupted export" in capsys.readouterr().err
    assert open_bundle(interrupted).manifest.engines.keys() == {"onnx", "executorch"}
    report = json.loads((interrupted / "report.json").read_text())
    assert report["engines"]["onnx"]["lowering"]["opset"] == 21
    assert folders_of(interrupted) == {"copied"}


OTHERS = [{"quant": "int8"}, {"embedding_bits": 8}, {"max_context": 200}, {"drafter": "other"}, {"target": "other"}]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_another_export_starts_afresh(
    interrupted: Path, folders: Folders, reused: Reused, tmp_path: Path, change: dict[str, Any]
) -> None:
    if "other" in change.values():
        model = tiny_model(seed=1, dtype=torch.float32)
        target_hash = save_tiny_target(tmp_path / "target", model)
        save_tiny_drafter(tmp_path / "drafter", model, target_hash)
        change = {"target": TargetSource.resolve(str(tmp_path / "target")), "drafter": tmp_path / "drafter"}
    reused.wrong["executorch"] = KeyboardInterrupt()
    options = folders.options(interrupted, "fp32", "onnx", "executorch")
    with pytest.raises(KeyboardInterrupt):
        write_bundle(replace(options, **change))
    assert reused.lowered == ["onnx", "executorch"] * 2


def test_another_version_of_an_exporter_starts_afresh(
    interrupted: Path, folders: Folders, reused: Reused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "versions", lambda: {"torch": "0.1"})
    reused.wrong["executorch"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    assert reused.lowered == ["onnx", "executorch"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["zeros", "cut", "note"])
def test_a_finished_engine_that_a_power_cut_damaged_is_lowered_again(
    interrupted: Path, folders: Folders, reused: Reused, damage: str
) -> None:
    aside, before = interrupted.parent / ".copied.partial", len(reused.lowered)
    engine, note = aside / ENGINE_FILE, aside / "work" / "onnx.json"
    if damage == "zeros":
        forgotten(engine, engine.stat().st_size // 2, 64)
    elif damage == "cut":
        os.truncate(engine, engine.stat().st_size - 1)
    else:
        note.write_bytes(bytes(note.stat().st_size))
    with watched_disk() as disk:
        write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    assert reused.lowered[before:] == ["onnx", "executorch"]
    assert disk.unsettled == [] and ENGINE_FILE in disk.renamed and interrupted.name in disk.renamed
    assert open_bundle(interrupted).manifest.engines.keys() == {"onnx", "executorch"}


@pytest.mark.slow
def test_engine_that_is_not_wanted_any_more_is_not_shipped(interrupted: Path, folders: Folders, reused: Reused) -> None:
    write_bundle(folders.options(interrupted, "fp32", "executorch"))
    bundle = open_bundle(interrupted)
    assert bundle.manifest.engines.keys() == {"executorch"}
    assert ENGINE_FILE not in bundle.manifest.files and not (interrupted / ENGINE_FILE).exists()


@pytest.mark.slow
def test_files_of_a_killed_export_are_not_shipped(interrupted: Path, folders: Folders, reused: Reused) -> None:
    for name in (".level1-drafter.onnx", "drafter.pte.new", "report.json.new"):
        (interrupted.parent / ".copied.partial" / name).write_bytes(b"half of it")
    write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    listed = open_bundle(interrupted).manifest.files.keys() | {MANIFEST, SERVER_HALF_FILE, "report.json", "report.md"}
    assert {path.name for path in interrupted.iterdir()} == listed
    assert not any("level1" in name or "new" in name for name in listed)


@pytest.mark.parametrize(
    "step", [(module, "_report"), (comparison, "passages_for"), (module, "save_file")], ids=lambda step: str(step[1])
)
def test_interrupt_behind_lowering(
    folders: Folders, reused: Reused, copied: Path, exact: Path, monkeypatch: pytest.MonkeyPatch, step: Any
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(folders.options(copied))
    assert snapshot(copied) == snapshot(exact)
    write_bundle(folders.options(copied))
    assert reused.lowered == ["onnx"]
    open_bundle(copied)
    assert folders_of(copied) == {"copied"}


def test_interrupt_while_the_old_bundle_is_removed(
    folders: Folders, reused: Reused, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def interrupt(path: Path, *arguments: Any, **options: Any) -> None:
        if not (path / MANIFEST).is_file():
            return remove(path, *arguments, **options)
        (path / DRAFT_IDS_FILE).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(folders.options(copied))
    open_bundle(copied)
    write_bundle(folders.options(copied))
    assert folders_of(copied) == {"copied"}


def test_half_an_engine_is_lowered_again(folders: Folders, reused: Reused, tmp_path: Path, exact: Path) -> None:
    reused.wrong["onnx"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        write_bundle(folders.options(tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()
    write_bundle(folders.options(tmp_path / "bundle"))
    assert reused.lowered == ["onnx", "onnx"]
    assert snapshot(tmp_path / "bundle")[ENGINE_FILE] == (exact / ENGINE_FILE).read_bytes()


def test_command_says_how_to_go_on(folders: Folders, reused: Reused, tmp_path: Path, capsys: Any) -> None:
    reused.wrong["onnx"] = KeyboardInterrupt()
    assert main(command(folders, tmp_path / "bundle")) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; run the same command again to continue"


def test_an_error_leaves_nothing_to_go_on_with(interrupted: Path, folders: Folders, reused: Reused) -> None:
    reused.wrong["executorch"] = RuntimeError("no")
    with pytest.raises(BundleError):
        write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    assert folders_of(interrupted) == {"copied"}


def test_two_exports_at_once(folders: Folders, reused: Reused, copied: Path, exact: Path) -> None:
    lock = copied.parent / ".copied.partial.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BundleError, match=r"^another export is writing .*; wait for it or stop it$"):
            write_bundle(folders.options(copied))
    assert snapshot(copied) == snapshot(exact) and not reused.lowered
    write_bundle(folders.options(copied))  # the lock of a process that is gone counts no more
    assert folders_of(copied) == {"copied"}
