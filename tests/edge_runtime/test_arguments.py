"""Arguments of `generate` are checked before anything is sent, and each mistake is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.arguments import MAX_SEED, checked_length, checked_sampling, checked_stops
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Open, decode_client, encode, pack_ids

USUAL: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "warm"),
        ("top_p", 0.0), ("top_p", 7), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("top_k", -1),
        ("top_k", 0.5), ("top_k", 2**32), ("seed", -2), ("seed", 2**63), ("seed", 10**400), ("seed", 1.0),
    ],
)  # fmt: skip
def test_a_parameter_out_of_bounds_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*not "):
        checked_sampling(**{**USUAL, name: value})


def test_the_bounds_themselves_are_allowed() -> None:
    checked_sampling(temperature=100, top_k=2**32 - 1, top_p=1, min_p=1, seed=MAX_SEED)
    assert checked_sampling(**{**USUAL, "top_k": np.int64(4)}) == Sampling(top_k=4)
    for drawn in (None, -1):
        assert 0 <= checked_sampling(**{**USUAL, "seed": drawn}).seed < 2**62


@pytest.mark.parametrize("length", [0, -5, 1.5, "9", None])
def test_an_answer_has_at_least_one_token(length: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be a whole number, at least 1, not"):
        checked_length(length)


def test_a_string_is_one_stop_string() -> None:
    assert checked_stops("blue") == ["blue"] and checked_stops(("a", "", "b")) == ["a", "b"] and checked_stops("") == []
    with pytest.raises(ValueError, match="3 is neither"):
        checked_stops(["a", 3])  # type: ignore[list-item]


ANYTHING = st.one_of(
    st.floats(), st.integers(), st.integers(-2, 2**64), st.booleans(), st.none(), st.text(max_size=3),
    st.binary(max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_number_is_not_a_string(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, not '0.5'"):
        checked_sampling(**{**USUAL, name: "0.5"})


@settings(max_examples=500, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(USUAL, ANYTHING)))
def test_every_argument_is_refused_or_reaches_the_verifier(arguments: dict[str, Any]) -> None:
    """As a frame that the verifier takes; there is nothing between."""
    try:
        sampling = checked_sampling(**{**USUAL, **arguments})
    except ValueError as error:
        assert any(str(error).startswith(name) for name in arguments)
        return
    opened = decode_client(encode(Open(0, bytes(16), 0, pack_ids([1]), 0, sampling)))
    assert isinstance(opened, Open) and opened.sampling == sampling
    for name, value in arguments.items():
        if value is not None and (name, value) != ("seed", -1):  # both: any
            assert getattr(sampling, name) == value
