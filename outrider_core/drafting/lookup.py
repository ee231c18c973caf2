"""Lookup: what followed when the text, or an earlier one, last stood at the same few tokens.

Copied names, quoted passages and repeated lines are cheap to foresee this way, from any distance and outside the
draft vocabulary; and so is an answer that is asked for again, or a form that this user's answers keep to. The drafter
mixes the guess into its own distribution; like any candidate it can only cost speed.
"""

from __future__ import annotations

from collections.abc import Sequence

#: share of positions where the guess after a longest match of 1, 2, ... tokens was the target's token, measured on
#: 700 of the default target's training answers (prompt and answer searched, the latest occurrence taken)
HIT_RATES = (0.26, 0.53, 0.61, 0.66, 0.71, 0.84)
LONGEST = len(HIT_RATES)
#: the same for runs of so many tokens in earlier texts, where the text itself has no guess that is as sure: 600 of
#: these answers, each behind those before it
EARLIER_RATES = {4: 0.35, 8: 0.64, 16: 0.80}
#: runs of earlier texts that are kept, those seen last; 8,192 tokens have as many
MEMORY = 3 * 8192


class Lookup:
    """An index of every run of 1 to LONGEST tokens in a text that mostly grows at its end, and of earlier texts."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._text: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # run of tokens -> the token that followed it last
        self._memory = memory
        self._earlier: dict[tuple[int, ...], int] = {}  # the same of earlier texts, in the order they were last seen

    def follow(self, text: list[int]) -> None:
        """Bring the index to `text`; costs only what is new, or everything if the old text does not begin it."""
        if text[: len(self._text)] != self._text:
            self._text, self._next = [], {}
        for end in range(len(self._text), len(text)):
            for length in range(1, min(LONGEST, end) + 1):
                self._next[tuple(text[end - length : end])] = text[end]
        self._text = list(text)

    def remember(self, text: Sequence[int]) -> None:
        """Keep the runs of a text that is over, and forget the oldest ones of others beyond what fits."""
        for end in range(len(text)):
            for length in EARLIER_RATES:
                if length <= end:
                    run = tuple(text[end - length : end])
                    self._earlier.pop(run, None)  # to the end of the order
                    self._earlier[run] = text[end]
        for run in list(self._earlier)[: max(0, len(self._earlier) - self._memory)]:
            del self._earlier[run]

    def forget(self) -> None:
        """Forget the text and all earlier ones."""
        self._text, self._next, self._earlier = [], {}, {}

    def guess(self, path: list[int]) -> tuple[int, float] | None:
        """(token, hit rate) behind the text and `path`, from the run that is the surest; or None."""
        best: tuple[int, float] | None = None
        tail = (self._text[-LONGEST:] + path)[-LONGEST:]
        for length in range(len(tail), 0, -1):
            token = self._next.get(tuple(tail[-length:]))
            if token is not None:
                best = token, HIT_RATES[length - 1]
                break
        if not self._earlier:
            return best
        longest = max(EARLIER_RATES)
        tail = (self._text[-longest:] + path)[-longest:]
        for length, rate in reversed(EARLIER_RATES.items()):
            if best and best[1] >= rate:
                break
            token = self._earlier.get(tuple(tail[-length:])) if length <= len(tail) else None
            if token is not None:
                return token, rate
        return best
