"""`python -m export` as a user runs it, in processes of its own."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.__main__ import main
from export.bundle import bundle as module
from export.bundle import to_executorch
from outrider_core.drafting.bundle import open_bundle
from outrider_core.models.moa import DeviceHalf
from tests.export.conftest import ENVIRONMENT, ROOT, Bundles, Folders, run, snapshot
from tests.waiting import HANG

COMMANDS = ["train", "import", "bundle", "check", "bench", "target"]


@pytest.mark.parametrize("command", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help(command: list[str]) -> None:
    result = run(*command)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("usage: python -m export")


BUNDLE = ["bundle", "--drafter", "x", "--output-dir", "y"]


@pytest.mark.parametrize(
    "command",
    [
        [], ["fly"], ["bundle"], ["check"], ["bench"], ["import", "--source", "x"], ["train", "--prompts", "x"],
        [*BUNDLE, "--quant", "int2"], [*BUNDLE, "--embedding-bits", "5"], [*BUNDLE, "--backend", "vulkan"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_usage_errors(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command)
    shown = capsys.readouterr()
    assert ended.value.code == 2 and shown.err.startswith("usage: ") and not shown.out


def test_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"python -m export {name} " in text


def one_error_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_bad_drafter_path_is_one_line(folders: Folders, tmp_path: Path) -> None:
    missing, output = tmp_path / "no-drafter", tmp_path / "bundle"
    result = run("bundle", "--target", folders.target, "--drafter", missing, "--output-dir", output)
    assert one_error_line(result) == f"error: {missing}: no config.json there, so this is not a drafter folder"
    assert list(tmp_path.iterdir()) == []


def test_formats_are_split_at_commas(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--target", str(folders.target), "--drafter", str(folders.drafter), "--output-dir", str(tmp_path / "b")]
    assert main(["bundle", *where, "--format", "onnx, executorch", "--quant", "8da4w", "--dry-run"]) == 0
    shown = capsys.readouterr().err
    assert "drafter.onnx" in shown and "drafter.pte" in shown and "int4 linears" in shown
    assert main(["bundle", *where, "--format", "onnx,tflite"]) == 1
    assert capsys.readouterr().err == "error: --format tflite is unknown (known: onnx, executorch)\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_killed_export_goes_on(folders: Folders, tmp_path: Path, bundles: Bundles) -> None:
    """While it runs, no other export may write there; after SIGKILL the same command keeps its finished engine."""
    output, aside = tmp_path / "bundle", tmp_path / ".bundle.partial"
    shutil.copytree(bundles("fp16"), output)
    before = snapshot(output)
    command = ["bundle", "--target", str(folders.target), "--drafter", str(folders.drafter), "--format",
               "onnx,executorch", "--quant", "fp32", "--output-dir", str(output)]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "export", *command], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        until = time.monotonic() + HANG
        while not (aside / "work" / "onnx.json").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        second = main_in_process(*command)
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
    assert second == (1, f"error: another export is writing to {tmp_path}; wait for it or stop it")
    assert snapshot(output) == before
    lowered = (aside / "drafter.onnx").read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_onnx", no_call)
        patch.setattr(to_executorch, "write_executorch", copies(bundles("fp32", "executorch")))
        assert main(command) == 0
    assert (output / "drafter.onnx").read_bytes() == lowered
    assert open_bundle(output).manifest.engines.keys() == {"onnx", "executorch"}
    assert list(tmp_path.iterdir()) == [output]


def main_in_process(*command: str) -> tuple[int, str]:
    """Exit status and last line on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = main(list(command))
    return status, errors.getvalue().splitlines()[-1]


def no_call(*_: object) -> None:
    raise AssertionError("a finished engine is lowered again")


def copies(bundle: Path) -> Any:
    def write(half: Any, profile: Any, path: Path, *_: object) -> dict[str, Any]:
        shutil.copy(bundle / path.name, path)
        report = json.loads((bundle / "report.json").read_text())
        lowering: dict[str, Any] = report["engines"]["executorch"]["lowering"]
        return lowering

    return write


#: what somebody writes who has the engine file and its documentation, and nothing else of ours
STRANGERS = {
    "onnx": """
import json, sys
import numpy as np, onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
facts = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
shapes = {value.name: value.shape for value in session.get_inputs()}
assert shapes["sa_keys"][1:] == [facts["get_sa_kv_heads"], facts["get_head_dim"]], shapes
assert shapes["row_keys"][1:] == [facts["get_ca_kv_heads"], facts["get_head_dim"]], shapes
assert [shapes["tokens"][0], shapes["sa_keys"][0], shapes["row_keys"][0]] == ["width", "past", "rows"], shapes
past = np.zeros([0, *shapes["sa_keys"][1:]], np.float32)
row = np.zeros([1, *shapes["row_keys"][1:]], np.float32)
tokens = np.array([5, 6, 7])
mask = np.triu(np.full((3, 3), -1e9, np.float32), 1)
logits, keys, values = session.run(None, {
    "tokens": tokens, "positions": np.arange(3), "wanted": np.array([2]), "sa_mask": mask, "sa_keys": past,
    "sa_values": past, "row_keys": row, "row_values": row,
})
""",
    "executorch": """
import sys
import numpy as np, torch
from executorch.runtime import Runtime

program = Runtime.get().load_program(sys.argv[1])
facts = {name: program.load_method(name).execute([]) for name in program.method_names if name != "forward"}
facts = {name: found[0] if len(found) == 1 else found for name, found in facts.items()}
past = torch.zeros(1, facts["get_sa_kv_heads"], facts["get_head_dim"])
row = torch.zeros(1, facts["get_ca_kv_heads"], facts["get_head_dim"])
mask = torch.full((3, 3), -1e9).triu(1)
mask = torch.cat([torch.full((3, 1), -1e9), mask], 1)
inputs = [torch.tensor([5, 6, 7]), torch.arange(3), torch.tensor([2]), mask, past, past, row, row]
logits, keys, values = (x.numpy() for x in program.load_method("forward").execute(inputs))
""",
}
STRANGERS_END = """
assert logits.shape == (1, facts["get_draft_vocab_size"]) and keys.shape == values.shape, logits.shape
assert keys.shape == (3, facts["get_sa_kv_heads"], facts["get_head_dim"]), keys.shape
ours = {"edge_runtime", "export", "models", "outrider_core", "cloud"}
assert not ours & {name.partition(".")[0] for name in sys.modules}
np.save(sys.argv[2], logits)
"""


@pytest.mark.parametrize("engine", ["onnx", pytest.param("executorch", marks=pytest.mark.slow)])
def test_a_strangers_script_runs_a_step(bundles: Bundles, half: DeviceHalf, tmp_path: Path, engine: str) -> None:
    """Stock runtime, the engine file alone in a folder, what it says of itself, and nothing of ours."""
    name = {"onnx": "drafter.onnx", "executorch": "drafter.pte"}[engine]
    shutil.copy(bundles("fp32", engine) / name, tmp_path)
    script = tmp_path / "stranger.py"
    script.write_text(STRANGERS[engine] + STRANGERS_END)
    result = subprocess.run(
        [sys.executable, "-I", str(script), name, "logits.npy"], cwd=tmp_path, env={"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    empty, row = torch.zeros(0, 2, 8), torch.zeros(1, 2, 8)
    mask = torch.full((3, 3), -1e9).triu(1)
    with torch.inference_mode():
        inputs = torch.tensor([5, 6, 7]), torch.arange(3), torch.tensor([2]), mask, empty, empty, row, row
        exact = half(*inputs)[0].numpy()
    assert np.abs(np.load(tmp_path / "logits.npy") - exact).max() < 1e-4
