"""Node rules give exactly the target's distribution: every random decision is enumerated."""

from __future__ import annotations

import itertools
from math import e

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mcsd_distributions import random_distribution

from lab.baselines.choice import Chooser, Floats, RandomChooser, distribution_of
from lab.baselines.optimum import optimal_acceptance
from lab.baselines.rules import (
    RULES,
    Choice,
    Rule,
    RuleError,
    k_seq,
    mixed,
    residual_with_replacement,
    residual_without_replacement,
    sample_and_match,
)
from lab.baselines.sampling import (
    Draw,
    draft_distribution,
    draw_distinct,
    draw_independent,
    draw_mixed,
    draw_top,
    drawing,
    target_distribution,
)
from lab.baselines.trees import How, Siblings
from outrider_core.protocol.sampling import Sampling, log_probs

PAIRS = [
    (sample_and_match, draw_top),
    (sample_and_match, draw_independent),
    (sample_and_match, draw_distinct),
    (residual_with_replacement, draw_independent),
    (residual_without_replacement, draw_distinct),
    (k_seq, draw_independent),
    (mixed, draw_mixed),
    (mixed, draw_top),
]
VOCAB = 4
WEIGHTS = st.lists(st.integers(0, 4), min_size=VOCAB, max_size=VOCAB).filter(any)


def distribution(weights: list[int]) -> Floats:
    return np.array(weights) / sum(weights)


def outcomes(rule: Rule, draw: Draw, p: Floats, q: Floats, count: int) -> dict[tuple[int, bool], float]:
    """(token emitted, was it a candidate) -> probability."""

    def node(chooser: Chooser) -> tuple[int, bool]:
        siblings = draw(q, count, chooser)
        choice = rule(p, q, siblings, chooser)
        assert choice.child is None or siblings.tokens[choice.child] == choice.token
        return choice.token, choice.child is not None

    return distribution_of(node)


def error(rule: Rule, draw: Draw, p: Floats, q: Floats, count: int) -> float:
    """Total variation between the distribution of the emitted token and p."""
    emitted = np.zeros(len(p))
    for (token, _), probability in outcomes(rule, draw, p, q, count).items():
        emitted[token] += probability
    return float(np.abs(emitted - p).sum() / 2)


def acceptance(rule: Rule, draw: Draw, p: Floats, q: Floats, count: int) -> float:
    return sum(share for (_, accepted), share in outcomes(rule, draw, p, q, count).items() if accepted)


@pytest.mark.parametrize(("rule", "draw"), PAIRS)
@settings(max_examples=100)
@given(p=WEIGHTS, q=WEIGHTS, count=st.integers(1, 3))
@example(p=[1, 2, 3, 4], q=[1, 2, 3, 4], count=3)  # equal
@example(p=[1, 2, 0, 0], q=[0, 0, 2, 1], count=3)  # disjoint
@example(p=[1, 2, 3, 4], q=[0, 3, 1, 0], count=3)  # more candidates than tokens
@example(p=[1, 2, 3, 4], q=[0, 1, 0, 0], count=3)
@example(p=[0, 0, 4, 0], q=[1, 2, 3, 4], count=2)  # greedy target
def test_a_rule_gives_exactly_the_targets_distribution(
    rule: Rule, draw: Draw, p: list[int], q: list[int], count: int
) -> None:
    assert error(rule, draw, distribution(p), distribution(q), count) < 1e-12


def unadjusted(p: Floats, q: Floats | None, siblings: Siblings, chooser: Chooser) -> Choice:
    """Wrong: every candidate is tried against p itself."""
    assert q is not None
    for child, token in enumerate(siblings.tokens):
        if chooser.accept(p[token] / q[token]):
            return Choice(token, child)
    rest = np.maximum(p - q, 0.0)
    return Choice(chooser.draw(rest if rest.sum() > 0.0 else p), None)


def top_called_drawn(q: Floats, count: int, chooser: Chooser) -> Siblings:
    """Wrong above temperature 0: the most likely tokens, said to be draws from the distribution over them."""
    return Siblings(draw_top(q, count, chooser).tokens, (How.DISTINCT,) * count)


def residual_on_top(p: Floats, q: Floats | None, siblings: Siblings, chooser: Chooser) -> Choice:
    """Wrong with `top_called_drawn`: q renormalised over the candidates."""
    assert q is not None
    kept = np.zeros_like(q)
    kept[list(siblings.tokens)] = q[list(siblings.tokens)]
    return residual_without_replacement(p, kept / kept.sum(), siblings, chooser)


def draw_then_sort(q: Floats, count: int, chooser: Chooser) -> Siblings:
    """Wrong: drawn, then put in order of probability."""
    drawn = draw_distinct(q, count, chooser)
    return Siblings(tuple(sorted(drawn.tokens, key=lambda token: -q[token])), drawn.how)


def draw_then_prune(q: Floats, count: int, chooser: Chooser) -> Siblings:
    """Wrong: drawn, then the best kept."""
    drawn = draw_then_sort(q, count + 1, chooser)
    return Siblings(drawn.tokens[:count], drawn.how[:count])


@pytest.mark.parametrize(
    ("rule", "draw", "least"),
    [
        (unadjusted, draw_independent, 0.02),
        (residual_on_top, top_called_drawn, 0.2),
        (residual_without_replacement, draw_then_sort, 0.01),
        (residual_without_replacement, draw_then_prune, 0.02),
    ],
)
def test_the_enumeration_finds_biased_rules(rule: Rule, draw: Draw, least: float) -> None:
    generator = np.random.default_rng(1)
    errors = [error(rule, draw, *(random_distribution(generator, 4, 0.0) for _ in "pq"), 2) for _ in range(10)]
    assert np.mean(errors) > least


def test_sample_and_match_stays_exact_with_pruned_candidates() -> None:
    generator = np.random.default_rng(1)
    p, q = (random_distribution(generator, 4, 0.0) for _ in "pq")
    assert error(sample_and_match, draw_then_prune, p, q, 2) < 1e-12


@pytest.mark.parametrize("rule", [residual_with_replacement, residual_without_replacement, k_seq])
def test_residual_rules_refuse_candidates_that_were_not_drawn(rule: Rule) -> None:
    p = q = np.full(4, 0.25)
    chooser = RandomChooser(np.random.default_rng(0))
    with pytest.raises(RuleError, match="sample_and_match"):
        rule(p, q, draw_top(q, 2, chooser), chooser)
    with pytest.raises(RuleError, match="sample_and_match"):
        rule(p, q, draw_top(q, 1, chooser), chooser)


def test_rules_refuse_the_wrong_kind_of_draw_and_a_distribution_that_did_not_give_the_candidate() -> None:
    p, q = np.full(4, 0.25), np.array([0.5, 0.5, 0.0, 0.0])
    chooser = RandomChooser(np.random.default_rng(0))
    with pytest.raises(RuleError):
        residual_without_replacement(p, q, draw_independent(q, 2, chooser), chooser)
    with pytest.raises(RuleError):
        residual_with_replacement(p, q, draw_distinct(q, 2, chooser), chooser)
    with pytest.raises(RuleError):
        mixed(p, q, draw_distinct(q, 2, chooser), chooser)
    with pytest.raises(RuleError, match="probability 0"):
        residual_with_replacement(p, q, Siblings((3,), (How.INDEPENDENT,)), chooser)
    with pytest.raises(RuleError, match="distribution"):
        residual_with_replacement(p, None, draw_independent(q, 2, chooser), chooser)


def test_one_draw_serves_rules_with_and_without_replacement() -> None:
    p, q = distribution([1, 2, 3, 4]), distribution([4, 3, 2, 1])
    for rule, draw in itertools.product((residual_with_replacement, residual_without_replacement, k_seq), (
        draw_independent, draw_distinct,
    )):  # fmt: skip
        assert acceptance(rule, draw, p, q, 1) == pytest.approx(np.minimum(p, q).sum())


@settings(max_examples=100)
@given(p=WEIGHTS, q=WEIGHTS, count=st.integers(1, 3))
def test_acceptance_of_fixed_and_mixed_candidates_is_the_best_possible(p: list[int], q: list[int], count: int) -> None:
    target, draft = distribution(p), distribution(q)
    best = np.argsort(-draft, kind="stable")
    top = best[: min(count, np.count_nonzero(draft))]
    assert acceptance(sample_and_match, draw_top, target, draft, count) == pytest.approx(target[top].sum())
    fixed = top[: count - 1]
    rest = draft.copy()
    rest[fixed] = 0.0
    rest /= rest.sum() or 1.0
    outside = np.delete(np.minimum(target, rest), fixed).sum()
    assert acceptance(mixed, draw_mixed, target, draft, count) == pytest.approx(target[fixed].sum() + outside)


@settings(max_examples=100)
@given(p=WEIGHTS, q=WEIGHTS, count=st.integers(1, 3))
def test_no_rule_for_independent_draws_beats_the_optimum(p: list[int], q: list[int], count: int) -> None:
    target, draft = distribution(p), distribution(q)
    best = optimal_acceptance(target, draft, count)
    sets = [list(s) for size in range(VOCAB + 1) for s in itertools.combinations(range(VOCAB), size)]
    assert best == pytest.approx(1 + min(target[s].sum() - draft[s].sum() ** count for s in sets))
    for rule in (sample_and_match, residual_with_replacement, k_seq):
        assert acceptance(rule, draw_independent, target, draft, count) <= best + 1e-12
    assert acceptance(k_seq, draw_independent, target, draft, count) >= (1 - 1 / e) * best - 1e-12


def test_drawing_without_replacement_accepts_more() -> None:
    generator = np.random.default_rng(0)
    gains = []
    for _ in range(10):
        p, q = (random_distribution(generator, 4, 0.0) for _ in "pq")
        gains.append(
            acceptance(residual_without_replacement, draw_distinct, p, q, 2)
            - acceptance(residual_with_replacement, draw_independent, p, q, 2)
        )
    assert min(gains) > -1e-12
    assert np.mean(gains) > 0.01


def test_distinct_draws_follow_the_distribution_without_replacement() -> None:
    q = distribution([1, 2, 3, 0])
    drawn = distribution_of(lambda chooser: draw_distinct(q, 2, chooser).tokens)
    assert drawn == pytest.approx({(a, b): q[a] * q[b] / (1 - q[a]) for a, b in itertools.permutations(range(3), 2)})
    assert {len(tokens) for tokens in distribution_of(lambda chooser: draw_distinct(q, 9, chooser).tokens)} == {3}


def test_distributions_are_the_products() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)
    for sampling in (Sampling(temperature=0.7, top_k=5), Sampling(temperature=1.3, top_p=0.8, min_p=0.02)):
        expected = np.stack([np.exp(log_probs(row, sampling)) for row in logits])
        np.testing.assert_array_equal(draft_distribution(logits, sampling), expected)
        np.testing.assert_array_equal(target_distribution(logits, sampling), expected)
    greedy = target_distribution(logits, Sampling())
    np.testing.assert_array_equal(greedy.argmax(1), logits.argmax(1))
    assert set(greedy.ravel()) == {0.0, 1.0}
    np.testing.assert_allclose(draft_distribution(logits, Sampling()).sum(1), 1.0)


def test_candidates_at_temperature_zero_are_the_most_likely_ones() -> None:
    q, chooser = distribution([1, 4, 2, 4]), RandomChooser(np.random.default_rng(0))
    assert drawing(Sampling(), replacement=False)(q, 3, chooser) == Siblings((1, 3, 2), (How.FIXED,) * 3)
    assert drawing(Sampling(), replacement=True)(q, 3, chooser) == Siblings((1,), (How.FIXED,))
    assert drawing(Sampling(temperature=0.5), replacement=False) is draw_distinct
    assert drawing(Sampling(temperature=0.5), replacement=True) is draw_independent


def test_the_random_chooser_follows_its_distributions() -> None:
    chooser = RandomChooser(np.random.default_rng(5))
    weights = np.array([0.0, 3.0, 1.0, 0.0, 4.0, 0.0])
    n = 8000
    counts = np.bincount([chooser.draw(weights) for _ in range(n)], minlength=6)
    assert counts[weights == 0.0].sum() == 0
    expected = n * weights[weights > 0] / weights.sum()
    assert ((counts[weights > 0] - expected) ** 2 / expected).sum() < 18.4  # chi-square, 2 degrees: 1 in 10,000
    accepted = sum(chooser.accept(0.3) for _ in range(n))
    assert abs(accepted - 0.3 * n) < 4 * (n * 0.3 * 0.7) ** 0.5
    assert not any(chooser.accept(0.0) for _ in range(100))
    assert all(chooser.accept(1.0) for _ in range(100))


def test_a_generator_that_gives_zero_accepts_nothing_impossible() -> None:
    bits = np.random.MT19937(0)
    state = bits.state
    state["state"]["key"][:] = 0  # type: ignore[index]
    bits.state = state
    chooser = RandomChooser(np.random.Generator(bits))
    assert chooser.generator.random() == 0.0
    assert not chooser.accept(0.0)
    assert chooser.draw(np.array([0.0, 0.0, 1.0])) == 2


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.5, -0.1], [np.nan, 1.0], [np.inf, 1.0]])
def test_what_is_no_distribution_is_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        RandomChooser(np.random.default_rng(0)).draw(np.array(weights))
    with pytest.raises(ValueError, match="weights"):
        distribution_of(lambda chooser: chooser.draw(np.array(weights)))


def test_every_rule_is_listed_and_tested() -> None:
    assert set(RULES.values()) == {rule for rule, _ in PAIRS}
