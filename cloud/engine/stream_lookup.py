"""Lookup for streams: n-gram guesses, verified in the step that decodes the next token.

A step of a few tokens takes little longer than a step of one. So if a GENERATE's text repeats its prompt or itself, or
continues as the target's answers usually do after two tokens, one step yields several tokens: the target's own, as with
any draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider_core.drafting.lookup import Lookup
from outrider_core.drafting.ngrams import NgramTable

#: most tokens guessed at once
MOST_GUESSES = 16
#: tokens of a text that are searched: the last ones when its GENERATE begins, and all new ones
SEARCHED = 2048
#: tokens indexed per step, so that no text keeps an engine busy
AT_ONCE = 512
#: guesses that a stream's own hit rate starts with, all at the usual rate
PRIOR = 8.0
#: weight of a stream's older guesses after each step with new ones
FADING = 0.95
#: no guess is taken to be surer than this
SUREST = 0.97


class StreamLookup:
    """Predicts the text of one GENERATE, and learns how often it is right. ngrams: of the target's answers."""

    def __init__(self, ngrams: NgramTable | None = None) -> None:
        self._lookup, self._ngrams = Lookup(memory=0), ngrams
        self._start: int | None = None  # of the searched part
        self._known = 0  # tokens up to the end of the indexed part
        self._rates: list[float] = []  # usual rates of the newest guesses
        self._promised = self._kept = PRIOR  # hits

    def guesses(self, text: list[int], limit: int) -> list[tuple[int, float]]:
        """Return the next tokens of `text` (token ids), at most `limit` of them.

        Each has the probability that it and all before it are the target's own; these fall strictly. None while a long
        text is still being indexed.
        """
        if self._start is None or self._known > len(text):
            self._start = self._known = max(0, len(text) - SEARCHED)
        self._known = min(len(text), self._known + AT_ONCE)
        self._lookup.follow(text[self._start : self._known])
        self._rates, found = [], list[tuple[int, float]]()
        if self._known < len(text):
            return []
        own, together = self._kept / self._promised, 1.0
        while len(found) < min(limit, MOST_GUESSES) and (guess := self._guess(text, [token for token, _ in found])):
            token, rate = guess
            together *= min(SUREST, own * rate)
            found.append((token, together))
            self._rates.append(rate)
        return found

    def _guess(self, text: list[int], path: list[int]) -> tuple[int, float] | None:
        """Return (token, rate of hits) after `text` and `path`, from the surer of both sources."""
        repeated = self._lookup.guess(path)
        known = [(repeated.token, repeated.rate)] if repeated else []
        before, last = [-1, *text[-2:], *path][-2:]
        if self._ngrams and (usual := self._ngrams.guess(before, last)):
            known.append(usual)
        return max(known, key=lambda guess: guess[1], default=None)

    def observe(self, sent: int, accepted: int) -> None:
        """Note that the first `sent` of the newest guesses were verified, and the first `accepted` were right."""
        if sent:
            tried = self._rates[: min(sent, accepted + 1)]
            self._promised = PRIOR + FADING * (self._promised - PRIOR) + sum(tried)
            self._kept = PRIOR + FADING * (self._kept - PRIOR) + accepted


def likeliest(guesses: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int]]:
    """Return all guesses of several streams, likeliest first: (probability, number of the stream)."""
    return sorted(((chance, i) for i, found in enumerate(guesses) for _, chance in found), reverse=True)
