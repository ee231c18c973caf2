"""Lookup: what followed when the text, or an earlier one, last stood at the same few tokens.

Copied names, quoted passages and repeated lines are cheap to foresee this way, from any distance and outside the
draft vocabulary; and so is an answer that is asked for again, or a form that this user's answers keep to. The drafter
has a say in how likely such a guess is; like any candidate it can only cost speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

#: how much the drafter's log-odds of a guess count beside those of its hit rate, where it knows such text
TRUST = 0.75
#: a drafter's probability of a guess counts as one between these where its log-odds are taken
FAINTEST, SUREST = 1e-9, 1.0 - 1e-6
#: share of positions where the guess behind a run of so many tokens, the longest one that is found, was the target's
#: token, measured on 700 of the default target's training answers (prompt and answer searched, the latest place taken)
HIT_RATES = {1: 0.21, 2: 0.50, 3: 0.57, 4: 0.67, 5: 0.72, 6: 0.82, 16: 0.93, 32: 0.985}
LONGEST = max(HIT_RATES)
#: the same for runs in earlier texts, where the text itself has no guess that is as sure: 600 of these answers, each
#: behind those before it; of 32 tokens there are none but where an answer comes again, and the rate is that of the text
EARLIER_RATES = {4: 0.32, 8: 0.63, 16: 0.70, 32: 0.985}
#: runs of earlier texts that are kept, those seen last; 8,192 tokens have as many
MEMORY = 4 * 8192


class Guess(NamedTuple):
    """A token that may come next. rate: how often such a guess is right. sure: the drafter cannot make it less."""

    token: int
    rate: float
    sure: bool = False

    def probability(self, q: float | None) -> float:
        """Of the token's coming next, where the drafter gives it the probability `q`; None: it does not know the token.

        The mean of `apart` and `together`: of text like what the drafter has learnt the second is right, of other text
        the first, and the mean is never far from the better one (`lab.lookup_mix`).
        """
        if q is None:
            return self.rate
        return min(SUREST, self.apart(q) if self.sure else 0.5 * (self.apart(q) + self.together(q)))

    def apart(self, q: float) -> float:
        """The same where the drafter's distribution is only for what comes if the guess is wrong."""
        return self.rate + (1.0 - self.rate) * q

    def together(self, q: float) -> float:
        """The same where text and drafter are independent witnesses: their log-odds add up."""
        own = log_odds(min(SUREST, max(FAINTEST, q)))
        return 1.0 / (1.0 + exp(-log_odds(self.rate) - TRUST * own))


def log_odds(p: float) -> float:
    """Of what has the probability `p`."""
    return log(p / (1.0 - p))


class Lookup:
    """An index of runs in a text that mostly grows at its end, of HIT_RATES' lengths, and of runs in earlier texts."""

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
            for length in HIT_RATES:
                if length <= end:
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

    def guess(self, path: list[int]) -> Guess | None:
        """Return what may follow the text and `path`, from the run that is the surest; or None."""
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
