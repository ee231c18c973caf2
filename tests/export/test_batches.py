"""Masks, batches, losses, order and draft vocabulary."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from export.train.batches import MASKED, build_batch, draft_vocabulary, draw_window, epoch_order, row_mask_of
from export.train.features import FeatureCache, Sequence
from export.train.loss import HeadLoss
from export.train.recipe import TrainSettings
from export.train.trainer import forward, losses
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target
from tests.export.tiny_training import fresh_moa, some_sequences

#: torch says once that its fused norm is not used where activations are bfloat16 and weights float32
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")

windows = st.integers(0, 20).flatmap(lambda w: st.tuples(st.just(w), st.integers(0, max(0, w - 1))))


# masks and batches


def naive_root(i: int, window: int, phase: int) -> int:
    if window == 0:
        return 0
    return max((r for r in range(i + 1) if r % window == phase), default=0)


@given(st.integers(1, 60), windows)
def test_row_mask_shows_the_rows_older_than_the_root(length: int, window_phase: tuple[int, int]) -> None:
    mask, _ = row_mask_of(length, *window_phase)
    assert mask.shape == (length, length + 1)
    for i in range(length):
        visible = {j - 1 for j in range(length + 1) if mask[i, j] == 0.0}
        assert visible == {-1, *range(naive_root(i, *window_phase))}  # -1: the null row
    assert set(mask.unique().tolist()) <= {0.0, MASKED}


@given(st.integers(1, 60), windows)
def test_no_query_sees_its_own_row_or_a_younger_one(length: int, window_phase: tuple[int, int]) -> None:
    mask, _ = row_mask_of(length, *window_phase)
    for i in range(length):
        assert (mask[i, i + 1 :] == MASKED).all()  # column j + 1 is row j


@given(st.integers(1, 60), windows)
def test_lag_is_the_distance_to_the_youngest_visible_row(length: int, window_phase: tuple[int, int]) -> None:
    mask, lag = row_mask_of(length, *window_phase)
    window = window_phase[0] or length
    for i in range(length):
        youngest = max(j - 1 for j in range(length + 1) if mask[i, j] == 0.0)
        assert lag[i] == i - youngest
        assert 1 <= lag[i] <= window


def test_window_zero_shows_the_null_row_only() -> None:
    mask, _ = row_mask_of(5, 0, 0)
    assert (mask[:, 0] == 0).all() and (mask[:, 1:] == MASKED).all()


def test_window_distribution() -> None:
    rng = random.Random(1)
    drawn = [draw_window(rng, 0.15) for _ in range(20_000)]
    assert set(drawn) == {*range(3, 13), 16, 32, 64, 128, 0}
    assert sum(3 <= w <= 12 for w in drawn) / 20_000 == pytest.approx(0.85, abs=0.01)
    assert drawn.count(0) / 20_000 == pytest.approx(0.05, abs=0.01)


def test_phase_is_random(cache: FeatureCache) -> None:
    """Position 9 stands at every lag of a small window, over many batches."""
    long = max(range(23), key=lambda i: len(cache.sequences[i].ids))
    lags = {
        int(build_batch(cache, [long], random.Random(seed), TrainSettings(lag_decay=0.9)).lag[0, 9])
        for seed in range(80)
    }
    assert set(range(1, 9)) <= lags


@pytest.mark.parametrize("prompt_weight", [0.0, 0.3])
def test_learnt_positions_predict_answers_and_prompts(cache: FeatureCache, prompt_weight: float) -> None:
    indices = [3, 4, 5]
    batch = build_batch(cache, indices, random.Random(0), TrainSettings(prompt_weight=prompt_weight))
    even = build_batch(cache, indices, random.Random(0), TrainSettings(prompt_weight=1.0))
    for b, index in enumerate(indices):
        [(begin, end)] = cache.sequences[index].answers
        assert batch.answer[b].nonzero().flatten().tolist() == list(range(begin - 1, end - 1))
        assert even.weight[b].nonzero().flatten().tolist() == list(range(len(cache.sequences[index].ids) - 1))
    expected = torch.where(batch.answer, even.weight, prompt_weight * even.weight)
    torch.testing.assert_close(batch.weight, expected)


def test_weights_decay_with_lag_to_a_floor(cache: FeatureCache) -> None:
    seen = set()
    for seed in range(20):
        batch = build_batch(cache, list(range(12)), random.Random(seed), TrainSettings(lag_decay=0.8))
        for weight, lag in zip(batch.weight[batch.answer].tolist(), batch.lag[batch.answer].tolist(), strict=True):
            assert weight == pytest.approx(max(0.25, 0.8 ** (lag - 1)))
            seen.add(lag)
    assert {1, 2, 3, 8} <= seen


def test_padding_changes_nothing(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    """A short sequence gives the same states alone and padded beside a long one."""
    order = sorted(range(23), key=lambda i: len(cache.sequences[i].ids))
    moa = fresh_moa(target, config).eval()
    alone = build_batch(cache, [order[0]], random.Random(5), TrainSettings(lag_decay=0.9))
    beside = build_batch(cache, [order[0], order[-1]], random.Random(5), TrainSettings(lag_decay=0.9))
    alone, beside = (replace(b, kv=b.kv.float(), hidden=b.hidden.float()) for b in (alone, beside))
    size = alone.tokens.shape[1]
    assert size < beside.tokens.shape[1]
    with torch.no_grad():
        got, expected = forward(moa, beside)[0, :size], forward(moa, alone)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_first_column_of_the_row_mask_is_the_null_row(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    """With every other column masked the text's features do not matter and the null row does; and the reverse."""
    moa = fresh_moa(target, config).eval()
    null_row = moa.device_half.null_row
    assert null_row is not None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in [p for p in moa.parameters() if p.requires_grad and p.dim() > 1]:
            parameter.normal_(0, 0.2, generator=generator)
    batch = build_batch(cache, [3, 4], random.Random(5), TrainSettings(lag_decay=0.9))
    batch = replace(batch, kv=batch.kv.float(), hidden=batch.hidden.float())
    other_kv = torch.randn(batch.kv.shape, generator=generator)
    for first_masked in (False, True):
        mask = torch.full_like(batch.row_mask, 0.0 if first_masked else MASKED)
        mask[..., 0] = MASKED if first_masked else 0.0
        one, other = (replace(batch, row_mask=mask, kv=kv) for kv in (batch.kv, other_kv))
        with torch.no_grad():
            before, moved = forward(moa, one), forward(moa, other)
            null_row += 1.0
            changed = forward(moa, one)
        assert torch.equal(before, moved) != first_masked
        assert torch.equal(before, changed) == first_masked


# losses


def composed(logits: Tensor, wanted: Tensor, weight: Tensor, eta: float) -> Tensor:
    target, drafter = torch.softmax(wanted, -1), torch.softmax(logits, -1)
    cross_entropy = -(target * drafter.log()).sum(-1)
    total_variation = (target - drafter).abs().sum(-1) / 2
    share = torch.exp(-eta * torch.minimum(target, drafter).sum(-1)).detach()
    return (weight * (share * cross_entropy + (1 - share) * total_variation)).sum()


@given(
    st.integers(0, 999), st.integers(1, 300), st.integers(2, 30), st.floats(0.1, 5), st.sampled_from([0.0, 0.5, 3.0])
)
def test_the_loss_equals_its_composed_form(seed: int, n: int, vocab: int, scale: float, eta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    state, truth = (scale * torch.randn(n, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    head = torch.randn(vocab, 5, generator=generator, dtype=torch.float64)
    weight = torch.rand(n, generator=generator, dtype=torch.float64)
    one, other = state.clone().requires_grad_(), state.clone().requires_grad_()
    loss, agreement = HeadLoss.apply(one, truth, head, weight, eta)
    wanted = composed(other @ head.T, truth @ head.T, weight, eta)
    (3.0 * loss).backward()  # a factor from outside reaches the gradient
    (3.0 * wanted).backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-9)
    same = (state @ head.T).argmax(-1) == (truth @ head.T).argmax(-1)
    assert agreement.item() == pytest.approx(same.double().mean().item())


@pytest.mark.parametrize("eta", [0.0, 3.0])
def test_the_loss_is_least_at_the_teacher(eta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    truth, head = torch.randn(4, 7, generator=generator), torch.randn(9, 7, generator=generator)
    leaf = truth.clone().requires_grad_()
    loss, agreement = HeadLoss.apply(leaf, truth, head, torch.ones(4), eta)
    loss.backward()
    assert leaf.grad is not None and leaf.grad.abs().max() < 1e-6 and agreement == 1.0


def test_loss_gradients_reach_every_trained_weight(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    moa = fresh_moa(target, config)
    with torch.no_grad():
        for parameter in moa.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    batch = build_batch(cache, [0, 1, 2], random.Random(0), TrainSettings(lag_decay=0.9))
    with torch.autocast("cpu", torch.bfloat16):
        losses(moa, batch, TrainSettings())[0].backward()
    silent = [n for n, p in moa.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().max())]
    assert silent == []


# order and vocabulary


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 99))
def test_epoch_order_covers_each_sequence_once(count: int, batch_size: int, seed: int) -> None:
    sequences = [Sequence([1] * (1 + i * 7 % 31), ()) for i in range(count)]
    batches = epoch_order(sequences, 10 * batch_size, seed)
    assert sorted(i for batch in batches for i in batch) == list(range(count))
    padded = [len(batch) * max(len(sequences[i].ids) for i in batch) for batch in batches]
    assert all(size <= 10 * batch_size or len(batch) == 1 for size, batch in zip(padded, batches, strict=True))


def test_epoch_order_depends_on_the_seed_alone() -> None:
    sequences = some_sequences(60)
    orders = [epoch_order(sequences, 60, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_batches_hold_similar_lengths() -> None:
    sequences = some_sequences(120)
    spread = [
        max(lengths) - min(lengths)
        for batch in epoch_order(sequences, 60, 0)
        for lengths in [[len(sequences[i].ids) for i in batch]]
    ]
    assert sum(spread) / len(spread) < 2


def test_draft_vocabulary_holds_the_most_frequent_answer_tokens() -> None:
    sequences = [
        Sequence([90, 90, 90, 90, 5, 5, 5, 7, 7, 8], ((4, 10),)),
        Sequence([91, 5, 92, 7, 9], ((1, 2), (3, 5))),
    ]
    ids = draft_vocabulary(sequences, 3, 100, ())
    assert ids.tolist() == [5, 7, 8]  # 8 and 9 tie: the lower; 90 to 92 stand in prompts only
    assert ids.dtype == torch.int32


def test_draft_vocabulary_always_holds_the_ends() -> None:
    sequences = [Sequence([1, 50, 50, 51, 51, 52], ((1, 6),))]
    assert draft_vocabulary(sequences, 4, 100, (98, 99)).tolist() == [50, 51, 98, 99]


@given(st.integers(1, 60), st.integers(0, 50))
def test_draft_vocabulary_is_ascending_and_full(size: int, seed: int) -> None:
    ids = draft_vocabulary(some_sequences(3, seed), size, 60, (3,)).tolist()
    assert ids == sorted(set(ids)) and len(ids) == size and 3 in ids
