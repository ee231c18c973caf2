"""`python -m export` as a user runs it, in processes of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import export
from edge_runtime.bundle import open_bundle
from export import bundle as room
from export.__main__ import main
from models.moa import DeviceHalf, load_drafter
from tests.export.conftest import Bundles, Folders, snapshot

ROOT = Path(export.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "export", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)


COMMANDS = ["train", "import", "bundle", "check", "bench"]


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
        until = time.monotonic() + 200
        while not (aside / "work" / "onnx.json").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        second = main_in_process(*command)
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
    assert second == (1, f"error: another export is writing to {tmp_path}; wait for it or stop it")
    assert snapshot(output) == before
    lowered = (aside / "drafter.onnx").read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "write_onnx", no_call)
        patch.setattr(room, "write_executorch", copies(bundles("fp32", "executorch")))
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
ours = {"edge_runtime", "export", "models", "protocol", "cloud"}
assert not ours & {name.partition(".")[0] for name in sys.modules}
np.save(sys.argv[2], logits)
"""


@pytest.mark.parametrize("engine", ["onnx", "executorch"])
def test_a_strangers_script_runs_a_step(bundles: Bundles, half: DeviceHalf, tmp_path: Path, engine: str) -> None:
    """Stock runtime, the engine file alone in a folder, what it says of itself, and nothing of ours."""
    name = {"onnx": "drafter.onnx", "executorch": "drafter.pte"}[engine]
    shutil.copy(bundles("fp32", engine) / name, tmp_path)
    script = tmp_path / "stranger.py"
    script.write_text(STRANGERS[engine] + STRANGERS_END)
    result = subprocess.run(
        [sys.executable, "-I", str(script), name, "logits.npy"], cwd=tmp_path, env={"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    empty, row = torch.zeros(0, 2, 8), torch.zeros(1, 2, 8)
    mask = torch.full((3, 3), -1e9).triu(1)
    with torch.inference_mode():
        inputs = torch.tensor([5, 6, 7]), torch.arange(3), torch.tensor([2]), mask, empty, empty, row, row
        exact = half(*inputs)[0].numpy()
    assert np.abs(np.load(tmp_path / "logits.npy") - exact).max() < 1e-4


class Training:
    """A training command over 12 prompts in its own folders."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.target, self.folder, self.work, self.output = target, folder, folder / "work", folder / "drafter"
        self.prompts = folder / "prompts.jsonl"
        rows = [{"prompt": " ".join(f"w{4 + (7 * i + j) % 190}" for j in range(2 + i % 5))} for i in range(12)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(self, epochs: int, **options: object) -> list[object]:
        values = {
            "target": self.target, "prompts": self.prompts, "output-dir": self.output, "work-dir": self.work,
            "epochs": epochs, "batch-tokens": 64, "max-new-tokens": 12, "max-tokens": 64, "slots": 5,
            "follow-ups": 0, "sampled": 0, "layers": 2, "draft-vocab": 64,
            "device": "cpu", "threads": 1, **options,
        }  # fmt: skip
        return ["train", *(part for name, value in values.items() for part in (f"--{name}", value))]

    @property
    def training_began(self) -> bool:
        """Features are filled by the first steps of training."""
        return any(any(path.read_bytes()) for path in self.work.glob("*.filled"))


@pytest.fixture
def training(folders: Folders, tmp_path: Path) -> Training:
    return Training(folders.target, tmp_path)


def test_train_writes_a_drafter_folder(training: Training, folders: Folders) -> None:
    result = run(*training.arguments(1))
    assert result.returncode == 0, result.stderr
    config, tensors, _ = load_drafter(training.output)
    assert config.target_hash == folders.target_hash and len(config.target_layers) == 2
    assert 3 in tensors["draft_ids"].tolist()
    notes = json.loads((training.output / "config.json").read_text())["notes"]
    assert (notes["conversations"], notes["prompt_files"]) == (12, ["prompts.jsonl"]) and notes["steps"] >= 3
    assert "12 conversations, " in result.stdout and f"wrote {training.output}" in result.stdout


def test_interrupted_training_goes_on_where_it_stopped(training: Training) -> None:
    epochs = 150  # 450 steps: long enough to be interrupted, short enough to be finished
    command = [sys.executable, "-m", "export", *map(str, training.arguments(epochs))]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 120
        while not training.training_began and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "interrupted; run the same command again to go on from here"
    assert "Traceback" not in errors
    assert len(list(training.work.glob("checkpoint-*.safetensors"))) == 1
    assert not training.output.exists()

    result = run(*training.arguments(epochs))
    assert result.returncode == 0, result.stderr
    load_drafter(training.output)
    notes = json.loads((training.output / "config.json").read_text())["notes"]
    assert notes["steps"] >= 450
    (answers,) = training.work.glob("answers-*.jsonl")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(12))
    # the first conversation is held out; every other one is learnt once an epoch
    all_steps = epochs * sum(len(row["ids"]) for row in rows if row["index"])
    assert 0 < notes["last_run"]["tokens"] < all_steps


def test_training_without_prompts_of_ones_own(training: Training) -> None:
    """The target writes the prompts; nothing else is needed."""
    arguments = training.arguments(1)
    at = arguments.index("--prompts")
    arguments[at : at + 2] = ["--self-prompts", 30, "--own-text", 2]
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    notes = json.loads((training.output / "config.json").read_text())["notes"]
    assert (notes["self_prompts"], notes["prompt_files"]) == (30, []) and notes["conversations"] > 2


def test_two_ranks_train_one_drafter(training: Training) -> None:
    """torchrun: each answers and learns its share; the drafter is one. A run by one rank goes on from their files."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "export"]
    command = [*torchrun, *map(str, training.arguments(2))]
    both = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("next: python -m export bundle") == both.stdout.count("work folder") == 1
    parts = sorted(training.work.glob("answers-*.jsonl"))
    indices = [[json.loads(line)["index"] for line in part.read_text().splitlines()] for part in parts]
    assert len(parts) == 2 and sorted(indices[0] + indices[1]) == list(range(12)) and all(indices)
    notes = json.loads((training.output / "config.json").read_text())["notes"]
    alone = run(*training.arguments(2, **{"output-dir": training.folder / "alone", "learning-rate": 0.001}))
    assert alone.returncode == 0, alone.stderr
    again = json.loads((training.folder / "alone" / "config.json").read_text())["notes"]
    assert again["conversations"] == 12 and again["steps"] in (2 * notes["steps"], 2 * notes["steps"] + 1)
    assert [part.read_text() for part in parts] == [
        part.read_text() for part in sorted(training.work.glob("answers-*.jsonl"))
    ]


def test_training_on_given_answers(training: Training) -> None:
    """An answers file is enough, also one that was cut short."""
    assert run(*training.arguments(1)).returncode == 0
    (answers,) = training.work.glob("answers-*.jsonl")
    some = training.folder / "some.jsonl"
    some.write_text("\n".join(answers.read_text().splitlines()[:9]) + "\n{half a li")
    arguments = training.arguments(1)
    at = arguments.index("--prompts")
    arguments[at : at + 2] = ["--answers", some]
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads((training.output / "config.json").read_text())["notes"]["conversations"] == 9
    arguments[at + 1] = training.folder / "nowhere.jsonl"
    result = run(*arguments)
    assert result.returncode == 1 and result.stderr.endswith("nowhere.jsonl is no file\n")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "there is no prompt; give --prompts with files that hold some, or --self-prompts"),
        ('{"prompt": "w5"}\n', {"max-tokens": 100000}, "--max-tokens 100000 is more than the target's context of"),
        ('{"text": 1}\n', {}, "not a JSON object with `prompt` or `turns`"),
        ('{"prompt": "w5 w6 w7 w8 w9"}\n', {"max-prompt-tokens": 4}, "--max-prompt-tokens"),
    ],
    ids=["empty", "longer than the context", "broken", "too long"],
)
def test_prompts_that_cannot_be_used_are_one_line(
    training: Training,
    content: str,
    options: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    training.prompts.write_text(content)
    monkeypatch.setattr("export.__main__.keep_freed_memory", lambda: None)  # would last for the whole test run
    assert main(list(map(str, training.arguments(1, threads=0, **options)))) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not training.output.exists()
