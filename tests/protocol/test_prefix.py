"""`common_prefix`, on texts that differ at every place around a border of its blocks."""

from __future__ import annotations

import pytest

from outrider_core.protocol.prefix import common_prefix


def test_texts_may_end_or_differ() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == common_prefix([1, 2, 4], [1, 2]) == 2
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0


@pytest.mark.parametrize("place", [0, 1, 62, 63, 64, 65, 127, 128, 149])
def test_the_first_difference_counts_up_to_the_limit(place: int) -> None:
    text = list(range(150))
    other = [*text[:place], -1, *text[place + 1 :]]
    assert common_prefix(text, other) == place
    assert common_prefix(text, text[:place]) == place
    assert common_prefix(text, other, limit=place + 1) == place
    assert common_prefix(text, text, limit=place) == place
