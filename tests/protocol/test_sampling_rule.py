"""The draw: its distribution, its cuts, and that the test of the distribution notices a bias."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider_core.protocol.noise import gumbel_noise
from outrider_core.protocol.sampling import Sampling, draw, log_probs

LOGITS = np.array([1.0, 0.2, -0.7, 1.4, 0.0, -2.0, 0.9, 0.5])
DRAWS = 20_000
#: chi-square with 7 degrees of freedom exceeds this once in 10,000
CRITICAL = 29.88


def softmax(logits: NDArray[np.float64], temperature: float = 1.0) -> NDArray[np.float64]:
    weights = np.array([math.exp(x / temperature) for x in logits])
    return weights / weights.sum()


def chi_square(pick: Callable[[int], int], distribution: NDArray[np.float64]) -> float:
    """Pearson's statistic of DRAWS picks (one per seed) against the distribution."""
    counts = np.bincount([pick(seed) for seed in range(DRAWS)], minlength=len(distribution))
    expected = DRAWS * distribution
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_over_seeds_follow_the_softmax() -> None:
    assert chi_square(lambda seed: draw(LOGITS, Sampling(1.0, seed=seed), 33), softmax(LOGITS)) < CRITICAL


def test_draws_over_positions_follow_the_softmax() -> None:
    assert chi_square(lambda at: draw(LOGITS, Sampling(1.0, seed=9), at), softmax(LOGITS)) < CRITICAL


def test_draws_follow_the_softmax_at_a_temperature() -> None:
    assert chi_square(lambda seed: draw(LOGITS, Sampling(0.6, seed=seed), 33), softmax(LOGITS, 0.6)) < CRITICAL


def test_top_k_draws_stay_inside_and_follow_the_renormalised_law() -> None:
    kept = sorted(LOGITS)[-3] <= LOGITS
    distribution = np.where(kept, softmax(LOGITS), 0.0)
    counts = np.bincount([draw(LOGITS, Sampling(1.0, 3, seed=seed), 1) for seed in range(DRAWS)], minlength=8)
    assert counts[~kept].sum() == 0
    expected = DRAWS * (distribution / distribution.sum())[kept]
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.4  # 2 degrees of freedom, 1 in 10,000


@pytest.mark.parametrize(
    "biased",
    [
        lambda seed: draw(LOGITS, Sampling(1.08, seed=seed), 33),
        lambda seed: int(np.argmax(LOGITS + 0.93 * gumbel_noise(seed, 33, 8))),
        lambda seed: draw(LOGITS + 0.08 * (np.arange(8) == 3), Sampling(1.0, seed=seed), 33),
    ],
    ids=["temperature", "weak noise", "favourite"],
)
def test_the_chi_square_test_fails_on_a_biased_draw(biased: Callable[[int], int]) -> None:
    assert chi_square(biased, softmax(LOGITS)) > CRITICAL


def naive_law(logits: NDArray[np.float64], sampling: Sampling) -> list[float]:
    """temperature, top-k, top-p, min-p, each on what the one before left (no ties)."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, reached, kept = math.fsum(weights[i] for i in order), 0.0, []
    for i in order:
        if sampling.top_p < 1.0 and reached >= sampling.top_p * total:
            break
        kept.append(i)
        reached += weights[i]
    kept = [i for i in kept if weights[i] >= sampling.min_p * weights[kept[0]]]
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 40),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0.05, 5.0),
        top_k=st.integers(0, 50),
        top_p=st.sampled_from([1.0, 0.999]) | st.floats(0.01, 1.0),
        min_p=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    ),
)
def test_law_equals_the_naive_reference(seed: int, vocab: int, sampling: Sampling) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, vocab)
    np.testing.assert_allclose(np.exp(log_probs(logits, sampling)), naive_law(logits, sampling), atol=1e-12)


@given(st.integers(0, 10_000), st.floats(0.05, 5.0))
def test_law_sums_to_one_behind_every_cut(seed: int, temperature: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 30)
    distribution = np.exp(log_probs(logits, Sampling(temperature, 9, 0.8, 0.1)))
    assert distribution.sum() == pytest.approx(1.0, abs=1e-12)


def test_law_of_greedy_parameters_is_the_softmax() -> None:
    np.testing.assert_allclose(np.exp(log_probs(LOGITS, Sampling())), softmax(LOGITS), rtol=1e-12)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(0, 99))
def test_greedy_is_the_lowest_id_of_the_highest_logit(logits: list[int], position: int) -> None:
    drawn = draw(np.array(logits, np.float32), Sampling(seed=position), position)
    assert drawn == logits.index(max(logits))


@given(st.integers(0, 10_000), st.sampled_from([1e-4, 1e-30, 1e-300, 1e-308, 1e-310, 5e-324]))
@pytest.mark.filterwarnings("error")
def test_vanishing_temperature_equals_greedy(seed: int, temperature: float) -> None:
    logits = np.random.default_rng(seed).permutation(50) * 0.5 + 1.0
    assert draw(logits, Sampling(temperature, seed=seed), 5) == draw(logits, Sampling(), 5)


@pytest.mark.parametrize("top_p", [1.0 - 2**-53, 1.0 - 1e-15])
def test_top_p_just_below_one_keeps_almost_everything(top_p: float) -> None:
    """Whatever way the sum of all is rounded, the cut is found in the tail and not taken for the first token."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        logits = rng.normal(0, 3, 5000)
        distribution = log_probs(logits, Sampling(1.0, top_p=top_p))
        assert np.exp(log_probs(logits, Sampling(1.0))[np.isneginf(distribution)]).sum() < 1e-12


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_hardest_cut_leaves_the_best_token(cut: dict[str, float]) -> None:
    drawn = {draw(LOGITS, Sampling(5.0, seed=seed, **cut), 0) for seed in range(200)}  # type: ignore[arg-type]
    assert drawn == {3}


def test_draw_depends_on_seed_and_position_and_repeats() -> None:
    picks = [[draw(LOGITS, Sampling(1.0, seed=s), p) for p in range(64)] for s in (1, 2, 1)]
    assert picks[0] == picks[2]
    assert picks[0] != picks[1]
    assert len(set(picks[0])) > 3
