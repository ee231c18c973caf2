"""Keyed noise: against the vectors, the specification rewritten in plain ints, and statistics."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_core.protocol.noise import gumbel_noise, gumbel_noise_at
from tests.protocol.make_vectors import NOISE_FILE, noise, noise_hash

VECTORS = json.loads(NOISE_FILE.read_text())
SAMPLES = 1_000_000
seeds, positions = st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)


def test_vectors_follow_the_specification() -> None:
    assert len(VECTORS) >= 200
    for row in VECTORS:
        key = row["seed"], row["position"], row["token"]
        assert row["h"] == noise_hash(*key)
        assert math.isclose(row["g"], noise(*key), rel_tol=1e-14, abs_tol=1e-14)


def test_module_follows_the_vectors() -> None:
    got = [gumbel_noise_at(r["seed"], r["position"], np.array([r["token"]]))[0] for r in VECTORS]
    # one step of h moves g by 1e-10 and more
    np.testing.assert_allclose(got, [r["g"] for r in VECTORS], rtol=1e-13, atol=1e-13)


@given(seeds, positions, st.integers(0, 2**32 - 1))
def test_module_follows_the_specification(seed: int, position: int, token: int) -> None:
    got = float(gumbel_noise_at(seed, position, np.array([token]))[0])
    assert math.isclose(got, noise(seed, position, token), rel_tol=1e-13, abs_tol=1e-13)


@given(seeds, positions, st.lists(st.integers(0, 999), max_size=20))
def test_noise_at_is_a_selection_of_the_whole(seed: int, position: int, tokens: list[int]) -> None:
    ids = np.array(tokens, np.int64)
    np.testing.assert_array_equal(gumbel_noise_at(seed, position, ids), gumbel_noise(seed, position, 1000)[ids])


def test_noise_at_keeps_the_shape_of_the_ids() -> None:
    ids = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(gumbel_noise_at(1, 2, ids), gumbel_noise(1, 2, 6).reshape(2, 3))


def test_noise_does_not_depend_on_the_vocabulary() -> None:
    np.testing.assert_array_equal(gumbel_noise(5, 6, 100), gumbel_noise(5, 6, 1000)[:100])


def test_moments_are_gumbel() -> None:
    sample = gumbel_noise(3, 100, SAMPLES)  # standard errors 0.0013 and 0.0035
    assert sample.mean() == pytest.approx(0.5772, abs=0.006)
    assert sample.var() == pytest.approx(1.6449, abs=0.016)


def test_quantiles_are_gumbel() -> None:
    sample = gumbel_noise(4, 100, SAMPLES)
    for share in (0.01, 0.1, 0.5, 0.9, 0.99):
        below = (sample < -math.log(-math.log(share))).mean()
        assert below == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / SAMPLES))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return abs(float(np.corrcoef(a, b)[0, 1]))


BOUND = 5 / math.sqrt(SAMPLES)  # five standard errors


def test_neighbouring_tokens_are_uncorrelated() -> None:
    sample = gumbel_noise(11, 50, SAMPLES)
    assert max(correlation(sample[:-lag], sample[lag:]) for lag in (1, 2, 64, 256)) < BOUND


@pytest.mark.parametrize("step", [1, 2, 256, 2**16])
def test_neighbouring_positions_are_uncorrelated(step: int) -> None:
    assert correlation(gumbel_noise(11, 50, SAMPLES), gumbel_noise(11, 50 + step, SAMPLES)) < BOUND


@pytest.mark.parametrize("step", [1, 2, 2**31, 2**32, 2**62])
def test_neighbouring_seeds_are_uncorrelated(step: int) -> None:
    assert correlation(gumbel_noise(11, 50, SAMPLES), gumbel_noise(11 + step, 50, SAMPLES)) < BOUND


def test_seed_and_position_are_not_interchangeable() -> None:
    assert correlation(gumbel_noise(50, 51, SAMPLES), gumbel_noise(51, 50, SAMPLES)) < BOUND


def test_one_tokens_noise_over_positions_is_uncorrelated() -> None:
    sample = np.array([gumbel_noise_at(7, position, np.array([42]))[0] for position in range(20_000)])
    assert correlation(sample[:-1], sample[1:]) < 5 / math.sqrt(20_000)
