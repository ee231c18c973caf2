"""Questions of a benchmark, from JSONL files in the layouts of Spec-Bench, HumanEval and GSM8K."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.wire import pack_ids


@dataclass(frozen=True)
class Question:
    """group: its category or its file's name. prompt: token ids of `text`, chat template included.

    solution: text that ends with the right number, if the file has one.
    """

    group: str
    prompt: list[int]
    solution: str | None = None
    text: str = ""

    @property
    def fingerprint(self) -> str:
        """16 hex digits that tell prompts apart."""
        return hashlib.sha256(pack_ids(self.prompt)).hexdigest()[:16]


def as_question(bundle: Bundle) -> Callable[[str], list[int]]:
    """Return a function that encodes a user's question with the bundle's tokenizer and chat template."""
    return lambda text: bundle.render_chat([{"role": "user", "content": text}])


def read_questions(
    paths: Iterable[Path], count: int, encode: Callable[[str], list[int]], longest: int
) -> tuple[list[Question], int]:
    """Read `count` questions of each file, spread evenly over it (0: all), the first turn of each.

    Returns (those of at most `longest` tokens, how many were longer). Raises ValueError if none is left.
    """
    questions = []
    for path in paths:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        if not rows:
            raise ValueError(f"{path} holds no question")
        step = max(1, len(rows) // count) if count else 1
        for row in rows[::step][: count or None]:
            text = row.get("prompt") or row.get("question") or row["turns"][0]
            solution = row.get("answer") if "question" in row else None
            questions.append(Question(row.get("category", path.stem.split("_")[0]), encode(text), solution, text))
    fitting = [question for question in questions if len(question.prompt) <= longest]
    if not fitting:
        raise ValueError(f"no question fits into the context: {longest} tokens are left for it")
    return fitting, len(questions) - len(fitting)
