"""Masks, batches, losses, the trainer and its checkpoint, cached features."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from cloud.features import FeatureProducer
from cloud.runner import Runner
from export import train as room
from export.features import FeatureCache, OnlineFeatures, Sequence
from export.loss import HeadCrossEntropy
from export.own_text import write_alone
from export.run import TrainingSet
from export.train import (
    Trainer,
    TrainSettings,
    build_batch,
    draft_vocabulary,
    draw_window,
    epoch_order,
    losses,
    row_mask_of,
)
from models.baselines.networks import load_baseline, save_baseline
from models.drafter_files import load_drafter
from models.layers import tables_of
from models.moa import DrafterError, MoA, MoAConfig
from models.target import Target
from tests.tiny import tiny_model, tiny_target

#: torch says once that its fused norm is not used where activations are bfloat16 and weights float32
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")

windows = st.integers(0, 20).flatmap(lambda w: st.tuples(st.just(w), st.integers(0, max(0, w - 1))))


def some_sequences(count: int, seed: int = 0) -> list[Sequence]:
    """Prompts of random tokens; answers that follow a rule, so that there is something to learn."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(count):
        ids = [rng.randrange(4, 60) for _ in range(rng.randint(2, 6))]
        start = len(ids)
        for _ in range(rng.randint(3, 14)):
            ids.append(4 + (3 * ids[-1] + 1) % 56)
        sequences.append(Sequence(ids, ((start, len(ids)),)))
    return sequences


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tiny_model("llama", dtype=torch.float32))


@pytest.fixture(scope="module")
def config(target: Target) -> MoAConfig:
    return MoAConfig.for_target(target.config, target.model_hash, layers=2, draft_vocab=64)


def fresh_moa(target: Target, config: MoAConfig, seed: int = 0) -> MoA:
    torch.manual_seed(seed)
    moa = MoA(config)
    moa.adopt(target.model, torch.arange(64))
    return moa


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
    assert set(mask.unique().tolist()) <= {0.0, room.MASKED}


@given(st.integers(1, 60), windows)
def test_no_query_sees_its_own_row_or_a_younger_one(length: int, window_phase: tuple[int, int]) -> None:
    mask, _ = row_mask_of(length, *window_phase)
    for i in range(length):
        assert (mask[i, i + 1 :] == room.MASKED).all()  # column j + 1 is row j


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
    assert (mask[:, 0] == 0).all() and (mask[:, 1:] == room.MASKED).all()


def test_window_law() -> None:
    rng = random.Random(1)
    drawn = [draw_window(rng, 0.15) for _ in range(20_000)]
    assert set(drawn) == {*range(3, 13), 16, 32, 64, 128, 0}
    assert sum(3 <= w <= 12 for w in drawn) / 20_000 == pytest.approx(0.85, abs=0.01)
    assert drawn.count(0) / 20_000 == pytest.approx(0.05, abs=0.01)


@pytest.fixture
def cache(target: Target, config: MoAConfig, tmp_path: Path) -> FeatureCache:
    return FeatureCache(target, config, some_sequences(23), tmp_path / "features.u8")


def test_phase_is_random(cache: FeatureCache) -> None:
    """Position 9 stands at every lag of a small window, over many batches."""
    long = max(range(23), key=lambda i: len(cache.sequences[i].ids))
    lags = {
        int(build_batch(cache, [long], random.Random(seed), TrainSettings(lag_decay=0.9)).lag[0, 9])
        for seed in range(80)
    }
    assert set(range(1, 9)) <= lags


def test_learnt_positions_predict_the_answer_only(cache: FeatureCache) -> None:
    indices = [3, 4, 5]
    batch = build_batch(cache, indices, random.Random(0), TrainSettings(lag_decay=0.9))
    for b, index in enumerate(indices):
        [(begin, end)] = cache.sequences[index].answers
        learnt = batch.weight[b].nonzero().flatten().tolist()
        assert learnt == list(range(begin - 1, end - 1))


def test_weights_decay_with_lag_to_a_floor(cache: FeatureCache) -> None:
    seen = set()
    for seed in range(20):
        batch = build_batch(cache, list(range(12)), random.Random(seed), TrainSettings(lag_decay=0.8))
        chosen = batch.weight > 0
        for weight, lag in zip(batch.weight[chosen].tolist(), batch.lag[chosen].tolist(), strict=True):
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
        got, expected = room.forward(moa, beside)[0, :size], room.forward(moa, alone)[0]
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
        mask = torch.full_like(batch.row_mask, 0.0 if first_masked else room.MASKED)
        mask[..., 0] = room.MASKED if first_masked else 0.0
        one, other = (replace(batch, row_mask=mask, kv=kv) for kv in (batch.kv, other_kv))
        with torch.no_grad():
            before, moved = room.forward(moa, one), room.forward(moa, other)
            null_row += 1.0
            changed = room.forward(moa, one)
        assert torch.equal(before, moved) != first_masked
        assert torch.equal(before, changed) == first_masked


# losses


def composed(logits: Tensor, wanted: Tensor, weight: Tensor, top_weight: float, top_tokens: int) -> Tensor:
    law = torch.softmax(wanted, -1)
    top = torch.zeros_like(law).scatter_(-1, wanted.topk(min(top_tokens, wanted.shape[-1]), -1).indices, 1.0)
    return -(weight * ((1 + top_weight * top) * law * torch.log_softmax(logits, -1)).sum(-1)).sum()


@given(st.integers(0, 999), st.integers(1, 300), st.integers(2, 30), st.floats(0.1, 5), st.sampled_from([0.0, 0.7]))
def test_cross_entropy_equals_the_composed_form(seed: int, n: int, vocab: int, scale: float, top: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    state, truth = (scale * torch.randn(n, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    head = torch.randn(vocab, 5, generator=generator, dtype=torch.float64)
    weight = torch.rand(n, generator=generator, dtype=torch.float64)
    one, other = state.clone().requires_grad_(), state.clone().requires_grad_()
    loss, agreement = HeadCrossEntropy.apply(one, truth, head, weight, top, 4)
    wanted = composed(other @ head.T, truth @ head.T, weight, top, 4)
    (3.0 * loss).backward()  # a factor from outside reaches the gradient
    (3.0 * wanted).backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-9)
    same = (state @ head.T).argmax(-1) == (truth @ head.T).argmax(-1)
    assert agreement.item() == pytest.approx(same.double().mean().item())


def test_cross_entropy_is_least_at_the_teacher() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, head = torch.randn(4, 7, generator=generator), torch.randn(9, 7, generator=generator)
    leaf = truth.clone().requires_grad_()
    loss, agreement = HeadCrossEntropy.apply(leaf, truth, head, torch.ones(4), 0.0, 4)
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


# the trainer

SETTINGS = TrainSettings(epochs=3, batch_tokens=64, learning_rate=5e-3, warmup=3, held_out=2)


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Bench:
    """Trainers over one feature cache."""

    def __init__(self, target: Target, config: MoAConfig, folder: Path) -> None:
        self.target, self.config, self.folder = target, config, folder
        self.cache = FeatureCache(target, config, some_sequences(23), folder / "features.u8")

    def trainer(self, name: str, settings: TrainSettings = SETTINGS, seed: int = 0) -> Trainer:
        moa = fresh_moa(self.target, self.config, seed)
        return Trainer(moa, self.cache, settings, self.folder / f"{name}.safetensors")


@pytest.fixture
def bench(target: Target, config: MoAConfig, tmp_path: Path, one_thread: None) -> Bench:
    return Bench(target, config, tmp_path)


def run_steps(trainer: Trainer, steps: int) -> None:
    """Some steps, then the end of the process: the generator is closed, which saves."""
    run = trainer.run()
    for _ in range(steps):
        next(run)
    run.close()


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    for (name, a), (_, b) in zip(one.parameters.items(), other.parameters.items(), strict=True):
        assert torch.equal(a, b), name


def test_loss_falls_and_agreement_rises(bench: Bench) -> None:
    progress = list(bench.trainer("run", replace(SETTINGS, epochs=14)).run())
    first, last = progress[:5], progress[-5:]
    # the floor is the entropy of the target's own distribution, so the fall counts, not the share
    assert sum(p.loss for p in last) / 5 < sum(p.loss for p in first) / 5 - 0.3
    assert sum(p.agreement for p in last) > sum(p.agreement for p in first)
    assert [p.step for p in progress] == list(range(1, progress[0].steps + 1))


def test_frozen_parts_stay_the_targets(bench: Bench) -> None:
    trainer = bench.trainer("run")
    before = copy.deepcopy(trainer.student.device_half.state_dict())
    run_steps(trainer, 3)
    after = trainer.student.device_half.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not changed & {"embedding.weight", "head.weight", "draft_ids"}


@pytest.mark.parametrize("stop", [1, 6, 8], ids=["early", "epoch ends", "middle"])
def test_resumed_run_equals_an_uninterrupted_one(bench: Bench, stop: int) -> None:
    whole = bench.trainer("whole")
    assert whole.steps > 14
    run_steps(whole, 12)
    run_steps(bench.trainer("cut"), stop)
    resumed = bench.trainer("cut", seed=99)  # other first weights: all must come from the checkpoint
    assert resumed.step == stop
    run_steps(resumed, 12 - stop)
    assert_same_weights(resumed, whole)


def test_a_kill_behind_the_last_save_loses_only_the_steps_since(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.trainer("whole")
    run_steps(whole, 9)
    killed = bench.trainer("cut")
    run_steps(killed, 4)
    monkeypatch.setattr(killed, "save", lambda: None)  # what kill -9 leaves
    run_steps(killed, 3)
    resumed = bench.trainer("cut", seed=99)
    assert resumed.step == 4
    run_steps(resumed, 5)
    assert_same_weights(resumed, whole)


def test_finished_run_does_nothing_more(bench: Bench) -> None:
    first = bench.trainer("run")
    list(first.run())
    again = bench.trainer("run", seed=99)
    assert list(again.run()) == []
    assert_same_weights(again, first)


def test_progress_is_saved_while_it_runs(bench: Bench) -> None:
    trainer = bench.trainer("run")
    run = trainer.run(save_every=0.0)
    next(run)
    next(run)  # the first step is on disk before the second begins
    assert bench.trainer("run").step >= 1
    run.close()


def test_failing_save_keeps_the_old_checkpoint(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = bench.trainer("run")
    run_steps(trainer, 2)
    before = trainer.checkpoint.read_bytes()

    def full_disk(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(room, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        run_steps(trainer, 1)
    assert trainer.checkpoint.read_bytes() == before


def test_checkpoint_of_another_run_is_refused(bench: Bench) -> None:
    run_steps(bench.trainer("run"), 1)
    with pytest.raises(ValueError, match=r"is from a run of 15 steps, this one has 20; use the same prompts"):
        bench.trainer("run", replace(SETTINGS, epochs=4))


def test_held_out_sequences_are_never_trained_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = bench.trainer("run")
    trained: set[int] = set()
    build = room.build_batch

    def spy(cache: FeatureCache, indices: list[int], *rest: Any) -> Any:
        trained.update(indices)
        return build(cache, indices, *rest)

    monkeypatch.setattr(room, "build_batch", spy)
    list(trainer.run())
    assert trainer.held_out == [0, 1]
    assert trained == set(range(2, 23))


def test_evaluation_counts_what_the_head_agrees_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter whose states are the target's own agrees everywhere that is measured."""
    trainer = bench.trainer("run")
    assert all(0 <= share <= 1 for shares in trainer.evaluate().values() for share in shares)
    monkeypatch.setattr(room, "forward", lambda moa, batch: batch.hidden)
    report = trainer.evaluate()
    assert report["top1"][0] == report["top4"][0] == 1.0
    assert set(report["top1"]) <= {0.0, 1.0} and len(report["top1"]) == 6


# features


def one(features: OnlineFeatures, index: int) -> tuple[Tensor, Tensor]:
    kv, hidden = features.batch([index])
    return kv[0], hidden[0]


@torch.inference_mode()
def direct(target: Target, ids: list[int]) -> tuple[DynamicCache, Tensor]:
    cache = DynamicCache(config=target.config)
    out = target.model(torch.tensor([ids]), past_key_values=cache, use_cache=True, output_hidden_states=True)
    return cache, out.hidden_states[-1][0]


def test_feature_rows_equal_a_direct_forward(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    for index in (0, 7, 22):
        kv, hidden = one(cache, index)
        layers, expected_hidden = direct(target, cache.sequences[index].ids)
        torch.testing.assert_close(hidden.float(), expected_hidden, rtol=2e-3, atol=2e-3)
        for place, layer in enumerate(config.target_layers):
            keys, values = layers.layers[layer].keys[0], layers.layers[layer].values[0]
            interleaved = torch.cat([keys[0], values[0], keys[1], values[1]], -1)  # [K_0|V_0|K_1|V_1]
            largest = interleaved.unflatten(-1, (4, -1)).abs().amax(-1, keepdim=True) / 127
            step = largest.expand(-1, -1, 8).flatten(1) * 0.51 + 1e-3
            assert ((kv[:, place] - interleaved).abs() <= step).all()


def test_cached_hidden_is_what_the_lm_head_sees(cache: FeatureCache, target: Target) -> None:
    _, hidden = one(cache, 4)
    logits = target.model(torch.tensor([cache.sequences[4].ids])).logits[0]
    torch.testing.assert_close(target.model.lm_head(hidden.float()), logits, rtol=5e-3, atol=2e-2)


def test_training_and_serving_read_one_layout(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    """The server half gives the verifier's rows from the verifier's cache, and training's from the features."""
    half = fresh_moa(target, config).server.requires_grad_(False).eval()
    layers, _ = direct(target, cache.sequences[0].ids)
    positions = list(range(len(cache.sequences[0].ids)))
    shape = target.config
    head_dim = shape.hidden_size // shape.num_attention_heads
    runner = Runner(copy.deepcopy(target.model), len(positions), shape.num_key_value_heads, head_dim)
    runner.store.keys.copy_(torch.stack([layer.keys[0].transpose(0, 1) for layer in layers.layers]))
    runner.store.values.copy_(torch.stack([layer.values[0].transpose(0, 1) for layer in layers.layers]))
    kv = runner.gather(config.target_layers, positions)
    served = FeatureProducer(config, half, torch.device("cpu")).rows(kv, positions)
    trained = half(one(cache, 0)[0].float(), torch.tensor(positions))
    torch.testing.assert_close(trained, torch.from_numpy(served), rtol=2e-2, atol=2e-2)


def test_online_features_are_those_of_the_cache(cache: FeatureCache, target: Target, config: MoAConfig) -> None:
    """Also in a batch of several lengths; the cache rounds keys and values to int8."""
    online = OnlineFeatures(target, config, cache.sequences)
    (kv, hidden), (cached_kv, cached_hidden) = (source.batch([3, 8, 21]) for source in (online, cache))
    assert kv.shape == cached_kv.shape and hidden.shape == cached_hidden.shape
    for row, index in enumerate((3, 8, 21)):
        n = len(cache.sequences[index].ids)
        torch.testing.assert_close(hidden[row, :n], cached_hidden[row, :n].float(), rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(kv[row, :n], cached_kv[row, :n], rtol=0, atol=0.51 / 127 * float(kv.abs().max()))


# text of the drafter's own


def test_text_written_alone_is_the_drafters(cache: FeatureCache, target: Target, tmp_path: Path) -> None:
    """Greedy tokens of a whole forward that sees the rows before the last verified token and no later one."""
    lab = TrainingSet(target, cache.sequences, layers=2, draft_vocab=64)
    student = lab.student("moa").eval()
    assert isinstance(student, MoA)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    ended: list[int] = []
    own = write_alone(student, cache, [3, 9], 5, tmp_path / "own.jsonl", ended.append)
    assert ended == [5, 5]
    for index, sequence in zip([3, 9], own, strict=True):
        cut, whole = sequence.alone, cache.sequences[index]
        [(begin, end)] = whole.answers
        assert begin < cut < end and sequence.ids[:cut] == whole.ids[:cut] and len(sequence.ids) == cut + 5
        batch = build_batch(OnlineFeatures(target, lab.config, [sequence]), [0], random.Random(0), TrainSettings())
        batch = replace(batch, kv=batch.kv.float())
        assert batch.weight[0].nonzero()[:, 0].tolist() == list(range(cut - 1, cut + 4))
        assert batch.lag[0, cut - 1 :].tolist() == [1, 2, 3, 4, 5, 6]
        visible = batch.row_mask[0, cut - 1 :] == 0
        assert (visible.nonzero()[:, 1] < cut).all() and visible[:, :cut].all()  # column 0 is the null row
        with torch.no_grad():
            logits = student.head(room.forward(student, batch)[0, cut - 1 : -1])
        # rows travel as int8, so a near-tie may fall either way
        best, written = logits.max(-1).values, logits.gather(-1, torch.tensor(sequence.ids[cut:])[:, None])[:, 0]
        assert (best - written < 0.1).all()
    again = write_alone(student, cache, [3, 9], 5, tmp_path / "own.jsonl", ended.append)
    assert again == own


# baselines


@pytest.mark.parametrize("kind", ["eagle2", "lm"])
def test_baselines_have_moas_budget_and_learn(
    kind: str, target: Target, tmp_path: Path, one_thread: None, cache: FeatureCache
) -> None:
    lab = TrainingSet(target, cache.sequences, layers=2, draft_vocab=64, begin_as_target=False)  # a random target
    student, moa = lab.student(kind), lab.student("moa")
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (student, moa)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
    settings = replace(SETTINGS, epochs=14)
    trainer = Trainer(student, cache, settings, lab.checkpoint(student, settings, tmp_path))
    progress = list(trainer.run())
    assert sum(p.loss for p in progress[-5:]) < sum(p.loss for p in progress[:5]) - 0.2
    save_baseline(tmp_path / kind, student, {})  # type: ignore[arg-type]
    again, _ = load_baseline(tmp_path / kind, tables_of(target.model))
    for (name, one), (_, other) in zip(student.state_dict().items(), again.state_dict().items(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=name)
    with pytest.raises(DrafterError, match="for benchmarks only"):
        load_drafter(tmp_path / kind)


@pytest.mark.parametrize(("kind", "sees"), [("eagle2", 1), ("lm", None)])
def test_what_a_baseline_sees_of_the_target(kind: str, sees: int | None, target: Target, cache: FeatureCache) -> None:
    """EAGLE at position i: the hidden states before i, never its own; the small LM: none."""
    student = TrainingSet(target, cache.sequences, layers=2, draft_vocab=64).student(kind).eval()
    batch = build_batch(cache, [4], random.Random(0), TrainSettings())
    batch = replace(batch, hidden=batch.hidden.float())
    with torch.no_grad():
        before = room.forward(student, batch)[0]
        for changed in range(batch.tokens.shape[1]):
            hidden = batch.hidden.clone()
            hidden[0, changed] += 1.0
            after = room.forward(student, replace(batch, hidden=hidden))[0]
            moved = (after != before).any(-1).nonzero()[:, 0].tolist()
            assert (min(moved, default=None) or None) == (
                changed + sees if sees and changed + 1 < len(before) else None
            )


def test_a_full_disk_is_told_before_anything_is_written(
    target: Target, config: MoAConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(OSError, match=r"GB free, the target's features take .* --features online"):
        FeatureCache(target, config, some_sequences(23), tmp_path / "features.u8")
    assert not list(tmp_path.iterdir())


def test_features_survive_reopening(cache: FeatureCache, config: MoAConfig, tmp_path: Path) -> None:
    expected = [one(cache, index) for index in (2, 5)]
    del cache.rows, cache.filled
    reopened = FeatureCache(None, config, cache.sequences, tmp_path / "features.u8")  # type: ignore[arg-type]
    for index, (kv, hidden) in zip((2, 5), expected, strict=True):  # no target is asked again
        got = one(reopened, index)
        assert torch.equal(got[0], kv) and torch.equal(got[1], hidden)
    with pytest.raises(AttributeError):
        one(reopened, 3)  # was never computed


def test_features_of_other_sequences_are_computed_anew(target: Target, config: MoAConfig, tmp_path: Path) -> None:
    one(FeatureCache(target, config, some_sequences(3), tmp_path / "features.u8"), 0)
    other = some_sequences(4, seed=8)
    kv, _ = one(FeatureCache(target, config, other, tmp_path / "features.u8"), 0)
    fresh, _ = one(FeatureCache(target, config, other, tmp_path / "elsewhere.u8"), 0)
    assert torch.equal(kv, fresh)
