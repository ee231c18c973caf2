"""Fit a conversation into the context: the oldest turns are dropped, instructions stay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
#: tokens kept free for an answer without a limit
USUAL_ROOM = 256
#: tokens that suffice for an answer without a limit: while this many are left, no turn is dropped
LEAST_ROOM = 64
#: roles that instruct the model and are never dropped from a conversation's beginning
INSTRUCTIONS = ("system", "developer")


class ConversationTooLong(ValueError):
    """Not even the last turn fits. One line with its length."""


@dataclass(frozen=True)
class FittedMessages:
    """messages: the part that fits, instructions first; dropped: messages left out, oldest first; ids: as tokens."""

    messages: list[Message]
    dropped: list[Message]
    ids: list[int]


def fit_messages(
    messages: list[Message],
    encode: Callable[[list[Message]], list[int]],
    max_context: int,
    reserve: int,
    least: int | None = None,
) -> FittedMessages:
    """Drop whole turns (a user's message and what follows it) from the beginning until the rest fits.

    encode: renders a conversation as token ids. max_context: tokens of prompt and answer together. reserve: tokens to
    keep free for the answer, at most half of the context, given up before the last turn is. As many as the context has,
    or more, means no limit: then nothing is dropped if LEAST_ROOM tokens are left. least: such a number for any
    reserve. Raises ConversationTooLong if the last turn alone leaves no token free, ValueError if there is no message.
    """
    if not messages:
        raise ValueError("there is no message to answer")
    first = next((i for i, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages))
    instructions, turns = messages[:first], messages[first:]
    starts = [0, *(i for i, message in enumerate(turns) if i and message["role"] == "user")]
    takes_all = reserve >= max_context
    kept_free = min(USUAL_ROOM if takes_all else reserve, max_context // 2)
    if least is None:
        least = LEAST_ROOM if takes_all else kept_free
    room = max_context - max(1, kept_free)

    def encoded(start: int) -> list[int]:
        return encode([*instructions, *turns[start:]])

    whole = encoded(0)
    if len(whole) <= max_context - max(1, min(least, kept_free)):
        return FittedMessages(messages, [], whole)
    # fewer turns are fewer tokens, so a binary search finds the first start that fits
    found = bisect_left(starts, True, key=lambda start: len(encoded(start)) <= room)
    start = starts[min(found, len(starts) - 1)]
    ids = encoded(start)
    if len(ids) >= max_context:
        raise ConversationTooLong(
            f"the last message has {len(ids)} tokens with its instructions; {max_context - 1} fit"
        )
    return FittedMessages([*instructions, *turns[start:]], turns[:start], ids)
