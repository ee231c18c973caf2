"""The feature rows that cross-attention reads, with and without a null row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.engines import Floats
from tests.drafting.test_drafter import DRAFT_IDS, GREEDY, NULL_ROW, TransparentEngine, logits_of, make_drafter


def feature_rows(*numbers: float) -> Floats:
    """Rows [n, 2, 1, 2] that tell their number, and keys from values."""
    rows = np.empty((len(numbers), 2, 1, 2), np.float32)
    for row, number in zip(rows, numbers, strict=True):
        row[0], row[1] = [number, number + 0.1], [-number, number + 0.2]
    return rows


def seen_rows(drafter: Drafter) -> Floats:
    """What cross-attention reads [m, 2, 1, 2]."""
    return np.stack(drafter.rows.visible(), 1)


def with_null(*numbers: float) -> Floats:
    return np.concatenate([NULL_ROW[None], feature_rows(*numbers)])


ZERO_ROW = np.zeros((1, 2, 1, 2), np.float32)


def test_null_row_is_read_before_any_row_and_in_front_of_them() -> None:
    drafter = make_drafter()
    np.testing.assert_array_equal(seen_rows(drafter), with_null())
    drafter.add_rows(np.arange(3), feature_rows(10, 11, 12))
    np.testing.assert_array_equal(seen_rows(drafter), with_null(10, 11, 12))


def test_a_drafter_without_a_null_row_reads_zeros_until_the_first_row() -> None:
    drafter = make_drafter(null_row=None)
    np.testing.assert_array_equal(seen_rows(drafter), ZERO_ROW)
    drafter.add_rows(np.array([4, 5]), feature_rows(14, 15))
    np.testing.assert_array_equal(seen_rows(drafter), feature_rows(14, 15))
    drafter.keep_rows(4)
    np.testing.assert_array_equal(seen_rows(drafter), ZERO_ROW)


def test_only_the_rows_behind_the_last_gap_are_read() -> None:
    drafter = make_drafter()
    drafter.add_rows(np.array([0, 1, 3, 6, 7]), feature_rows(10, 11, 13, 16, 17))
    np.testing.assert_array_equal(seen_rows(drafter), with_null(16, 17))
    drafter.keep_rows(7)
    np.testing.assert_array_equal(seen_rows(drafter), with_null(16))
    drafter.keep_rows(5)
    np.testing.assert_array_equal(seen_rows(drafter), with_null(13))
    drafter.keep_rows(2)
    np.testing.assert_array_equal(seen_rows(drafter), with_null(10, 11))


def test_a_row_that_fills_the_gap_takes_the_null_rows_place() -> None:
    drafter = make_drafter()
    drafter.add_rows(np.array([0, 1, 3]), feature_rows(10, 11, 13))
    np.testing.assert_array_equal(seen_rows(drafter), with_null(13))  # the null row now stands where row 2 belongs
    drafter.add_rows(np.array([2]), feature_rows(12))
    np.testing.assert_array_equal(seen_rows(drafter), with_null(10, 11, 12, 13))


def test_a_dropped_row_whose_place_the_null_row_took_comes_back_as_it_was_sent() -> None:
    drafter = make_drafter()
    drafter.add_rows(np.arange(4), feature_rows(10, 11, 12, 13))
    drafter.keep_rows(2)
    drafter.add_rows(np.array([3]), feature_rows(23))
    np.testing.assert_array_equal(seen_rows(drafter), with_null(23))
    drafter.add_rows(np.array([2]), feature_rows(22))
    np.testing.assert_array_equal(seen_rows(drafter), with_null(10, 11, 22, 23))


def test_rows_are_kept_up_to_a_length() -> None:
    drafter = make_drafter()
    without = drafter.next_token([1], GREEDY)[0]
    drafter.add_rows(np.arange(3), feature_rows(10, 11, 12))
    assert drafter.next_token([1], GREEDY)[0] == DRAFT_IDS[np.argmax(logits_of((1,), 4))]
    drafter.keep_rows(2)
    np.testing.assert_array_equal(seen_rows(drafter), with_null(10, 11))
    drafter.keep_rows(0)
    np.testing.assert_array_equal(seen_rows(drafter), with_null())
    assert drafter.next_token([1], GREEDY)[0] == without


class NaiveRows:
    """The rows in a dictionary, put together anew for every reader."""

    def __init__(self, null_row: Floats | None) -> None:
        self.null_row, self.there = null_row, dict[int, Floats]()

    def seen(self) -> Floats:
        newest: list[Floats] = []
        position = max(self.there, default=-1)
        while position in self.there:
            newest.insert(0, self.there[position])
            position -= 1
        if self.null_row is not None:
            return np.stack([self.null_row, *newest])
        return np.stack(newest or [ZERO_ROW[0]])


SHORT = 10
edits = st.lists(
    st.one_of(
        st.lists(st.integers(0, SHORT - 1), min_size=1, max_size=5, unique=True),  # add rows there, in this order
        st.integers(0, SHORT),  # keep rows below
        st.none(),  # read
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(edits, st.booleans())
def test_visible_rows_equal_a_naive_concatenation(edits: list[list[int] | int | None], null_row: bool) -> None:
    drafter = make_drafter(null_row=NULL_ROW if null_row else None, max_context=SHORT)
    naive, number = NaiveRows(drafter.rows.null_row), 100
    for edit in [*edits, None]:
        if isinstance(edit, list):
            rows = feature_rows(*range(number, number + len(edit)))
            drafter.add_rows(np.array(edit), rows)
            naive.there |= dict(zip(edit, rows, strict=True))
            number += len(edit)
        elif isinstance(edit, int):
            drafter.keep_rows(edit)
            naive.there = {position: row for position, row in naive.there.items() if position < edit}
        else:
            np.testing.assert_array_equal(seen_rows(drafter), naive.seen())


@pytest.mark.parametrize("null_row", [NULL_ROW, None], ids=["null row", "no null row"])
def test_a_step_reads_caches_and_rows_in_place(null_row: Floats | None) -> None:
    engine = TransparentEngine()
    drafter = make_drafter(null_row=null_row, engine=engine)
    drafter.add_rows(np.array([0, 2, 3]), feature_rows(10, 12, 13))
    drafter.next_token([7, 8, 9], GREEDY)
    caches = drafter.keys, drafter.values, drafter.rows.keys, drafter.rows.values
    drafter.next_token([7, 8, 9, 5], GREEDY)
    assert [len(array) for array in engine.read] == [3, 3, *[2 if null_row is None else 3] * 2]
    starts = [0, 0, *[3 if null_row is None else 2] * 2]
    for array, cache, start in zip(engine.read, caches, starts, strict=True):
        assert np.shares_memory(array, cache)
        assert array.ctypes.data == cache[start:].ctypes.data
    drafter.draft([7, 8, 9, 5], GREEDY, TreeShape(8, 3, 2))
    after = drafter.keys, drafter.values, drafter.rows.keys, drafter.rows.values
    assert all(array is cache for array, cache in zip(after, caches, strict=True))
    assert all(np.shares_memory(array, cache) for array, cache in zip(engine.read, caches, strict=True))
