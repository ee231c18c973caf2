"""The published multi-seed rule fails the tests that every lossless rule passes, by about as much as it must."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from mcsd_distributions import VOCAB, Model, joint_error, random_distribution

from lab.baselines.choice import Chooser, Floats, RandomChooser, distribution_of
from lab.baselines.drafting import Draft, grow
from lab.baselines.multiseed import LossyError, draw_seeds, verify_multiseed
from lab.baselines.sampling import draw_independent, draw_top
from lab.baselines.trees import CandidateTree, How


def published_round(target: Model, drafter: Model, profile: tuple[int, ...], chooser: Chooser) -> tuple[int, ...]:
    """The tokens of one round and one of the next round's seeds."""
    seeds = draw_seeds(target.distributions[()], profile[0], chooser)
    forest = grow(drafter.level_distribution, profile, draw_independent, chooser, seeds=seeds)
    path, distribution = verify_multiseed(forest, target.rows(forest.tree), chooser, lossy=True)
    return (*(forest.tree.tokens[node] for node in path), chooser.draw(distribution))


@pytest.mark.parametrize("profile", [(2, 1), (3, 1), (2, 2)])
def test_the_joint_distribution_of_three_tokens_is_not_the_targets(profile: tuple[int, ...]) -> None:
    target, drafter = Model.random(1, 0.0), Model.random(2, 0.0)
    assert joint_error(target, lambda chooser: published_round(target, drafter, profile, chooser)) > 0.05


def test_one_seed_with_a_chain_errs_by_drawing_from_p_after_a_rejection() -> None:
    target, drafter = Model.random(3, 0.0), Model.random(4, 0.0)
    expected = 0.0
    for seed in range(VOCAB):
        p, q = target.distributions[(seed,)], drafter.distributions[(seed,)]
        shared = np.minimum(p, q)
        emitted = shared + (1.0 - shared.sum()) * p
        expected += target.distributions[()][seed] * np.abs(emitted - p).sum() / 2
    error = joint_error(target, lambda chooser: published_round(target, drafter, (1, 1), chooser))
    assert error == pytest.approx(expected)
    assert error > 0.02


def first_round(p: Floats, overlaps: Floats, seeds: int) -> tuple[float, float]:
    """Total variation of the winning seed's distribution from p [6], and how often a draft below a seed is accepted.

    The draft below seed x is accepted with probability overlaps[x]: what the drafter says is one token to which the
    target gives just that, so that there is little to enumerate.
    """
    only = np.array([1.0, 0.0])

    @cache
    def grown(drawn: tuple[int, ...]) -> tuple[Draft, Floats]:
        chooser = RandomChooser(np.random.default_rng(0))  # nothing to choose
        draft = grow(lambda tree, level: np.stack([only] * len(level)), (seeds, 1), draw_top, chooser, seeds=drawn)
        behind = [[overlaps[token], 1.0 - overlaps[token]] for token in drawn]
        return draft, np.array([only, *behind, *[only] * seeds])

    def win(chooser: Chooser) -> tuple[int, int]:
        draft, rows = grown(draw_seeds(p, seeds, chooser))
        path, _ = verify_multiseed(draft, rows, chooser, lossy=True)
        return draft.tree.tokens[path[0]], len(path)

    distribution, accepted = np.zeros(6), 0.0
    for (token, length), share in distribution_of(win).items():
        distribution[token] += share
        accepted += share * (length > 1)
    return float(np.abs(distribution - p).sum() / 2), accepted


def test_the_bias_of_the_first_token_grows_with_the_seeds() -> None:
    """Distributions over 6 tokens, drafts of depth 1: more seeds raise the acceptance from 0.7 to 0.99 and the error
    to 0.11."""
    generator = np.random.default_rng(0)
    results = np.zeros((8, 4, 2))
    for trial in results:
        odds = np.exp(1.2 * generator.normal(size=(7, 6)))
        p = odds / odds.sum(1, keepdims=True)
        odds = odds * np.exp(generator.normal(size=(7, 6)))
        q = odds / odds.sum(1, keepdims=True)
        for seeds in range(1, 5):
            trial[seeds - 1] = first_round(p[0], np.minimum(p, q).sum(1)[1:], seeds)
    error, accepted = results.mean(0).T
    np.testing.assert_allclose(error, [0.0, 0.074, 0.107, 0.111], atol=0.02)
    np.testing.assert_allclose(accepted, [0.69, 0.91, 0.97, 0.99], atol=0.03)


def forest(tokens: tuple[int, ...], parents: tuple[int, ...], q: list[list[float]]) -> Draft:
    drawn = tuple(How.FIXED if parent == -1 else How.INDEPENDENT for parent in parents)
    return Draft(CandidateTree(tokens, parents, drawn), np.array([[0.0] * len(q[0]), *q]))


def test_the_longest_path_wins_and_the_first_of_equals() -> None:
    chooser = RandomChooser(np.random.default_rng(0))
    sure, never = [1.0, 0.0], [0.0, 1.0]
    grown = forest((0, 1, 0, 0), (-1, -1, 0, 1), [[1.0, 0.0]] * 2)
    rows = np.array([[0.5, 0.5], never, sure, sure, [0.25, 0.75]])
    path, distribution = verify_multiseed(grown, rows, chooser, lossy=True)
    assert path == [1, 3]
    np.testing.assert_array_equal(distribution, [0.25, 0.75])  # whole depth: p at the end
    rows[1] = sure
    assert verify_multiseed(grown, rows, chooser, lossy=True).path == [0, 2]
    rows[1:3] = never
    path, distribution = verify_multiseed(grown, rows, chooser, lossy=True)
    assert path == [0]
    np.testing.assert_array_equal(distribution, never)  # nothing accepted: p behind the first seed, not the residual


def test_behind_a_path_cut_short_the_next_seeds_come_from_the_residual() -> None:
    chooser = RandomChooser(np.random.default_rng(0))
    grown = forest((0, 0, 0), (-1, 0, 1), [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    rows = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.5, 0.5, 0.0]])
    path, distribution = verify_multiseed(grown, rows, chooser, lossy=True)
    assert path == [0, 1]
    np.testing.assert_array_equal(distribution, [0.0, 0.0, 1.0])


def test_at_temperature_zero_a_seed_that_is_not_the_greedy_token_can_win() -> None:
    chooser = RandomChooser(np.random.default_rng(0))
    distributions = {(): [0.6, 0.4], (0,): [0.9, 0.1], (1,): [0.2, 0.8], (0, 1): [0.5, 0.5], (1, 1): [0.7, 0.3]}
    target = Model({text: np.array(row) for text, row in distributions.items()})
    drafter = Model({(0,): np.array([0.1, 0.9]), (1,): np.array([0.1, 0.9])})
    seeds = draw_seeds(target.distributions[()], 2, chooser, greedy=True)
    grown = grow(drafter.level_distribution, (2, 1), draw_top, chooser, seeds=seeds)
    path, distribution = verify_multiseed(grown, target.rows(grown.tree), chooser, lossy=True, greedy=True)
    assert seeds == (0, 1)
    assert [grown.tree.tokens[node] for node in path] == [1, 1]  # plain greedy decoding begins with 0
    np.testing.assert_array_equal(distribution, [0.7, 0.3])


def test_it_refuses_to_run_without_being_asked_for_a_lossy_method() -> None:
    generator = np.random.default_rng(0)
    chooser = RandomChooser(generator)
    target, drafter = Model.random(1), Model.random(2)
    grown = grow(
        drafter.level_distribution,
        (1, 1),
        draw_independent,
        chooser,
        seeds=draw_seeds(random_distribution(generator), 1, chooser),
    )
    with pytest.raises(LossyError, match="lossy=True"):
        verify_multiseed(grown, target.rows(grown.tree), chooser)
    with pytest.raises(TypeError):
        verify_multiseed(grown, target.rows(grown.tree), chooser, True)  # type: ignore[misc]
    with pytest.raises(ValueError, match="seed"):
        verify_multiseed(Draft(CandidateTree(), np.zeros((0, VOCAB))), np.ones((1, VOCAB)), chooser, lossy=True)
