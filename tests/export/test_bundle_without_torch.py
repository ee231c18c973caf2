"""Writing a bundle takes no torch: with it and without it the same files come out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors

from outrider_core.drafting.bundle import SERVER_HALF_FILE, open_bundle
from tests.export.conftest import ENVIRONMENT, ROOT, Folders
from tests.waiting import HANG

#: an interpreter in which what the torch extra brings cannot be imported or found
BLOCK = """
import importlib.util, sys
BROUGHT = {"torch", "torchao", "transformers", "accelerate", "executorch", "optimum"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BROUGHT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in BROUGHT else find(name, package)
from export.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def read_safetensors(data: bytes) -> dict[str, Any]:
    return {name: (entry["dtype"], entry["shape"], entry["data"]) for name, entry in safetensors.deserialize(data)}


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK, *map(str, arguments)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip


@pytest.mark.parametrize("quant", ["int8", pytest.param("fp32", marks=pytest.mark.slow)])
def test_the_same_bundle_with_torch_and_without(folders: Folders, tmp_path: Path, quant: str) -> None:
    made = ["bundle", "--target", folders.target, "--drafter", folders.drafter, "--quant", quant, "--no-compare"]
    without = export(*made, "--output-dir", tmp_path / "without")
    assert without.returncode == 0, without.stderr
    plain = subprocess.run(
        [sys.executable, "-m", "export", *map(str, made), "--output-dir", str(tmp_path / "with")],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("without", "with")
    )
    halves = [read_safetensors(files.pop(SERVER_HALF_FILE)) for files in (one, other)]  # its header is in any order
    assert halves[0] == halves[1]
    assert one == other
    assert open_bundle(tmp_path / "without").manifest.engines.keys() == {"onnx"}


def test_what_needs_torch_says_so(folders: Folders, tmp_path: Path) -> None:
    made = ["bundle", "--target", folders.target, "--drafter", folders.drafter, "--output-dir", tmp_path / "bundle"]
    for more in (["--check"], ["--format", "executorch"]):
        done = export(*made, *more)
        assert done.returncode == 1, done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert done.stderr.splitlines()[-1].endswith("run: pip install 'outrider[export]'")
    assert not (tmp_path / "bundle").exists()
