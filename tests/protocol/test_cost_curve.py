"""The cost curve of a verifier's steps on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_core.protocol.costs import MAX_POINTS, CostCurve, unpack_costs

curves = st.lists(
    st.tuples(st.integers(1, 2**31), st.floats(1e-6, 4000)), min_size=1, max_size=MAX_POINTS, unique_by=lambda p: p[0]
).map(lambda points: CostCurve(*(tuple(x) for x in zip(*sorted(points), strict=True))))


@given(curves)
def test_costs_survive_the_wire(curve: CostCurve) -> None:
    back = unpack_costs(curve.pack())
    assert back is not None and back.tokens == curve.tokens
    assert back.seconds == pytest.approx(curve.seconds, abs=1e-6)


@given(st.binary(max_size=8 * MAX_POINTS))
def test_any_bytes_are_costs_or_none(data: bytes) -> None:
    curve = unpack_costs(data)
    if curve is not None:
        assert list(curve.tokens) == sorted(set(curve.tokens)) and min(curve.seconds) > 0
        assert all(curve.at(tokens) > 0 for tokens in curve.tokens)
