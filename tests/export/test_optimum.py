"""`optimum-cli export outrider` is `python -m export bundle` under another name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.conftest import Folders
from tests.waiting import HANG

CLI = Path(sys.executable).with_name("optimum-cli")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(CLI), "export", "outrider", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)


def test_help_lists_the_same_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from export.__main__ import main

    with pytest.raises(SystemExit):
        main(["bundle", "--help"])
    ours, theirs = capsys.readouterr().out, run(tmp_path, "--help").stdout
    options = {word.strip(",]") for word in ours.split() if word.startswith("--")}
    assert len(options) >= 11
    assert options <= {word.strip(",[]") for word in theirs.replace("[", " ").split()}


@pytest.mark.slow
def test_export_writes_a_bundle_that_opens(folders: Folders, tmp_path: Path) -> None:
    from outrider_core.drafting.bundle import open_bundle

    where = ["--target", folders.target, "--drafter", folders.drafter, "--output-dir", "bundle"]
    result = run(tmp_path, *where, "--quant", "fp32")
    assert result.returncode == 0, result.stderr
    assert open_bundle(tmp_path / "bundle").manifest.engines["onnx"].quant == "fp32"


def test_errors_are_one_line_and_a_status(folders: Folders, tmp_path: Path) -> None:
    where = ["--target", folders.target, "--drafter", tmp_path / "nowhere", "--output-dir", "bundle"]
    result = run(tmp_path, *where)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in result.stderr
