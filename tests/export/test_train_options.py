"""Options of a training run: presets, a file, flags, and what is refused."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from export.__main__ import main
from export.options import OptionsError
from export.train.recipe import TrainSettings
from export.train.train_command import OPTIONS, add_train_options, next_command, read_train_options
from export.train.train_options import LARGE, PRESETS, SMALL, TrainOptions

OUT = Path("drafters/mine")
ROOT = Path(__file__).parents[2]
SHIPPED, CORPUS = ROOT / "drafters/smollm2-135m-instruct-moa", ROOT / "corpora/smollm2-135m-instruct.corpus"


def read(*arguments: str) -> TrainOptions:
    parser = argparse.ArgumentParser()
    add_train_options(parser)
    return read_train_options(parser.parse_args([*arguments, "--output-dir", str(OUT)]))


def test_two_flags_are_enough() -> None:
    rounds = {"own_text": 5000, "on_policy": 2}
    files = Path("a.txt"), Path("b.jsonl")
    assert read("--prompts", *map(str, files)) == TrainOptions(OUT, prompts=files, **rounds)
    assert read("--self-prompts") == TrainOptions(OUT, self_prompts=PRESETS["default"].self_prompts, **rounds)
    assert read("--self-prompts", "7").self_prompts == 7


def test_a_preset_gives_way_to_flags() -> None:
    quick = read("--preset", "quick", "--self-prompts", "--epochs", "3")
    assert (quick.epochs, quick.self_prompts) == (3, PRESETS["quick"].self_prompts)
    assert quick.max_new_tokens == PRESETS["quick"].values["max_new_tokens"] < OPTIONS["max_new_tokens"].default


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_options_and_can_be_carried_out(preset: str) -> None:
    assert PRESETS[preset].values.keys() <= OPTIONS.keys()
    options = read("--preset", preset, "--self-prompts")
    assert options.preset == preset and options.max_new_tokens < options.max_tokens


def test_the_default_preset_is_how_the_shipped_drafter_was_trained() -> None:
    notes = json.loads((SHIPPED / "config.json").read_text())["notes"]
    options = read("--answers", str(CORPUS), "--device", "cuda")
    assert asdict(options.settings(14_523_995)) == notes["settings"]
    assert (options.own_text, options.on_policy) == (notes["own_text"], notes["on_policy"])
    assert read("--self-prompts", "--device", "cpu").settings(14_523_995) == TrainSettings()


def test_a_drafter_that_is_only_measured_learns_nothing() -> None:
    measured = ("--answers", str(CORPUS), "--start-from", str(SHIPPED), "--epochs", "0")
    assert read(*measured).own_text == 0
    assert read(*measured, "--own-text", "7").own_text == 7


def test_the_last_stage_can_be_left_out_and_is_as_it_is_asked_for() -> None:
    asked = [read("--self-prompts", "--own-text", count) for count in ("0", "9")]
    assert [(each.own_text, each.on_policy) for each in asked] == [(0, 1), (9, 1)]


@pytest.mark.parametrize(
    ("device", "tokens", "expected"),
    [("cpu", 9_000_000, SMALL), ("cuda", 9_000_000, LARGE), ("cuda", 8_192_000, LARGE), ("cuda", 8_191_999, SMALL)],
)
def test_a_gpu_takes_larger_steps_of_much_text(device: str, tokens: int, expected: tuple[int, float]) -> None:
    """The default preset has three epochs."""
    settings = read("--self-prompts", "--device", device).settings(tokens)
    assert (settings.batch_tokens, settings.learning_rate) == expected
    own = read("--self-prompts", "--device", device, "--batch-tokens", "99", "--learning-rate", "0.5").settings(tokens)
    assert (own.batch_tokens, own.learning_rate) == (99, 0.5)


def test_flags_win_over_a_file_and_a_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('preset = "quick"\nprompts = ["a.txt"]\nepochs = 9\nlearning-rate = 1\nmax_tokens = 99\n')
    options = read("--config", str(file), "--max-tokens", "100")
    assert options == TrainOptions(
        OUT, "quick", (Path("a.txt"),), epochs=9, learning_rate=1.0, max_tokens=100, max_new_tokens=96, max_prompts=1000
    )
    file.write_text("self-prompts = true\n")
    assert read("--config", str(file)).self_prompts == PRESETS["default"].self_prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "there is no option 'epoch'"),
        ('epochs = "3"', "epochs = '3' has the wrong type; give int"),
        ("epochs = true", "epochs = True has the wrong type"),
        ("prompts = [1]", "has the wrong type; give str"),
        ("epochs = ", "is not a TOML file"),
        ('preset = "huge"', "--preset 'huge' is unknown; give one of quick, default, long"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(text + "\n")
    with pytest.raises(OptionsError) as refused:
        read("--config", str(tmp_path / "train.toml"))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompts, --self-prompts or --answers"),
        (["--self-prompts", "--sampled", "1.5"], "--sampled 1.5 is too large; give 1 or less"),
        (
            ["--self-prompts", "--epochs", "0"],
            "--epochs 0 needs a drafter to begin with; give --start-from",
        ),
        (["--self-prompts", "-1"], "--self-prompts -1 is too small"),
        (
            ["--self-prompts", "--own-text", "0", "--on-policy", "2"],
            "--on-policy is the rounds of --own-text; give both",
        ),
        (["--config", "nowhere.toml"], "--config: nowhere.toml cannot be read: No such file or directory"),
        (["--answers", "nowhere.jsonl"], "--answers: nowhere.jsonl is not a file"),
        (["--self-prompts", "--features", "disk"], "invalid choice: 'disk'"),
    ],
)
def test_bad_options_are_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments, "--output-dir", str(OUT)])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and message in errors.splitlines()[-1]


def test_help_begins_with_an_example_and_describes_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert "python -m export train --prompts" in text[:100]
    assert all(f"--preset {name}: " in text for name in PRESETS)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_next_command_names_a_target_that_is_not_the_default(tmp_path: Path) -> None:
    here = f"python -m export bundle --drafter {OUT} --output-dir build/bundle"
    assert next_command(read("--self-prompts")) == here
    (tmp_path / "config.json").write_text("{}")
    assert next_command(read("--self-prompts", "--target", str(tmp_path))) == here + f" --target {tmp_path}"
