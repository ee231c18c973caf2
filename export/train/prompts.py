"""Prompts for the target, whose answers train a drafter: from files, or written by itself.

An instruct model that is given only the opening of its chat template writes a user's turn; so a user without any data
set can train a drafter for any such model. Openings ("Translate into English:") vary its prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_core.chat.boundary import boundary_of, render_chat

#: openings of self-written prompts
OPENINGS = Path(__file__).with_name("openings.txt").read_text(encoding="utf-8").splitlines()
_USER, _ASSISTANT = "\x02one\x03", "\x02two\x03"  # mark the turns' places in a rendered template


@dataclass(frozen=True)
class UserTurn:
    """A user's turn; if `goes_on`, the target continues it."""

    text: str
    goes_on: bool = False


@dataclass(frozen=True)
class Conversation:
    """The user's turns in order; the target answers each. temperature: of the answers, 0 is greedy."""

    turns: tuple[UserTurn, ...]
    temperature: float = 0.0


def read_prompts(paths: Iterable[Path]) -> list[tuple[str, ...]]:
    """Read user turns from JSONL files (`{"prompt": ...}` or `{"turns": [...]}`) or plain text (one prompt a line)."""
    prompts: list[tuple[str, ...]] = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            if path.suffix not in (".jsonl", ".json"):
                prompts.append((line.rstrip("\r"),))
                continue
            try:
                row = json.loads(line)
                turns = [row["prompt"]] if "prompt" in row else row["turns"]
                if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                    raise TypeError("no text")
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}:{number}: not a JSON object with `prompt` or `turns`") from None
            prompts.append(tuple(turns))
    return prompts


def plan(
    prompts: Sequence[tuple[str, ...]],
    *,
    limit: int = 0,
    self_prompts: int = 0,
    openings: Sequence[str] = OPENINGS,
    sampled: float = 0.0,
    follow_ups: float = 0.0,
    seed: int = 0,
) -> list[Conversation]:
    """Return conversations in random order, the same for the same arguments.

    limit: the most of `prompts` that are used; 0 takes all. self_prompts: how many the target
    writes itself, half of them from scratch, the others after one of `openings`.
    sampled: share of conversations answered at a temperature drawn evenly from 0 to 1; the others are greedy.
    follow_ups: share of one-turn conversations that get a second turn, written by the target.
    """
    rng = random.Random(seed)
    order = list(prompts)
    rng.shuffle(order)
    asked = [tuple(UserTurn(text) for text in turns) for turns in order[: limit or None]]
    for _ in range(self_prompts):
        asked.append((UserTurn(rng.choice(openings) if openings and rng.random() < 0.5 else "", True),))
    rng.shuffle(asked)
    conversations = []
    for turns in asked:
        if len(turns) == 1 and rng.random() < follow_ups:
            turns = (*turns, UserTurn("", True))
        temperature = round(rng.random(), 2) if rng.random() < sampled else 0.0
        conversations.append(Conversation(turns, temperature))
    return conversations


class ChatFormat:
    """A tokenizer's chat template, cut between the speakers. Raises ValueError if it cannot be cut."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._boundary = tokenizer, boundary_of(tokenizer)
        user, assistant = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}
        try:
            self._head, _, self._tail = self._render([user]).partition(_USER)
            between = self._render([user, assistant, user]).partition(_ASSISTANT)[2].partition(_USER)[0]
        except Exception as error:
            raise ValueError(f"the target's chat template cannot be used: {error}") from None
        if not self._tail or not between:
            raise ValueError("the target's chat template does not contain the turns of user and assistant")
        self._between = self._ids(between)
        #: tokens that end a text that the target writes in the user's place
        self.end_of_user = self._ids(self._tail)[0]

    def first(self, turn: UserTurn) -> list[int]:
        """Return token ids up to where the answer begins or, if the turn goes on, where the user's text continues."""
        return self._boundary.encode_between(self._head, turn.text, "" if turn.goes_on else self._tail)

    def next(self, turn: UserTurn, last: int) -> list[int]:
        """Return the same after an answer that ended with token `last`."""
        between = self._between[1:] if self._between[:1] == [last] else self._between
        return between + self._boundary.encode_between("", turn.text, "" if turn.goes_on else self._tail)

    def text(self, opening: str, written: list[int]) -> str:
        """Return the text of a turn that began with `opening` and continued with these tokens."""
        text: str = self._tokenizer.decode(self._ids(opening) + written, skip_special_tokens=True)
        return text

    def _render(self, messages: list[dict[str, str]]) -> str:
        return render_chat(self._tokenizer, messages)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
