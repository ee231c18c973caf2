"""Fits a conversation into the context: the oldest turns go first, what the system said stays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
#: roles that instruct the model and are never dropped from a conversation's beginning
INSTRUCTIONS = ("system", "developer")


class ConversationTooLong(ValueError):
    """Not even the last turn fits. One line that says how long it is."""


@dataclass(frozen=True)
class FittedMessages:
    """messages: what fits, with the instructions first; dropped: what was left out, oldest first; ids: as tokens."""

    messages: list[Message]
    dropped: list[Message]
    ids: list[int]


def fit_messages(
    messages: list[Message],
    encode: Callable[[list[Message]], list[int]],
    max_context: int,
    reserve: int,
) -> FittedMessages:
    """Drop whole turns (a user's message and what follows it) from the beginning until the rest fits.

    encode: renders a conversation as token ids. max_context: tokens of prompt and answer together. reserve: tokens to
    keep free for the answer; at most half of the context, and given up before the last turn is.
    Raises ConversationTooLong where the last turn alone leaves no token free, ValueError where there is no message.
    """
    if not messages:
        raise ValueError("there is no message to answer")
    first = next((i for i, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages))
    instructions, turns = messages[:first], messages[first:]
    starts = [0, *(i for i, message in enumerate(turns) if i and message["role"] == "user")]
    room = max_context - max(1, min(reserve, max_context // 2))

    def encoded(start: int) -> list[int]:
        return encode([*instructions, *turns[start:]])

    # fewer turns are fewer tokens, so a search by halves finds the first start that fits
    found = bisect_left(starts, True, key=lambda start: len(encoded(start)) <= room)
    start = starts[min(found, len(starts) - 1)]
    ids = encoded(start)
    if len(ids) >= max_context:
        raise ConversationTooLong(
            f"the last message has {len(ids)} tokens with its instructions; {max_context - 1} fit"
        )
    return FittedMessages([*instructions, *turns[start:]], turns[:start], ids)
