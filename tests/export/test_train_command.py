"""`python -m export train` as a user runs it, in processes of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from export.__main__ import main
from export.train.corpus import pack
from outrider_core.drafting.ngrams import NgramTable
from outrider_core.models.drafter_files import load_drafter
from tests.export.conftest import ENVIRONMENT, ROOT, Folders, run
from tests.waiting import HANG, until


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
        """Features are written by the steps of the first epoch; most of it is over."""
        return len(list(self.work.glob("features-*/*.u8"))) >= 8


@dataclass(frozen=True)
class Trained:
    """A drafter after one epoch, the answers that it learnt from, and what the command said."""

    drafter: Path
    answers: Path
    said: str


@pytest.fixture
def training(folders: Folders, tmp_path: Path) -> Training:
    return Training(folders.target, tmp_path)


@pytest.fixture(scope="module")
def trained(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """For tests that begin where another training has ended; they only read it."""
    training = Training(folders.target, tmp_path_factory.mktemp("trained"))
    result = run(*training.arguments(1))
    assert result.returncode == 0, result.stderr
    (answers,) = training.work.glob("answers-*.jsonl")
    return Trained(training.output, answers, result.stdout)


@pytest.mark.slow
def test_train_writes_a_drafter_folder(trained: Trained, folders: Folders) -> None:
    config, tensors, _ = load_drafter(trained.drafter)
    assert config.target_hash == folders.target_hash and len(config.target_layers) == 2
    assert 3 in tensors["draft_ids"].tolist()
    notes = json.loads((trained.drafter / "config.json").read_text())["notes"]
    assert (notes["conversations"], notes["prompt_files"]) == (12, ["prompts.jsonl"]) and notes["steps"] >= 3
    assert "12 conversations, " in trained.said and f"wrote {trained.drafter}" in trained.said


@pytest.mark.slow
def test_interrupted_training_goes_on_where_it_stopped(training: Training) -> None:
    epochs = 150  # 450 steps: long enough to be interrupted, short enough to be finished
    # the main stage alone, of which the second run has to do less
    arguments = training.arguments(epochs, **{"own-text": 0})
    command = [sys.executable, "-m", "export", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert until(lambda: training.training_began or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "interrupted; run the same command again to continue"
    assert "Traceback" not in errors
    assert len(list(training.work.glob("checkpoint-*.safetensors"))) == 1
    assert not training.output.exists()

    result = run(*arguments)
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


@pytest.mark.slow
def test_training_without_prompts_of_ones_own(training: Training) -> None:
    """The target writes the prompts; nothing else is needed."""
    arguments = training.arguments(1)
    at = arguments.index("--prompts")
    arguments[at : at + 2] = ["--self-prompts", 90, "--own-text", 2]
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    notes = json.loads((training.output / "config.json").read_text())["notes"]
    assert (notes["self_prompts"], notes["prompt_files"]) == (90, []) and notes["conversations"] > 2
    table = NgramTable.load(training.output, load_drafter(training.output)[0].vocab_size)
    assert table is not None  # of so few answers it may have no run


@pytest.mark.slow
def test_a_drafter_is_measured_without_training(training: Training, trained: Trained) -> None:
    first, weights, _ = load_drafter(trained.drafter)
    arguments = training.arguments(0, **{"start-from": trained.drafter})
    at = arguments.index("--prompts")
    arguments[at : at + 2] = ["--answers", trained.answers]
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    config, same, _ = load_drafter(training.output)
    assert config == first and all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    notes = json.loads((training.output / "config.json").read_text())["notes"]
    assert notes["steps"] == 0 and len(notes["held_out_agreement_by_lag"]["top1"]) == 6
    assert notes["calibration"] is None  # too little is held out


@pytest.mark.slow
def test_the_last_stage_alone(training: Training, trained: Trained) -> None:
    """From an earlier drafter, the text that it writes itself and as much of the target's; nothing before."""
    first, _, _ = load_drafter(trained.drafter)
    options = {"start-from": trained.drafter, "own-text": 6}
    arguments = training.arguments(0, **options)
    at = arguments.index("--prompts")
    arguments[at : at + 2] = ["--answers", trained.answers]
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    sure = load_drafter(training.output)[0]
    assert replace(sure, confidence_temperature=1.0) == replace(first, confidence_temperature=1.0)
    notes = json.loads((training.output / "config.json").read_text())["notes"]
    assert notes["own_text"] == notes["conversations"] == 6  # texts that it does not draw are not read
    assert len(list(training.work.glob("features-*/*.u8"))) <= 12
    assert 0 < notes["steps"] <= 12 and notes["last_run"]["tokens"] > 0
    assert (training.output / "drafter.safetensors").read_bytes() != (
        trained.drafter / "drafter.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_rounds_on_policy(training: Training, trained: Trained) -> None:
    """Each draws other answers, and writes with what the round before has left; a second run takes up all of it."""
    options = {"start-from": trained.drafter, "own-text": 5, "on-policy": 2}
    folders = [training.folder / name for name in ("first", "second")]
    for folder in folders:
        arguments = training.arguments(0, **options, **{"output-dir": folder})
        at = arguments.index("--prompts")
        arguments[at : at + 2] = ["--answers", trained.answers]
        result = run(*arguments)
        assert result.returncode == 0, result.stderr
    written = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in training.work.glob("*.alone.jsonl")
    ]
    indices = [{row["index"] for row in rows} for rows in written]
    assert [len(rows) for rows in written] == [5, 5] and not indices[0] & indices[1]
    first, second = (json.loads((folder / "config.json").read_text())["notes"] for folder in folders)
    assert first["on_policy"] == 2 and first["steps"] == second["steps"] > 1
    assert first["last_run"]["tokens"] > 0 == second["last_run"]["tokens"]
    one, other = ((folder / "drafter.safetensors").read_bytes() for folder in folders)
    assert one == other != (trained.drafter / "drafter.safetensors").read_bytes()


@pytest.mark.slow
def test_two_ranks_train_one_drafter(training: Training) -> None:
    """torchrun: each answers and learns its share; the drafter is one. A run by one rank goes on from their files."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "export"]
    command = [*torchrun, *map(str, training.arguments(2))]
    both = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)
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


@pytest.mark.slow
def test_training_on_given_answers(training: Training, trained: Trained) -> None:
    """An answers file is enough, also one that was cut short."""
    some = training.folder / "some.jsonl"
    some.write_text("\n".join(trained.answers.read_text().splitlines()[:9]) + "\n{half a li")
    arguments = training.arguments(1)
    at = arguments.index("--prompts")
    arguments[at : at + 2] = ["--answers", some]
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads((training.output / "config.json").read_text())["notes"]["conversations"] == 9
    packed = training.folder / "some.corpus"
    packed.write_bytes(pack(map(json.loads, trained.answers.read_text().splitlines()[:8]), {}))
    before, arguments[at + 1] = packed.read_bytes(), packed
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads((training.output / "config.json").read_text())["notes"]["conversations"] == 8
    assert packed.read_bytes() == before
    arguments[at + 1] = training.folder / "nowhere.jsonl"
    result = run(*arguments)
    assert result.returncode == 2 and result.stderr.endswith("nowhere.jsonl is not a file\n")


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
