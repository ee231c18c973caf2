"""`python -m export` as a user runs it, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import export
from export.__main__ import main
from models.moa import load_drafter
from tests.export.conftest import Folders

ROOT = Path(export.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "export", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["bundle", "--help"]], ids=" ".join)
def test_help(command: list[str]) -> None:
    result = run(*command)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("usage: python -m export")


@pytest.mark.parametrize("command", [[], ["bundle"], ["train", "--output-dir", "x"], ["fly"]], ids=" ".join)
def test_usage_errors(command: list[str]) -> None:
    result = run(*command)
    assert result.returncode == 2 and result.stderr.startswith("usage: ")


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


def test_output_that_is_no_bundle_is_one_line(folders: Folders) -> None:
    result = run("bundle", "--target", folders.target, "--drafter", folders.drafter, "--output-dir", folders.target)
    assert one_error_line(result).endswith("choose an empty or new --output-dir")


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
            "epochs": epochs, "batch-size": 4, "max-new-tokens": 12, "slots": 5, "layers": 2, "draft-vocab": 64,
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
    assert (notes["answers"], notes["steps"], notes["prompt_files"]) == (12, 3, ["prompts.jsonl"])
    assert "12 answers" in result.stdout and f"wrote {training.output}" in result.stdout


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
    assert notes["steps"] == 450
    (answers,) = training.work.glob("answers-*.jsonl")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(12))
    # the first row answered is held out; every other one is learnt once an epoch
    all_steps = epochs * sum(len(row["prompt"]) + len(row["answer"]) for row in rows[1:])
    assert 0 < notes["last_run"]["tokens"] < all_steps


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "the prompt files hold no prompt"),
        ('{"text": 1}\n', {}, "not a JSON object with `prompt` or `turns`"),
        ('{"prompt": "w5 w6 w7 w8 w9"}\n', {"max-prompt-tokens": 4}, "--max-prompt-tokens"),
    ],
    ids=["empty", "broken", "too long"],
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
