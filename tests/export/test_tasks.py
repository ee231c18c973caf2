"""Prompts that are composed of a target's own texts: every kind, the same each time, nothing left open."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from export.train.tasks import KINDS, LANGUAGES, LONG, TaskTexts, compose, main
from tests.tiny import save_tiny_target, tiny_model

PASSAGES = [f"Story {number}. " + "The {fox} jumps over 3 dogs. " * 12 for number in range(20)]
CODES = [f"def f{number}(x):\n    return {{x: {number}}}  # a comment that is long enough\n" for number in range(5)]
QUESTIONS = ["Who was the first to climb it?", "two\nlines?", "Short?"]


@pytest.fixture
def texts() -> TaskTexts:
    return TaskTexts.of([*PASSAGES, *(f"Here:\n```python\n{code}```\nThat is all." for code in CODES)], QUESTIONS)


def test_answers_are_sorted(texts: TaskTexts) -> None:
    assert texts.passages == [passage.strip() for passage in PASSAGES]
    assert texts.codes == CODES and texts.questions == QUESTIONS[:1]
    with pytest.raises(ValueError, match="hold no passage, no code or no question"):
        TaskTexts.of(PASSAGES, QUESTIONS)


def test_every_kind_is_composed_of_the_texts(texts: TaskTexts) -> None:
    rows = list(compose(texts, 20 * len(KINDS), 1))
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(KINDS, 20)
    assert rows == list(compose(texts, 20 * len(KINDS), 1)) != list(compose(texts, 20 * len(KINDS), 2))
    used = {template for templates in KINDS.values() for template in templates}
    for row in rows:
        prompt, kind = row["prompt"], row["kind"]
        assert prompt not in used and not any(f"{{{name}}}" in prompt for name in ("passage", "code", "long"))
        assert (len(prompt) > LONG) == (kind == "long contexts")
        assert any(code in prompt for code in CODES) == (kind == "code edits")
        assert kind != "other languages" or any(language in prompt for language in LANGUAGES)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_target(tmp_path / "target", tiny_model())
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"index": 0, "ids": list(range(4, 40)), "answers": [[4, 36]]}) + "\n")
    given = ["--texts", str(answers), "--target", str(tmp_path / "target"), "--output", str(tmp_path / "tasks.jsonl")]
    assert main(given) == 1
    assert "hold no passage, no code or no question" in capsys.readouterr().err
