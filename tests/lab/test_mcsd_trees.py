"""Whole trees: masks, growing, and the exact joint distribution of three tokens under every method."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcsd_distributions import LENGTH, Model, joint_error

import lab.baselines
from lab.baselines.choice import Chooser, RandomChooser, distribution_of
from lab.baselines.drafting import Draft, Proceed, grow, surviving
from lab.baselines.rules import (
    Rule,
    RuleError,
    k_seq,
    mixed,
    residual_with_replacement,
    residual_without_replacement,
    sample_and_match,
)
from lab.baselines.sampling import Draw, draw_distinct, draw_independent, draw_mixed, draw_top
from lab.baselines.traversal import traverse
from lab.baselines.trees import CandidateTree, How, LevelTree, ancestor_mask, behind_context
from lab.baselines.verification import Verdict, verify
from outrider_core.protocol.tree import ROOT, TokenTree, TreeError
from tests.waiting import HANG

Verify = Callable[[Draft, Model, Chooser], Verdict]


def by(rule: Rule) -> Verify:
    return lambda draft, target, chooser: verify(draft.tree, target.rows(draft.tree), draft.q, rule, chooser)


def by_traversal(draft: Draft, target: Model, chooser: Chooser) -> Verdict:
    return traverse(draft.tree, target.rows(draft.tree), draft.q, chooser)


METHODS = {
    "match top": (by(sample_and_match), draw_top),
    "match distinct": (by(sample_and_match), draw_distinct),
    "with replacement": (by(residual_with_replacement), draw_independent),
    "without replacement": (by(residual_without_replacement), draw_distinct),
    "k-seq": (by(k_seq), draw_independent),
    "mixed": (by(mixed), draw_mixed),
    "traversal with": (by_traversal, draw_independent),
    "traversal without": (by_traversal, draw_distinct),
}
methods = pytest.mark.parametrize(("verifier", "draw"), METHODS.values(), ids=METHODS)


def emitted(tree: CandidateTree, verdict: Verdict) -> tuple[int, ...]:
    path, bonus = verdict
    assert path == [] or tree.parents[path[0]] == ROOT
    assert all(tree.parents[child] == parent for parent, child in pairwise(path))
    return (*(tree.tokens[node] for node in path), bonus)


def one_round(
    verifier: Verify, draw: Draw, target: Model, drafter: Model, profile: tuple[int, ...] = (2, 2), budget: int = 99,
    proceed: Proceed | None = None,
) -> Callable[[Chooser], tuple[int, ...]]:  # fmt: skip
    def emit(chooser: Chooser) -> tuple[int, ...]:
        draft = grow(drafter.level_distribution, profile, draw, chooser, proceed=proceed)
        draft = Draft(draft.tree.prefix(budget), draft.q)
        return emitted(draft.tree, verifier(draft, target, chooser))

    return emit


@methods
@pytest.mark.parametrize(("seed", "zeros"), [(1, 0.0), (3, 0.2), (5, 0.5)])
def test_the_joint_distribution_of_three_tokens_is_the_targets(
    verifier: Verify, draw: Draw, seed: int, zeros: float
) -> None:
    target, drafter = Model.random(seed, zeros), Model.random(seed + 1, zeros)
    assert joint_error(target, one_round(verifier, draw, target, drafter)) < 1e-12


@methods
@pytest.mark.parametrize("seed", [3, 4])
def test_so_it_is_for_trees_cut_at_a_budget(verifier: Verify, draw: Draw, seed: int) -> None:
    target, drafter = Model.random(seed), Model.random(seed + 10)
    assert joint_error(target, one_round(verifier, draw, target, drafter, (2, 2), budget=3)) < 1e-12
    assert joint_error(target, one_round(verifier, draw, target, drafter, (2, 1), budget=1)) < 1e-12


@methods
def test_so_it_is_when_drafting_stops_because_of_what_was_drafted(verifier: Verify, draw: Draw) -> None:
    target, drafter = Model.random(5), Model.random(6)
    stop = one_round(verifier, draw, target, drafter, (2, 1), proceed=lambda tree, *_: tree.tokens[0] != 1)
    assert joint_error(target, stop) < 1e-12


@methods
def test_so_it_is_without_any_candidate(verifier: Verify, draw: Draw) -> None:
    target, drafter = Model.random(7), Model.random(8)
    assert joint_error(target, one_round(verifier, draw, target, drafter, ())) < 1e-12


@methods
def test_so_it_is_below_a_hedge(verifier: Verify, draw: Draw) -> None:
    target, drafter = Model.random(9), Model.random(10)

    def emit(chooser: Chooser) -> tuple[int, ...]:
        forest = grow(
            drafter.level_distribution, (2, 2), draw, chooser, seeds=(2, 0)
        )  # drafted before the bonus is known
        bonus = chooser.draw(target.distributions[()])
        draft = surviving(forest, bonus)
        below = Model({text[1:]: row for text, row in target.distributions.items() if text[:1] == (bonus,)})
        return bonus, *emitted(draft.tree, verifier(draft, below, chooser))

    assert joint_error(target, emit) < 1e-12


def independently(draft: Draft, target: Model, chooser: Chooser) -> Verdict:
    """Wrong: every sibling is accepted or not by p / q alone."""
    p = target.rows(draft.tree)
    path, node = list[int](), ROOT
    while children := draft.tree.children[node + 1]:
        row = node + 1
        for child in children:
            token = draft.tree.tokens[child]
            if chooser.accept(p[row, token] / draft.q[row, token]):
                node = child
                path.append(child)
                break
        else:
            break
    return Verdict(path, chooser.draw(p[node + 1]))


def test_a_biased_walk_fails_the_same_test() -> None:
    target, drafter = Model.random(1, 0.0), Model.random(2, 0.0)
    assert joint_error(target, one_round(independently, draw_distinct, target, drafter)) > 0.05


@pytest.mark.parametrize(
    ("draw", "rule"), [(draw_independent, residual_with_replacement), (draw_distinct, residual_without_replacement)]
)
def test_traversal_accepts_more_than_the_node_rule(draw: Draw, rule: Rule) -> None:
    gains = []
    for seed in range(3):
        target, drafter = Model.random(20 + seed), Model.random(30 + seed)
        tokens = [
            sum(
                len(text) * share
                for text, share in distribution_of(one_round(way, draw, target, drafter, (2, 1))).items()
            )
            for way in (by_traversal, by(rule))
        ]
        gains.append(tokens[0] - tokens[1])
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_greedy_rounds_give_the_greedy_text() -> None:
    drafter = Model.random(1)
    best = Model({text: np.eye(3)[row.argmax()] for text, row in Model.random(2).distributions.items()})
    greedy = tuple[int, ...]()
    while len(greedy) < LENGTH:
        greedy += (int(best.distributions[greedy].argmax()),)
    for verifier, draw in METHODS.values():
        for text in distribution_of(one_round(verifier, draw, best, drafter, (2, 1))):
            assert text == greedy[: len(text)]


def test_traversal_refuses_candidates_that_were_not_drawn() -> None:
    target, drafter = Model.random(1), Model.random(2)
    chooser = RandomChooser(np.random.default_rng(0))
    with pytest.raises(RuleError, match="sample_and_match"):
        one_round(by_traversal, draw_top, target, drafter)(chooser)


def test_missing_rows_are_refused() -> None:
    target, drafter = Model.random(1), Model.random(2)
    chooser = RandomChooser(np.random.default_rng(0))
    tree, q = grow(drafter.level_distribution, (2, 2), draw_independent, chooser)
    p = target.rows(tree)
    assert len(q) == 3
    for rows, distributions in ((p[:-1], q), (p, q[:-1])):
        with pytest.raises(ValueError, match="rows"):
            verify(tree, rows, distributions, residual_with_replacement, chooser)
    assert verify(tree, p, None, sample_and_match, chooser)


# ---- masks and layout

PROFILES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
PARENTS = st.lists(st.integers(0, 99), max_size=20).map(lambda raw: [r % (i + 1) - 1 for i, r in enumerate(raw)])


@given(PROFILES)
def test_slices_of_the_mask_are_views_and_equal_masks_built_anew(profile: list[int]) -> None:
    whole = LevelTree(profile)
    for depth in range(1, len(profile) + 1):
        anew = LevelTree(profile[:depth])
        mask = whole.mask(depth)
        assert np.shares_memory(mask, whole.mask(len(profile)))
        assert not mask.flags.writeable
        np.testing.assert_array_equal(mask, ancestor_mask(anew.parents))
        np.testing.assert_array_equal(whole.rows(depth), mask[whole.ends[depth - 1] :])
        assert np.shares_memory(whole.rows(depth), mask)
        np.testing.assert_array_equal(whole.positions(depth, 7), 6 + mask.sum(1))
        np.testing.assert_array_equal(whole.positions(depth, 7)[whole.level(depth).start :], 6 + depth)


@given(PROFILES)
def test_levels_are_laid_out_breadth_first(profile: list[int]) -> None:
    whole = LevelTree(profile)
    assert len(whole.parents) == whole.ends[-1]
    for level in range(1, len(profile)):
        below = whole.level(level + 1)
        for place, node in enumerate(whole.level(level)):
            children = [child for child, parent in enumerate(whole.parents) if parent == node]
            assert children == [below[place * profile[level] + c] for c in range(profile[level])]


@given(PARENTS)
def test_a_mask_is_closed_under_ancestors(parents: list[int]) -> None:
    mask = ancestor_mask(parents)
    for node, parent in enumerate(parents):
        assert mask[node, node]
        assert parent == ROOT or mask[node, parent]
        for seen in np.flatnonzero(mask[node]):
            assert seen <= node
            assert not (mask[seen] & ~mask[node]).any()
    tree = TokenTree(tuple(range(len(parents))), tuple(parents))
    assert [sum(1 << int(seen) for seen in np.flatnonzero(row)) for row in mask] == tree.ancestor_bits()


@given(PARENTS, st.integers(0, 20))
def test_any_prefix_of_a_tree_is_a_tree_with_the_sliced_mask(parents: list[int], nodes: int) -> None:
    tree = CandidateTree(tuple(range(len(parents))), tuple(parents), (How.FIXED,) * len(parents))
    cut = tree.prefix(nodes)
    assert len(cut) == min(nodes, len(tree))
    np.testing.assert_array_equal(cut.mask(), tree.mask()[:nodes, :nodes])
    assert all(cut.text(node) == tree.text(node) for node in range(len(cut)))


def test_a_draft_has_the_layout_of_its_profile() -> None:
    drafter = Model.random(1)
    seen = list[tuple[range, int]]()

    def level_distribution(tree: CandidateTree, frontier: range) -> np.ndarray:
        seen.append((frontier, len(tree)))
        return drafter.level_distribution(tree, frontier)

    tree, q = grow(level_distribution, (3, 2, 1), draw_independent, RandomChooser(np.random.default_rng(0)))
    layout = LevelTree((3, 2, 1))
    assert tree.parents == layout.parents
    assert seen == [(range(ROOT, 0), 0), (layout.level(1), 3), (layout.level(2), 9)]
    np.testing.assert_array_equal(q, drafter.rows(tree.prefix(9)))


def test_drafting_stops_when_told_to_and_keeps_the_level() -> None:
    drafter = Model.random(1)
    asked = list[tuple[int, range]]()

    def proceed(tree: CandidateTree, expanded: range, q: np.ndarray) -> bool:
        np.testing.assert_array_equal(q, drafter.level_distribution(tree, expanded))
        asked.append((len(tree), expanded))
        return len(asked) < 2

    chooser = RandomChooser(np.random.default_rng(0))
    tree, q = grow(drafter.level_distribution, (2, 1, 1, 1), draw_independent, chooser, proceed=proceed)
    assert asked == [(2, range(ROOT, 0)), (4, range(2))]
    assert (len(tree), len(q)) == (4, 3)


def test_only_the_tree_below_the_drawn_token_survives() -> None:
    drafter = Model.random(11)
    chooser = RandomChooser(np.random.default_rng(0))
    forest = grow(drafter.level_distribution, (2, 2, 1), draw_independent, chooser, seeds=(2, 0))
    assert not forest.q[0].any()
    for seed in (2, 0):
        tree, q = surviving(forest, seed)
        below = [forest.tree.text(node)[1:] for node in range(len(forest.tree)) if forest.tree.text(node)[0] == seed]
        assert [tree.text(node) for node in range(len(tree))] == below[1:]
        for row in range(len(q)):
            np.testing.assert_array_equal(q[row], drafter.distributions[(seed, *tree.text(row - 1))])
        assert len(q) == 3
    assert len(surviving(forest, 1).tree) == 0


@pytest.mark.parametrize("seeds", [(1, 1), (0, 1, 2)])
def test_seeds_are_distinct_and_no_more_than_the_first_level(seeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="seeds"):
        grow(Model.random(1).level_distribution, (2, 1), draw_top, RandomChooser(np.random.default_rng(0)), seeds=seeds)


def test_what_is_no_tree_is_refused() -> None:
    with pytest.raises(TreeError, match="before"):
        CandidateTree((1, 2), (1, ROOT), (How.FIXED,) * 2)
    with pytest.raises(TreeError, match="tokens"):
        CandidateTree((1, 2), (ROOT,), (How.FIXED,) * 2)
    for profile in ((), (2, 0)):
        with pytest.raises(TreeError, match="profile"):
            LevelTree(profile)


def test_every_node_sees_the_whole_context() -> None:
    mask = LevelTree((2, 1)).mask(2)
    padded = behind_context(mask, 3)
    assert padded.shape == (4, 7)
    assert padded[:, :3].all()
    np.testing.assert_array_equal(padded[:, 3:], mask)


def test_rules_and_trees_need_no_torch() -> None:
    folder = Path(lab.baselines.__file__).parent
    trained = {"decision", "deeper", "eagle3", "files", "fused", "networks", "reused"}
    names = sorted(f"lab.baselines.{path.stem}" for path in folder.glob("[!_]*.py") if path.stem not in trained)
    assert len(names) > 5
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=folder.parents[1], check=True, timeout=HANG)
