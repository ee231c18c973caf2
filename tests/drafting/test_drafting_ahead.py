"""Trees that outlive their verdict: what was drafted ahead is what a fresh drafter would have drafted, for nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.drafting.drafter import TREE_ROWS, TreeShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT
from tests.drafting.test_drafter import (
    DRAFT_IDS,
    GREEDY,
    MAX_CONTEXT,
    VOCAB,
    TransparentEngine,
    make_drafter,
    prefixes,
    samplings,
)
from tests.drafting.test_feature_rows import feature_rows

SHAPE = TreeShape(nodes=12, depth=4, breadth=4, gain=0.0)


def steps(count: int) -> Callable[[], bool]:
    """A `cancelled` that lets so many steps happen."""
    left = [count]

    def cancelled() -> bool:
        left[0] -= 1
        return left[0] < 0

    return cancelled


@settings(max_examples=80, deadline=None)
@given(prefixes, samplings, st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.data()), max_size=4))
def test_drafting_ahead_never_shows(
    prefix: list[int], sampling: Sampling, rounds: list[tuple[int, int, st.DataObject]]
) -> None:
    """Whatever the verdict says and however long was drafted ahead, the next tree is a fresh drafter's."""
    drafter = make_drafter()
    tree = drafter.draft(prefix, sampling, SHAPE).tree
    for ahead, accepted, data in rounds:
        drafter.draft_ahead(SHAPE, steps(ahead))
        node = ROOT
        for _ in range(accepted):  # a walk down the tree, then a bonus token that may be anything
            children = sorted(tree.children[node + 1].items())
            if not children:
                break
            token, node = data.draw(st.sampled_from(children))
            prefix = [*prefix, token]
        prefix = [*prefix, data.draw(st.one_of(st.sampled_from(DRAFT_IDS.tolist()), st.integers(0, VOCAB - 1)))]
        tree = drafter.draft(prefix, sampling, SHAPE).tree
        assert tree == make_drafter().draft(prefix, sampling, SHAPE).tree
        if not data.draw(st.booleans()):
            assert drafter.next_token(prefix, sampling)[0] == make_drafter().next_token(prefix, sampling)[0]


def test_a_verdict_that_was_foreseen_makes_the_next_tree_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_core.drafting.drafter.AHEAD_FLOOR", -np.inf)
    engine = TransparentEngine()
    drafter, prefix = make_drafter(engine=engine), [3, 1, 4]
    tree = drafter.draft(prefix, GREEDY, SHAPE).tree
    drafter.draft_ahead(SHAPE, lambda: False)
    path = [tree.tokens[node] for node in tree.path(0)]
    fresh = make_drafter().draft([*prefix, *path], GREEDY, SHAPE)
    assert fresh.steps > 1 and not fresh.ahead
    # the first node accepted, then the likeliest token that its other children leave
    sent = {tree.tokens[node] for node in range(len(tree)) if tree.parents[node] == 0}
    engine.fed.clear()
    order = make_drafter().draft([*prefix, *path], GREEDY, TreeShape(16, 1, 1, 0.0)).tree.tokens
    bonus = next(token for token in order if token not in sent)
    draft = drafter.draft([*prefix, *path, bonus], GREEDY, SHAPE)
    assert draft.ahead and draft.steps == 0 and not engine.fed
    assert draft.tree == make_drafter().draft([*prefix, *path, bonus], GREEDY, SHAPE).tree


def test_a_verdict_that_was_not_foreseen_feeds_its_last_token_alone() -> None:
    engine = TransparentEngine()
    drafter, prefix = make_drafter(engine=engine), [3, 1, 4]
    tree = drafter.draft(prefix, GREEDY, SHAPE).tree
    outside = next(token for token in range(VOCAB) if token not in DRAFT_IDS)
    deepest = max(range(len(tree)), key=lambda node: (bool(tree.children[node + 1]), tree.depths[node]))
    path = [tree.tokens[node] for node in tree.path(deepest)]
    engine.fed.clear()
    assert not drafter.draft([*prefix, *path, outside], GREEDY, SHAPE).ahead
    assert engine.fed[0] == outside  # the path's own rows were moved, not computed again


def test_drafting_ahead_stops_when_told_and_before_the_cache_is_full() -> None:
    engine = TransparentEngine()
    drafter = make_drafter(engine=engine)
    drafter.draft([1], GREEDY, SHAPE)
    before = len(engine.widths)
    drafter.draft_ahead(SHAPE, steps(3))
    assert len(engine.widths) == before + 3
    drafter.draft_ahead(TreeShape(12, 100, 4, 0.0), lambda: False)
    assert sum(engine.widths) <= len(drafter.keys) == MAX_CONTEXT + TREE_ROWS
    assert drafter.draft([1], GREEDY, SHAPE).tree == make_drafter().draft([1], GREEDY, SHAPE).tree


def test_nothing_is_drafted_ahead_before_a_tree_or_behind_a_written_token() -> None:
    drafter = make_drafter()
    assert drafter.draft_ahead(SHAPE, lambda: False) == 0
    drafter.draft([1, 2], GREEDY, SHAPE)
    drafter.next_token([1, 2], GREEDY)
    assert drafter.draft_ahead(SHAPE, lambda: False) == 0


def test_a_tree_ranked_for_one_seed_does_not_serve_another() -> None:
    drafter = make_drafter()
    one, two = Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)
    drafter.draft([1, 2], one, SHAPE)
    drafter.draft_ahead(SHAPE, steps(5))
    assert drafter.draft([1, 2], two, SHAPE).tree == make_drafter().draft([1, 2], two, SHAPE).tree


def test_what_was_drafted_without_any_rows_is_drafted_again() -> None:
    """The first rows come with the prompt's own token; the text itself is not read again."""
    engine = TransparentEngine()
    drafter = make_drafter(engine=engine)
    tree = drafter.draft([1, 2], GREEDY, SHAPE).tree
    drafter.draft_ahead(SHAPE, lambda: False)
    drafter.add_rows(np.arange(2), feature_rows(10, 11))
    known = len(engine.fed)
    again = drafter.draft([1, 2, tree.tokens[0]], GREEDY, SHAPE)
    assert not again.ahead and again.kept == 0 and engine.fed[known] == tree.tokens[0]


def test_nodes_drafted_ahead_keep_the_rows_they_saw() -> None:
    """Rows of the verdict reach the nodes that are expanded after it; what is there is not computed again."""
    engine = TransparentEngine()
    drafter = make_drafter(engine=engine)
    drafter.add_rows(np.arange(1), feature_rows(10))
    tree = drafter.draft([1, 2], GREEDY, SHAPE).tree
    drafter.draft_ahead(SHAPE, lambda: False)
    first = tree.tokens[0]
    drafter.add_rows(np.arange(1, 2), feature_rows(11))
    known = len(engine.widths)
    again = drafter.draft([1, 2, first], GREEDY, SHAPE)
    assert again.ahead and len(engine.widths) == known
