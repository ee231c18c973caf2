"""Lookup's guesses from a text and earlier ones, and their probabilities."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.drafting.lookup import EARLIER_RATES, HIT_RATES, LONGEST, SUREST, Guess, Lookup


@given(st.floats(0.01, 0.99), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_drafter_has_a_say_in_what_the_text_foretells(rate: float, one: float, other: float) -> None:
    """The likelier it finds a guess the likelier that is, and surely never; what is sure needs nobody's consent."""
    guess, (less, more) = Guess(7, rate), sorted((one, other))
    assert guess.probability(None) == rate <= Guess(7, rate, sure=True).probability(one) <= SUREST
    assert 0.0 < guess.probability(less) <= guess.probability(more) <= SUREST
    assert guess.probability(0.5) > rate * 0.9 and guess.probability(1e-6) < max(0.5, rate)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4), st.lists(st.integers(0, 3), max_size=3))
def test_lookup_equals_a_search_through_the_text(texts: list[list[int]], path: list[int]) -> None:
    lookup = Lookup()
    text: list[int] = []
    for number, more in enumerate(texts):
        text = text + more if number % 3 else list(more)  # grows, or is another text
        lookup.follow(text)
    tail = (text + path)[-LONGEST:] if text or path else []
    expected = None
    for length in [length for length in sorted(HIT_RATES, reverse=True) if length <= len(tail)]:
        run = tail[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == run]
        if ends:
            expected = Guess(text[ends[-1]], HIT_RATES[length])
            break
    assert lookup.guess(path) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=4), st.lists(st.integers(0, 1), max_size=20))
def test_earlier_texts_are_looked_up_too(earlier: list[list[int]], text: list[int]) -> None:
    """The last place of all where the longest run went on, if that is surer than what the text itself says."""
    lookup, own = Lookup(), Lookup()
    for one in earlier:
        lookup.remember(one)
    for index in (lookup, own):
        index.follow(text)
    here = own.guess([])
    expected = here
    for length, rate in sorted(EARLIER_RATES.items(), reverse=True):
        run = text[-length:]
        ends = [one[e] for one in earlier for e in range(length, len(one)) if one[e - length : e] == run]
        if len(run) == length and ends and rate > (here.rate if here else 0.0):
            expected = Guess(ends[-1], rate)
            break
    assert lookup.guess([]) == expected
    assert Lookup().guess(text) is None and lookup.guess([7, 7, 7, 7]) is None
    lookup.forget()
    assert lookup.guess([]) is None
    lookup.follow(text)
    assert lookup.guess([]) == here


def test_the_oldest_runs_are_forgotten() -> None:
    lookup = Lookup(memory=6)
    lookup.remember(list(range(10)))  # eight runs
    assert lookup.guess([1, 2, 3, 4]) is None and lookup.guess([5, 6, 7, 8]) == Guess(9, EARLIER_RATES[4])
    lookup.remember([2, 3, 4, 5, 60])  # seen again: now the newest
    lookup.remember([100, 101, 102, 103, 104, 105])
    assert lookup.guess([2, 3, 4, 5]) == Guess(60, EARLIER_RATES[4]) and lookup.guess([3, 4, 5, 6]) is None
    long = list(range(40))
    lookup = Lookup()
    lookup.remember(long)
    assert lookup.guess(long[:16]) == Guess(16, EARLIER_RATES[16]) and lookup.guess([77, *long[1:16]]) == Guess(
        16, EARLIER_RATES[8]
    )


def test_long_runs_are_surer() -> None:
    """In the text and in earlier ones, by the longest run that is there."""
    long = list(range(40))
    for lengths, learn in ((HIT_RATES, lambda lookup: lookup.follow([*long, 99])), (EARLIER_RATES, remembered)):
        lookup = Lookup()
        learn(lookup)
        for seen in (4, 15, 16, 31, 32, 36):
            longest = max(length for length in lengths if length <= seen)
            assert lookup.guess([77, *long[:seen]]) == Guess(seen, lengths[longest])


def remembered(lookup: Lookup) -> None:
    lookup.remember([*range(40), 99])
    lookup.follow([98])
