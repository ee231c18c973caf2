"""Questions from files of several layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.questions import Question, read_questions


def test_questions_of_all_three_files(tmp_path: Path) -> None:
    (tmp_path / "spec_dev.jsonl").write_text(json.dumps({"category": "qa", "turns": ["who?", "why?"]}))
    (tmp_path / "humaneval_dev.jsonl").write_text(json.dumps({"prompt": "def f", "task_id": 1}))
    (tmp_path / "gsm8k_dev.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "#### 4"}))
    files = sorted(tmp_path.iterdir())
    every = [
        Question("gsm8k", [0] * 6, "#### 4", "2 + 2?"),
        Question("humaneval", [0] * 5, None, "def f"),
        Question("qa", [0] * 4, None, "who?"),
    ]
    assert read_questions(files, 0, lambda text: [0] * len(text), 6) == (every, 0)
    assert read_questions(files, 0, lambda text: [0] * len(text), 5) == (every[1:], 1)
    with pytest.raises(ValueError, match="no question fits"):
        read_questions(files, 0, lambda text: [0] * len(text), 3)
