"""Lookup for streams: n-gram guesses, verified in the step that decodes the next token.

A step of a few tokens takes little longer than a step of one. So where a GENERATE's text repeats its prompt or itself,
or goes on as the target's answers usually do behind two tokens, one step brings several of its tokens: the target's
own, as with any draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider_core.drafting.lookup import Lookup
from outrider_core.drafting.ngrams import NgramTable

#: most tokens predicted at once
MOST_GUESSES = 16
#: tokens of a text that are searched, the last ones when its GENERATE begins and all that it brings
SEARCHED = 2048
#: tokens that are taken in for one step, so that no text keeps an engine busy
AT_ONCE = 512
#: guesses that a stream's own rate of hits begins with, all of them as usual
PRIOR = 8.0
#: what older guesses of a stream still count after one more step with any
FADING = 0.95
#: no guess is taken to be surer than this
SUREST = 0.97


class StreamLookup:
    """Predicts the text of one GENERATE, and learns how often that is right. ngrams: of the target's answers."""

    def __init__(self, ngrams: NgramTable | None = None) -> None:
        self._lookup, self._ngrams = Lookup(memory=0), ngrams
        self._start: int | None = None  # of what is searched
        self._known = 0  # tokens up to where it is taken in
        self._rates: list[float] = []  # of the newest guesses, as they usually are
        self._promised = self._kept = PRIOR  # hits

    def guesses(self, text: list[int], limit: int) -> list[tuple[int, float]]:
        """The next tokens of `text` (token ids), at most `limit` of them.

        Each with the probability that it and all before it are the target's own; these fall strictly. None as long as
        a long text is still being taken in.
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
        """(token, rate of hits) behind `text` and `path`, by the surer of both."""
        repeated = self._lookup.guess(path)
        known = [(repeated.token, repeated.rate)] if repeated else []
        before, last = [-1, *text[-2:], *path][-2:]
        if self._ngrams and (usual := self._ngrams.guess(before, last)):
            known.append(usual)
        return max(known, key=lambda guess: guess[1], default=None)

    def observe(self, sent: int, accepted: int) -> None:
        """Of the newest guesses the first `sent` were verified, and the first `accepted` of these were right."""
        if sent:
            tried = self._rates[: min(sent, accepted + 1)]
            self._promised = PRIOR + FADING * (self._promised - PRIOR) + sum(tried)
            self._kept = PRIOR + FADING * (self._kept - PRIOR) + accepted


def likeliest(guesses: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int]]:
    """All guesses of several streams, likeliest first: (probability, number of the stream)."""
    return sorted(((chance, i) for i, found in enumerate(guesses) for _, chance in found), reverse=True)
