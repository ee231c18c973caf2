"""Lookup for streams: tokens that the text itself foretells, verified in the step that computes the next one anyway.

A step of a few tokens takes little longer than a step of one. So where a GENERATE's text repeats its prompt or itself,
one step brings several of its tokens: the target's own, as with any draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider_core.drafting.lookup import Lookup

#: tokens foretold at once, at most
MOST = 16
#: guesses that a stream's own rate of hits begins with, all of them as usual
PRIOR = 8.0
#: what older guesses of a stream still count after one more step with any
FADING = 0.95
#: no guess is taken to be surer than this
SUREST = 0.97


class StreamLookup:
    """What the text of one GENERATE foretells, and how often that came true."""

    def __init__(self) -> None:
        self._lookup = Lookup(memory=0)
        self._rates: list[float] = []  # of the newest guesses, as they usually are
        self._promised = self._kept = PRIOR  # hits

    def guesses(self, text: list[int], most: int) -> list[tuple[int, float]]:
        """The next tokens of `text` (token ids), at most `most` of them.

        Each with the probability that it and all before it are the target's own; these fall strictly.
        """
        self._lookup.follow(text)
        self._rates, found = [], list[tuple[int, float]]()
        own, together = self._kept / self._promised, 1.0
        while len(found) < min(most, MOST) and (guess := self._lookup.guess([token for token, _ in found])):
            token, rate = guess
            together *= min(SUREST, own * rate)
            found.append((token, together))
            self._rates.append(rate)
        return found

    def observe(self, sent: int, accepted: int) -> None:
        """Of the newest guesses the first `sent` were verified, and the first `accepted` of these were right."""
        if sent:
            tried = self._rates[: min(sent, accepted + 1)]
            self._promised = PRIOR + FADING * (self._promised - PRIOR) + sum(tried)
            self._kept = PRIOR + FADING * (self._kept - PRIOR) + accepted


def likeliest(guesses: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int]]:
    """All guesses of several streams, likeliest first: (probability, number of the stream)."""
    return sorted(((chance, i) for i, found in enumerate(guesses) for _, chance in found), reverse=True)
