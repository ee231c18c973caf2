"""Recipes side by side on a tiny target."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lab.ablations import RECIPES, as_markdown, main

NAMES = ["default recipe", "target's last layer reused (paper's TLI 1)", "own text at last", "small LM"]


@pytest.fixture
def arguments(folder: Path, tmp_path: Path) -> list[str]:
    """Of a small run; its work lies under tmp_path."""
    rng = random.Random(0)
    with (tmp_path / "answers.jsonl").open("w") as file:
        for index in range(40):
            ids = [rng.randrange(4, 60) for _ in range(rng.randint(8, 20))]
            file.write(json.dumps({"index": index, "ids": ids, "answers": [[4, len(ids)]]}) + "\n")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"category": "qa", "turns": ["w7 w8 w9"]}) + "\n")
    options = {"answers": "answers.jsonl", "prompts": "asked.jsonl", "work-dir": "work", "json": "figures.json"}
    paths = [text for name, value in options.items() for text in (f"--{name}", str(tmp_path / value))]
    return [*paths, "--target", str(folder / "target"), "--epochs", "1", "--max-new-tokens", "12"]


def test_recipes_are_trained_judged_and_gone_on_with(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "own text at last", ("moa", {}, {"own_text": 4}))
    assert main([*arguments, "--recipes", *NAMES[:2]]) == 0
    first = json.loads((tmp_path / "figures.json").read_text())["recipes"]
    assert main([*arguments, "--recipes", *NAMES]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = figures["recipes"]
    assert list(rows) == NAMES and {name: rows[name] for name in first} == first
    for name in NAMES:
        assert 1.0 <= rows[name]["tau"] <= 12 and rows[name]["perplexity_alone"] > 1
        assert rows[name]["tau_by_group"]["qa"] == rows[name]["tau"]
    assert rows[NAMES[0]]["held_out_top1"] <= rows[NAMES[0]]["held_out_top4"]
    assert as_markdown(figures) in capsys.readouterr().out

    assert main([*arguments, "--recipes", "default recipe", "--seed", "1"]) == 1
    assert "is of other options" in capsys.readouterr().err


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
