"""Lookup: guess the token that followed the same few tokens earlier in the text, or in an earlier one.

It predicts copied names, quoted passages and repeated lines cheaply, at any distance and outside the draft vocabulary;
also an answer that is asked for again, or a form that this user's answers keep to. The drafter influences how likely
such a guess is; like any candidate it can only cost speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

#: weight of the drafter's log-odds of a guess beside those of its hit rate, on text like its training data
TRUST = 0.75
#: bounds of a drafter's probability of a guess before its log-odds are taken
FAINTEST, SUREST = 1e-9, 1.0 - 1e-6
#: share of positions where the guess after a run of this many tokens, the longest one found, was the target's token,
#: measured on 700 of the default target's training answers (prompt and answer searched, the latest place taken)
HIT_RATES = {1: 0.21, 2: 0.50, 3: 0.57, 4: 0.67, 5: 0.72, 6: 0.82, 16: 0.93, 32: 0.985}
LONGEST = max(HIT_RATES)
#: the same for runs in earlier texts, if the text itself has no guess as sure: on 600 of these answers, each after
#: those before it; runs of 32 tokens occur only if an answer is repeated, and take the rate of the text
EARLIER_RATES = {4: 0.32, 8: 0.63, 16: 0.70, 32: 0.985}
#: runs of earlier texts that are kept, latest first; 8,192 tokens have this many
MEMORY = 4 * 8192


class Guess(NamedTuple):
    """A possible next token. rate: how often such a guess is right. sure: the drafter cannot lower it."""

    token: int
    rate: float
    sure: bool = False

    def probability(self, q: float | None) -> float:
        """Return the probability that the token comes next, if the drafter gives it `q`, None: unknown to it.

        The mean of `apart` and `together`: the second is right for text like the drafter's training data, the first for
        other text, and the mean is never far from the better one (`lab.lookup_mix`).
        """
        if q is None:
            return self.rate
        return min(SUREST, self.apart(q) if self.sure else 0.5 * (self.apart(q) + self.together(q)))

    def apart(self, q: float) -> float:
        """Return the probability if the drafter's distribution is only for the case that the guess is wrong."""
        return self.rate + (1.0 - self.rate) * q

    def together(self, q: float) -> float:
        """Return the probability if text and drafter are independent witnesses: their log-odds add up."""
        own = log_odds(min(SUREST, max(FAINTEST, q)))
        return 1.0 / (1.0 + exp(-log_odds(self.rate) - TRUST * own))


def log_odds(p: float) -> float:
    """Return the log-odds of probability `p`."""
    return log(p / (1.0 - p))


class Lookup:
    """Index of runs of tokens, of HIT_RATES' lengths, in a text that mostly grows at its end, and in earlier texts."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._text: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # run of tokens -> the token that last followed it
        self._memory = memory
        self._earlier: dict[tuple[int, ...], int] = {}  # the same for earlier texts, in the order they were last seen

    def follow(self, text: list[int]) -> None:
        """Bring the index to `text`; costs only the new part, or everything if the old text is not its beginning."""
        if text[: len(self._text)] != self._text:
            self._text, self._next = [], {}
        for end in range(len(self._text), len(text)):
            for length in HIT_RATES:
                if length <= end:
                    self._next[tuple(text[end - length : end])] = text[end]
        self._text = list(text)

    def remember(self, text: Sequence[int]) -> None:
        """Keep the runs of a finished text, and forget the oldest ones of others beyond the limit."""
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

    def guess(self, path: list[int]) -> Guess | None:
        """Return the guess after the text and `path` with the highest rate; or None."""
        best: Guess | None = None
        tail = (self._text[-LONGEST:] + path)[-LONGEST:]
        for length, rate in reversed(HIT_RATES.items()):
            token = self._next.get(tuple(tail[-length:])) if length <= len(tail) else None
            if token is not None:
                best = Guess(token, rate)
                break
        if not self._earlier:
            return best
        longest = max(EARLIER_RATES)
        tail = (self._text[-longest:] + path)[-longest:]
        for length, rate in reversed(EARLIER_RATES.items()):
            if best and best.rate >= rate:
                break
            token = self._earlier.get(tuple(tail[-length:])) if length <= len(tail) else None
            if token is not None:
                return Guess(token, rate)
        return best
