"""Feature rows: 4 bits a value and one float16 scale per (token, K|V, head)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_core.protocol.rows import RowShape, pack_rows, unpack_rows

#: the largest value that travels: a float16 scale seven times
LIMIT = 7 * 65504.0
shapes = st.builds(RowShape, st.integers(1, 5), st.integers(1, 32))


def random_rows(seed: int, count: int, shape: RowShape, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 1, (count, 2, *shape)) * np.exp(rng.normal(0, spread, (count, 2, shape.heads, 1)))
    return rows.astype(np.float32)


@given(st.integers(0, 9999), st.integers(0, 7), shapes, st.floats(0, 4))
def test_error_bound(seed: int, count: int, shape: RowShape, spread: float) -> None:
    rows = random_rows(seed, count, shape, spread).clip(-LIMIT, LIMIT)
    back = unpack_rows(pack_rows(rows), shape)
    absmax = np.abs(rows).max(-1, initial=0.0, keepdims=True)
    # half a step, and the scale's own float16 rounding (relative 2^-11, absolute half a subnormal) 7 times over
    bound = absmax / 14 + absmax * 2**-11 * 1.01 + 7 * 2**-25
    assert (np.abs(back - rows) <= bound).all()


@given(st.integers(0, 9999), st.integers(0, 7), shapes)
def test_length_and_shape(seed: int, count: int, shape: RowShape) -> None:
    data = pack_rows(random_rows(seed, count, shape))
    assert len(data) == count * shape.nbytes == count * 2 * shape.heads * (2 + -(-shape.head_dim // 2))
    back = unpack_rows(data, shape)
    assert back.shape == (count, 2, *shape) and back.dtype == np.float32


def test_layout_is_scales_then_values_little_endian() -> None:
    rows = np.array([[[[7.0, -7.0, 3.0]], [[14.0, 2.0, -2.0]]]], np.float32)  # [1, 2, 1, 3]
    scales = np.array([1.0, 2.0], "<f2").tobytes()
    assert pack_rows(rows) == scales + bytes([0x97, 0x03, 0x17, 0x0F])


@given(st.integers(0, 9999), shapes)
def test_packing_again_changes_nothing(seed: int, shape: RowShape) -> None:
    rows = random_rows(seed, 3, shape)
    rows[..., 0] = 1.0  # scales are normal float16 numbers, so the largest value is 7 steps exactly
    once = unpack_rows(pack_rows(rows), shape)
    np.testing.assert_array_equal(unpack_rows(pack_rows(once), shape), once)


def test_rows_are_packed_one_by_one() -> None:
    shape = RowShape(2, 4)
    rows = random_rows(1, 5, shape)
    single = np.concatenate([unpack_rows(pack_rows(row[None]), shape) for row in rows])
    np.testing.assert_array_equal(unpack_rows(pack_rows(rows), shape), single)


@pytest.mark.filterwarnings("error")
def test_zero_rows_stay_zero() -> None:
    shape = RowShape(3, 8)
    np.testing.assert_array_equal(unpack_rows(pack_rows(np.zeros((2, 2, 3, 8))), shape), np.zeros((2, 2, 3, 8)))


@pytest.mark.filterwarnings("error")
def test_values_below_the_smallest_scale_become_small_not_wrong() -> None:
    rows = np.full((1, 2, 1, 4), 1e-9, np.float32)
    assert np.abs(unpack_rows(pack_rows(rows), RowShape(1, 4))).max() <= 7 * 2**-24


def test_values_beyond_the_largest_scale_become_the_largest() -> None:
    rows = np.array([[[[1e9, -1e9, 1e8]], [[1.0, 0.0, 0.0]]]], np.float32)
    back = unpack_rows(pack_rows(rows), RowShape(1, 3))
    assert back[0, 0, 0].tolist() == [LIMIT, -LIMIT, LIMIT]


def test_no_rows() -> None:
    shape = RowShape(3, 64)
    assert pack_rows(np.zeros((0, 2, 3, 64), np.float32)) == b""
    assert unpack_rows(b"", shape).shape == (0, 2, 3, 64)


def test_memoryview_is_accepted() -> None:
    shape = RowShape(1, 3)
    data = pack_rows(random_rows(2, 2, shape))
    np.testing.assert_array_equal(unpack_rows(memoryview(data), shape), unpack_rows(data, shape))


@pytest.mark.parametrize("change", [-1, 1, -3])
def test_wrong_length_is_a_value_error(change: int) -> None:
    shape = RowShape(3, 64)
    with pytest.raises(ValueError, match="not a multiple of 204"):
        unpack_rows(bytes(2 * shape.nbytes + change), shape)
