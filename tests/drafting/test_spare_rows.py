"""Rows that a step has to spare: they save steps, and a tree that is drafted to its end stays the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.drafting.drafter import PROMPT_CHUNK, Drafter, TreeShape
from outrider_core.drafting.engines import MASKED, Floats, Ints
from outrider_core.drafting.lookup import Guess
from outrider_core.drafting.spare_rows import SpareRow, least_score, spare_rows, with_spare_rows
from outrider_core.protocol.sampling import Sampling
from tests.drafting.test_drafter import DRAFT_IDS, GREEDY, VOCAB, TransparentEngine, make_drafter, samplings

WHOLE = TreeShape(nodes=12, depth=6, breadth=8, gain=0.0)
#: no path is likely enough for such a row
DEAR = 9.0
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50)


class RoundEngine(TransparentEngine):
    """Behind a token always comes the same one, nearly surely."""

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        _, keys, values = super().step(tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values)
        logits = np.zeros((len(wanted), len(DRAFT_IDS)), np.float32)
        for row, query in enumerate(wanted):
            logits[row, (np.searchsorted(DRAFT_IDS, tokens[query]) + 1) % len(DRAFT_IDS)] = 9.0
        return logits, keys, values


@settings(max_examples=30, deadline=None)
@given(st.lists(texts, min_size=2, max_size=5), samplings, st.booleans())
def test_the_tree_is_that_of_a_drafter_that_foresees_nothing(
    prefixes: list[list[int]], sampling: Sampling, lookup: bool
) -> None:
    """The engine checks that every row sees its path and nothing else."""
    one, other = make_drafter(lookup=lookup), make_drafter(lookup=lookup, row_cost=DEAR)
    for prefix in prefixes:
        got, wanted = (drafter.draft(prefix, sampling, WHOLE) for drafter in (one, other))
        assert got.tree == wanted.tree
        np.testing.assert_allclose(got.scores, wanted.scores, atol=1e-12)
        assert one.next_token(prefix, sampling) == other.next_token(prefix, sampling)


def test_what_was_foreseen_takes_no_step() -> None:
    """Where every guess comes true, a step of eight rows goes down as many levels."""
    shape = TreeShape(nodes=8, depth=12, breadth=8)
    engine = RoundEngine()
    drafter = make_drafter(engine=engine)
    first = drafter.draft([7], GREEDY, shape)
    assert first.steps > 6  # nothing has been seen yet
    engine.widths.clear()
    again = drafter.draft([1, 2, 7], GREEDY, shape)
    assert again.tree == first.tree and again.steps <= 2 < max(engine.widths) <= 8
    slow = make_drafter(engine=RoundEngine(), row_cost=DEAR).draft([1, 2, 7], GREEDY, shape)
    assert slow.tree == again.tree and slow.steps > 6


@pytest.mark.parametrize("end", [Drafter.forget, lambda drafter: drafter.remember([7, 8])], ids=["forgotten", "over"])
def test_a_forgotten_conversation_foretells_nothing(end: Callable[[Drafter], None]) -> None:
    """Nor does one that is over, where nothing is looked up."""
    engine = RoundEngine()
    drafter = make_drafter(engine=engine)
    drafter.draft([7], GREEDY, WHOLE)
    end(drafter)
    engine.widths.clear()
    drafter.draft([1, 7], GREEDY, WHOLE)
    assert engine.widths[0] == 2  # the text alone


def test_no_step_becomes_wider_than_a_tree_and_a_full_one_has_no_spare_row() -> None:
    engine = RoundEngine()
    drafter = make_drafter(engine=engine)
    for text in ([7], [7, 8, 9], list(range(20)), [3] * (PROMPT_CHUNK + 5), [3] * (2 * PROMPT_CHUNK)):
        engine.widths.clear()
        drafter.draft(text, GREEDY, TreeShape(16, 6, 6))
        assert max(engine.widths) <= max(6, min(PROMPT_CHUNK, len(text)))


@pytest.mark.parametrize(("nodes", "wide"), [(1, 1), (2, 2), (3, 3)])
def test_no_row_runs_below_a_tree_that_is_full(nodes: int, wide: int) -> None:
    """A tree of n nodes has n levels at most, the last of which is not expanded."""
    engine = RoundEngine()
    drafter = make_drafter(engine=engine)
    drafter.draft([7], GREEDY, WHOLE)
    engine.widths.clear()
    drafter.draft([9, 7], GREEDY, TreeShape(nodes, 6, 8))
    assert max(engine.widths) == 1 + wide  # the text's two tokens, and what follows


def test_nothing_is_foreseen_beyond_the_context() -> None:
    """A row's position is one that the engine knows."""
    engine = RoundEngine()
    drafter = make_drafter(engine=engine, max_context=40)
    for length in (30, 37, 38, 39, 40):
        drafter.draft([7] * length, GREEDY, TreeShape(32, 12, 8, 0.0))
    assert drafter.keys[:, 0, 1].max() < 40


def test_the_cache_has_room_for_what_comes_true_and_what_does_not() -> None:
    drafter = make_drafter(engine=RoundEngine())
    drafter.draft([7], GREEDY, WHOLE)
    drafter.draft([7, 9], GREEDY, WHOLE)
    drafter.draft_ahead(TreeShape(12, 60, 8, 0.0), lambda: False)
    tree = drafter.draft([7, 9], GREEDY, WHOLE).tree
    assert tree == make_drafter(engine=RoundEngine()).draft([7, 9], GREEDY, WHOLE).tree


def test_rows_go_where_they_are_likeliest_to_come_true() -> None:
    chances = {(1,): Guess(5, 0.5), (1, 5): Guess(6, 0.5), (1, 5, 6): Guess(7, 0.2), (2,): Guess(8, 0.9)}
    paths, scores = [[1], [2], [3]], [log(0.5), log(0.2), log(0.2)]

    def predict(path: list[int]) -> Guess | None:
        return chances.get(tuple(path))

    least = least_score(0.0)
    rows = spare_rows(paths, scores, 4, 9, predict, least)
    assert rows == [SpareRow(5, 0), SpareRow(8, 1), SpareRow(6, 3)]  # 7 is too unlikely
    assert spare_rows(paths, scores, 2, 9, predict, least) == rows[:2]
    assert spare_rows(paths, scores, 4, 3, predict, least) == rows[:2]
    assert spare_rows(paths, scores, -3, 9, lambda path: Guess(1, 0.9), least) == []
    assert spare_rows(paths, scores, 4, 9, predict, least_score(0.3)) == [SpareRow(5, 0)]
    assert spare_rows(paths, scores, 4, 9, predict, least_score(1.0)) == []


@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 6), st.randoms(use_true_random=False))
def test_a_spare_row_sees_what_the_one_above_sees_and_itself(
    past: int, count: int, more: int, rng: random.Random
) -> None:
    nodes = rng.randint(1, count)
    mask = np.full((count, past + count), MASKED, np.float32)
    for row in range(count):
        mask[row, : past + row + 1] = 0
    spare = [SpareRow(rng.randrange(9), rng.randrange(nodes + at)) for at in range(more)]
    tokens, positions, wide = with_spare_rows(np.arange(count), past + np.arange(count), mask, nodes, spare)
    assert tokens.tolist() == [*range(count), *(row.token for row in spare)]
    seen = [set(np.flatnonzero(row == 0)) for row in wide]
    assert all((wide[row, : past + count] == mask[row]).all() for row in range(count))
    for at, row in enumerate(spare):
        over = count - nodes + row.above
        assert seen[count + at] == seen[over] | {past + count + at}
        assert positions[count + at] == positions[over] + 1
    assert set(np.unique(wide)) <= {np.float32(0), MASKED}
