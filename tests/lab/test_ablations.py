"""Recipes side by side on a tiny target."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from export.train.features import Sequence
from lab.ablations import RECIPES, as_markdown, drawn_from, main

NAMES = ["MoA", "fused MoA", "EAGLE-3"]


@pytest.fixture
def arguments(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a small run; its work lies under tmp_path."""
    monkeypatch.setattr("lab.ablations.keep_freed_memory", lambda: None)  # would last for the whole test run
    rng = random.Random(0)
    with (tmp_path / "answers.jsonl").open("w") as file:
        for index in range(40):
            ids = [rng.randrange(4, 60) for _ in range(rng.randint(8, 20))]
            file.write(json.dumps({"index": index, "ids": ids, "answers": [[4, len(ids)]]}) + "\n")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"category": "qa", "turns": ["w7 w8 w9"]}) + "\n")
    options = {"answers": "answers.jsonl", "work-dir": "work", "json": "figures.json"}
    paths = [text for name, value in options.items() for text in (f"--{name}", str(tmp_path / value))]
    given = ["--target", str(folder / "target"), "--conversations", "30", "--max-new-tokens", "12"]
    return [*paths, *given, "--batch-tokens", "64", "--draft-vocab", "64"]


def test_recipes_are_trained_judged_and_continued(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--recipes", *NAMES, "--seeds", "0", "1"]) == 0
    first = json.loads((tmp_path / "figures.json").read_text())["recipes"]
    assert list(first) == NAMES and all(list(runs) == ["0", "1"] for runs in first.values())
    weights = {path.read_bytes() for path in (tmp_path / "work" / "ablations").glob("*/drafter.safetensors")}
    assert len(weights) == 2 * len(NAMES)
    for runs in first.values():
        for run in runs.values():
            assert 0 <= run["top1"] <= run["top4"] <= 1 and run["steps"] > 1 and run["held_out"] == 3
            assert "tau" not in run
            assert len(run["by_lag"]["top1"]) == 6
    assert not list((tmp_path / "work").glob("checkpoint-*"))

    asked = ["--prompts", str(tmp_path / "asked.jsonl")]
    assert main([*arguments, *asked, "--recipes", *NAMES, "--seeds", "0"]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    for name, runs in figures["recipes"].items():
        assert runs["1"] == first[name]["1"] and first[name]["0"].items() <= runs["0"].items()
        assert 1.0 <= runs["0"]["tau"] <= 12 and 1.0 <= runs["0"]["tau_unfed"] <= 12
    assert as_markdown(figures) in capsys.readouterr().out

    assert main([*arguments, "--epochs", "2"]) == 1
    assert "is of other options" in capsys.readouterr().err


def test_a_table_has_means_and_spread() -> None:
    lags = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    run = {"top1": 0.3, "top4": 0.5, "tau": 2.0, "by_lag": {"top1": lags}}
    other = {"top1": 0.5, "top4": 0.5, "by_lag": {"top1": [2 * lag for lag in lags]}}
    table = as_markdown({"recipes": {"both": {"0": run, "1": other}}}).split("\n")
    assert table[2] == (
        "| both | 2 | 0.400 ± 0.141 | 0.500 ± 0.000 | 2.00 |  | 0.150 | 0.300 | 0.450 | 0.600 | 0.750 | 0.900 |"
    )


def test_fewer_conversations_are_the_first_of_more() -> None:
    sequences = [Sequence([number], ()) for number in range(30)]
    some, more = drawn_from(sequences, 10), drawn_from(sequences, 20)
    assert some == more[:10] != sequences[:10] and len({each.ids[0] for each in more}) == 20


@pytest.mark.parametrize(
    ("given", "text"),
    [([], "give --answers to train on"), (["--recipes", "magic"], "no such recipe: magic; see --list")],
)
def test_bad_input_is_one_line(
    arguments: list[str], given: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *given] if given else []) == 1
    assert text in capsys.readouterr().err


def test_list_names_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == list(RECIPES)
