"""Conversations that questions are asked in: their turns, and where another begins."""

from __future__ import annotations

from typing import Any

from benchmarks.acceptance import Dialogue
from benchmarks.questions import Question


def render(messages: list[dict[str, Any]]) -> list[int]:
    """A token for each letter that was said, and one for each message."""
    return [0] * sum(1 + len(message["content"]) for message in messages)


def asked(group: str, text: str) -> Question:
    return Question(group, render([{"content": text}]), None, text)


def test_questions_of_a_group_are_turns_of_one_conversation() -> None:
    dialogue, seen = Dialogue(render, 3, 1000), []
    for group in "aaaabb":
        size = len(dialogue.ask(asked(group, "why?")))
        seen.append((dialogue.turn, size))
        dialogue.answered("so it is")
    assert seen == [(1, 5), (2, 19), (3, 33), (1, 5), (1, 5), (2, 19)]


def test_a_prompt_that_would_be_too_long_begins_another() -> None:
    dialogue, turns = Dialogue(render, 9, 40), []
    for _ in range(5):
        assert len(dialogue.ask(asked("a", "why?"))) <= 40
        turns.append(dialogue.turn)
        dialogue.answered("so it is")
    assert turns == [1, 2, 3, 1, 2]


def test_alone_every_question_is_a_first_turn() -> None:
    dialogue = Dialogue(render, 1, 1000)
    for text in ("why?", "how?"):
        question = asked("a", text)
        assert dialogue.ask(question) == question.prompt and dialogue.turn == 1
        dialogue.answered("so it is")
