"""The row cost is learnt from steps that are taken anyway, and drafting adapts to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.engines import Floats, Ints
from outrider_core.drafting.row_cost import ENOUGH, USUAL, RowCost
from tests.drafting.test_drafter import GREEDY
from tests.drafting.test_spare_rows import RoundEngine, make_drafter


class TimedEngine(RoundEngine):
    """A step takes 2 ms, and each row more `row_ms`."""

    def __init__(self, row_ms: float) -> None:
        super().__init__()
        self.row_ms, self.now = row_ms, 0.0

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        self.now += (2.0 + self.row_ms * (len(tokens) - 1)) / 1e3
        return super().step(tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values)


@settings(deadline=None)
@given(st.floats(0, 0.9), st.floats(1e-4, 1.0), st.randoms(use_true_random=False))
def test_steps_that_waited_for_a_processor_say_nothing(share: float, one: float, rng: random.Random) -> None:
    learnt = RowCost()
    steps = [(rows, one * (1 + share * (rows - 1)) * late) for rows in range(1, 9) for late in (1.0, 1.2, 1.7, 30.0)]
    for rows, seconds in rng.sample(steps, len(steps)):
        learnt.took(rows, seconds)
    assert learnt.value == pytest.approx(share, abs=1e-6)


def test_it_is_the_usual_one_until_a_narrow_and_a_wide_step_are_known_well() -> None:
    learnt = RowCost()
    for _ in range(ENOUGH):
        assert learnt.value == USUAL
        learnt.took(8, 0.004)
        learnt.took(5, 0.001)  # too near the other one
        learnt.took(32, 1.0)  # reads a prompt
    for _ in range(ENOUGH):
        assert learnt.value == USUAL
        learnt.took(1, 0.002)
    assert learnt.value == pytest.approx(1 / 7)


def test_rows_that_are_dearer_the_more_there_are_cost_a_step_at_most() -> None:
    """By a line through steps of 4 and 8 rows, a step of one row would take less than nothing."""
    learnt = RowCost()
    for rows in (4, 8) * ENOUGH:
        learnt.took(rows, 1e-3 * rows**3)
    assert learnt.value == 1.0


@pytest.mark.parametrize("tick", [0.001, 0.0167, 0.1])
def test_a_clock_too_coarse_for_the_engine_teaches_nothing(tick: float) -> None:
    learnt, now = RowCost(), 0.0
    for turn in range(300):
        rows, began = 1 + turn % 8, now
        now += 0.0008 + 0.00001 * rows
        learnt.took(rows, tick * (now // tick - began // tick))
    assert learnt.value == USUAL


def test_reading_a_prompt_says_nothing_of_a_tree() -> None:
    """Its step leaves the LM head out, but for the last token."""
    engine = RoundEngine()
    drafter = make_drafter(engine=engine, row_cost=None)
    seen = list[int]()
    drafter.row_cost.took = lambda rows, seconds: seen.append(rows)  # type: ignore[method-assign]
    drafter.read([7] * 8)
    assert engine.widths == [8] and not seen
    drafter.read([7] * 9)
    assert seen == [1]


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), max_size=60))
def test_whatever_a_clock_says_it_is_a_share(steps: list[tuple[int, float]]) -> None:
    """A clock may be coarse, and stand still for a step."""
    learnt, fixed = RowCost(), RowCost(0.125)
    for rows, seconds in steps:
        learnt.took(rows, seconds)
        fixed.took(rows, seconds)
        assert 0.0 <= learnt.value <= 1.0 and fixed.value == 0.125


@pytest.mark.parametrize(("row_ms", "foreseen"), [(0.0, True), (2.0, False)])
def test_a_drafter_fills_spare_rows_where_they_cost_little(
    row_ms: float, foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TimedEngine(row_ms)
    monkeypatch.setattr("outrider_core.drafting.drafter.time.perf_counter", lambda: engine.now)
    drafter = make_drafter(engine=engine, row_cost=None)
    for length in range(1, 12):
        drafter.draft([7] * length, GREEDY, TreeShape(12, 6, 8, 0.0))
    engine.widths.clear()
    steps = drafter.draft([7] * 12, GREEDY, TreeShape(6, 6, 8)).steps
    assert (steps <= 2) is foreseen
    assert drafter.row_cost.value == pytest.approx(row_ms / 2.0, abs=1e-6)
