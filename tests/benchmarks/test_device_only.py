"""Figures of writing alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.device_only import PLAIN, main, show, summarise


def test_each_group_is_compared_with_plain_writing() -> None:
    plain = [([1] * 10, 2.0), ([2] * 10, 1.0), ([3] * 10, 1.0)]
    faster = [([1] * 10, 1.0), ([2] * 10, 1.0), ([4] * 10, 2.0)]
    row = summarise(faster, plain, ["maths", "chat", "chat"])
    assert row["by_group"] == {"chat": pytest.approx(0.667), "maths": 2.0}
    assert row["same_as_plain"] == 2 and row["tokens_per_second"] == 7.5 and row["over_plain"] == 1.0


def test_the_table_names_every_row_and_the_groups() -> None:
    answers = [([1] * 10, 2.0)]
    rows = {name: summarise(answers, answers, ["chat"]) for name in (PLAIN, "trees")}
    figures = {"understudy": 8, "temperature": 0.0, "machine": "here", "questions": 1, "rows": rows}
    written = io.StringIO()
    show(figures, Console(file=written, width=100))
    text = written.getvalue()
    assert "8 bits" in text and "1 of 1" in text and "trees over plain: chat 1.00" in text


def test_a_bundle_without_an_understudy_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "why"}\n')
    assert main(["--prompts", str(questions), "--bundle", str(tmp_path / "none")]) == 1
    assert "manifest.json" in capsys.readouterr().err
