"""Each rule's probability of a guess, on a tiny target and drafter."""

from __future__ import annotations

import json
import random
from math import log
from pathlib import Path

import pytest
import torch

from lab.lookup_mix import RULES, Score, main
from outrider_core.drafting.lookup import Guess


def test_rules_are_compared_on_text_and_on_answers(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    with (tmp_path / "answers.jsonl").open("w") as file:
        for index in range(12):
            ids = [rng.randrange(4, 20) for _ in range(40)]
            file.write(json.dumps({"index": index, "ids": ids, "answers": [[4, len(ids)]]}) + "\n")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"turns": ["w7 w8 w9 w7 w8"]}) + "\n")
    folders = ["--target", str(folder / "target"), "--drafter", str(folder / "moa")]
    figures = tmp_path / "figures.json"
    for given in (["--answers", "answers.jsonl"], ["--prompts", "asked.jsonl"]):
        assert main([given[0], str(tmp_path / given[1]), *folders, "--count", "6", "--json", str(figures)]) == 0
        found = json.loads(figures.read_text())
        assert list(found["rules"]) == list(RULES) and found["positions"] > 0
        assert all(0.0 <= row["first_1"] <= row["first_4"] <= 1.0 for row in found["rules"].values())


def test_it_says_what_to_give(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(folder / "target"), "--drafter", str(folder / "moa")]) == 1
    assert "give --answers" in capsys.readouterr().err


def test_a_score_is_of_the_whole_distribution() -> None:
    """What a guess gets the others lose, in proportion."""
    log_q = torch.tensor([0.5, 0.3, 0.2]).log()
    for wanted, left in ((0, 0.25), (1, 0.15), (2, 0.6)):
        score = Score()
        score.add(log_q, 2, 0.6, wanted)
        assert score.loss == pytest.approx(-log(left), abs=1e-5)
        assert score.first == {1: int(wanted == 2), 2: int(wanted != 1), 4: 1}
    assert RULES["apart"](Guess(2, 0.5), 0.2) == pytest.approx(0.6)
    assert RULES["together"](Guess(2, 0.5), 0.5) == pytest.approx(0.5)
