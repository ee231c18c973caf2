"""Drawing on a device gives the tokens that outrider_core.protocol.sampling.draw gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloud.engine.acceptance import NO_TOKEN
from cloud.torch_engine.drawing import TorchLogits, _gumbel, _noise_keys, draw_on_device, draw_tokens
from outrider_core.protocol.constraint import Adjustment, adjusted
from outrider_core.protocol.noise import gumbel_noise, noise_key
from outrider_core.protocol.sampling import Sampling, draw
from tests.device import DEVICE

pytestmark = pytest.mark.gpu

#: the mass of all tokens, summed in another order, may never reach such a share of itself
JUST_BELOW_ONE = [1 - 2**-53, 1 - 4e-16, 1 - 1e-15, 1 - 1e-12]

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 1000]),
    top_p=st.sampled_from([1.0, *JUST_BELOW_ONE, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 2**31), st.integers(0, 10**6), st.booleans())
def test_same_tokens(rules: list[Sampling], seed: int, position: int, single: bool) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(rules), 301)).astype(np.float32 if single else np.float64)
    logits[:, 7] = logits[:, 200] = logits.max() + 1  # a tie at the top: the lowest id wins
    positions = list(range(position, position + len(rules)))
    want = [draw(row, rule, at) for row, rule, at in zip(logits, rules, positions, strict=True)]
    assert draw_on_device(torch.from_numpy(logits).to(DEVICE), rules, positions) == want
    assert draw_tokens(torch.from_numpy(logits).to(DEVICE), rules, positions) == want


@pytest.mark.parametrize("top_p", JUST_BELOW_ONE)
@pytest.mark.parametrize("vocab", [301, 49152])
def test_same_tokens_with_top_p_just_below_one(top_p: float, vocab: int) -> None:
    rules = [Sampling(temperature=1.0, top_p=top_p, seed=seed) for seed in range(12)]
    logits = np.random.default_rng(0).normal(0, 1, (len(rules), vocab)).astype(np.float32)
    want = [draw(row, rule, 5) for row, rule in zip(logits, rules, strict=True)]
    assert want != logits.argmax(1).tolist()
    assert draw_on_device(torch.from_numpy(logits).to(DEVICE), rules, [5] * len(rules)) == want


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_is_drawn_from_what_is_not_a_number(bad: float) -> None:
    rules = [Sampling(), Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=3), Sampling(), Sampling(temperature=0.5)]
    logits = np.random.default_rng(0).normal(0, 1, (4, 301)).astype(np.float32)
    logits[:2, 250 if bad != -np.inf else slice(None)] = bad
    logits[2:, :10] = -np.inf  # a masked token is no fault
    want = [NO_TOKEN, NO_TOKEN, *(draw(row, rule, 5) for row, rule in zip(logits[2:], rules[2:], strict=True))]
    assert draw_on_device(torch.from_numpy(logits).to(DEVICE), rules, [5] * 4) == want
    assert draw_tokens(torch.from_numpy(logits).to(DEVICE), rules, [5] * 4) == want


@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 2**31), st.booleans())
def test_same_tokens_of_adjusted_logits(rules: list[Sampling], seed: int, single: bool) -> None:
    """Biases, masks, both or none, each row its own; a row in which no token is allowed yields none."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(rules), 301)).astype(np.float32 if single else np.float64)
    adjustments: list[Adjustment | None] = []
    for _ in rules:
        tokens = rng.choice(301, rng.integers(0, 20), replace=False).astype(np.int64)
        words = [None, np.zeros(10, np.uint32), rng.integers(0, 2**32, rng.integers(1, 11), np.uint32)]
        change = Adjustment(tokens, rng.normal(0, 5, len(tokens)), words[rng.integers(0, 3)])
        adjustments.append(change if rng.random() < 0.8 else None)
    positions = list(range(9, 9 + len(rules)))
    want = []
    for row, rule, position, change in zip(logits, rules, positions, adjustments, strict=True):
        x = row if change is None else adjusted(row, change)
        want.append(draw(x, rule, position) if np.isfinite(x).any() else NO_TOKEN)
    before = logits.copy()
    assert draw_on_device(torch.from_numpy(logits).to(DEVICE), rules, positions, adjustments) == want
    assert draw_tokens(torch.from_numpy(logits).to(DEVICE), rules, positions, adjustments) == want
    assert (logits == before).all()


@given(st.data())
def test_a_tree_is_drawn_at_once(data: st.DataObject) -> None:
    """Whatever the walk asks for, adjusted or not, it is what a draw of that row alone gives."""
    rules = data.draw(st.lists(samplings, min_size=1, max_size=3))
    trees = [[0, *sorted(data.draw(st.lists(st.integers(1, 3), max_size=4)))] for _ in rules]
    logits = torch.randn(sum(map(len, trees)), 61, dtype=torch.float64, device=DEVICE)
    drawn = TorchLogits(logits, [depth for tree in trees for depth in tree])
    roots = [sum(map(len, trees[:index])) for index in range(len(trees))]
    change = Adjustment(np.array([7]), np.array([9.0]), None)
    for step in range(3):
        rows = [root + min(step, len(tree) - 1) for root, tree in zip(roots, trees, strict=True)]
        at = [100 + tree[min(step, len(tree) - 1)] for tree in trees]
        changes = [change if data.draw(st.booleans()) else None for _ in rows]
        want = draw_tokens(logits[rows], rules, at, changes)
        assert drawn.draw_trees(rows, rules, at, changes) == want


def test_same_noise() -> None:
    seeds = [0, 1, 2**40 + 3, 2**63 - 1]
    keys = _noise_keys([Sampling(1.0, seed=seed) for seed in seeds], [17] * len(seeds), DEVICE)
    assert keys.tolist() == [noise_key(seed, 17) for seed in seeds]
    want = np.stack([gumbel_noise(seed, 17, 1000) for seed in seeds])
    torch.testing.assert_close(_gumbel(keys, 1000).cpu(), torch.from_numpy(want), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_first(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 50, dtype=dtype, device=DEVICE)
    rule = Sampling(temperature=0.8, seed=3)
    assert draw_tokens(logits, [rule] * 3, [1, 2, 3]) == draw_tokens(logits.float(), [rule] * 3, [1, 2, 3])
