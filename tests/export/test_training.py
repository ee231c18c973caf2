"""The trainer and its checkpoint, text of the drafter's own."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from export.options import OptionsError
from export.train import precision
from export.train import trainer as module
from export.train.batches import TrainingBatch, build_batch, row_mask_of
from export.train.features import FeatureCache, OnlineFeatures, Sequence
from export.train.own_text import write_alone
from export.train.precision import training_dtype
from export.train.recipe import TrainSettings
from export.train.train_options import TrainOptions
from export.train.trainer import Trainer, losses
from export.train.training_set import TrainingSet
from outrider_core.models.drafter_files import save_drafter
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.models.target import Target
from tests.device import DEVICE
from tests.export.tiny_training import fresh_moa, some_sequences
from tests.power import forgotten, watched_disk
from tests.tiers import first, quick
from tests.tiny import VARIANTS, tiny_model, tiny_target

#: torch says once that its fused norm is not used where activations are bfloat16 and weights float32
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")


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
        self.cache = FeatureCache(target, config, some_sequences(23), folder / "features")

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


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_loss_falls_and_agreement_rises(
    dtype: torch.dtype, config: MoAConfig, tmp_path: Path, one_thread: None
) -> None:
    bench = Bench(tiny_target(tiny_model("llama", dtype=dtype)), config, tmp_path)
    progress = list(bench.trainer("run", replace(SETTINGS, epochs=14)).run())
    first, last = progress[:5], progress[-5:]
    # the floor is the entropy of the target's own distribution, so the fall counts, not the share
    assert sum(p.loss for p in last) / 5 < sum(p.loss for p in first) / 5 - 0.3
    assert sum(p.agreement for p in last) > sum(p.agreement for p in first)
    assert [p.step for p in progress] == list(range(1, progress[0].steps + 1))


#: windows in some layers, no rotary positions in some
QUICK = ("gemma3_text", "smollm3")


@pytest.mark.parametrize("family", quick(QUICK, VARIANTS))
def test_drafters_of_every_family_learn(family: str, tmp_path: Path, one_thread: None) -> None:
    """Ten steps, on the features of layers with windows and without rotary positions too."""
    target = tiny_target(tiny_model(family, dtype=torch.float32))
    config = MoAConfig.for_target(target.config, target.model_hash, layers=2, draft_vocab=64)
    progress = [step.loss for step in islice(Bench(target, config, tmp_path).trainer("run").run(), 10)]
    assert len(progress) == 10 and sum(progress[5:]) < sum(progress[:5])


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


@pytest.mark.parametrize("optimiser", first(1, [0, 1]))
def test_an_interrupt_between_the_optimisers_repeats_no_half_of_a_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, optimiser: int
) -> None:
    whole = bench.trainer("whole")
    run_steps(whole, 8)
    run_steps(bench.trainer("cut"), 3)
    cut = bench.trainer("cut", seed=99)
    one = cut.optimisers[optimiser]

    def interrupted(*_: object) -> None:
        type(one).step(one)
        raise KeyboardInterrupt

    run = cut.run()
    next(run)
    monkeypatch.setattr(one, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    resumed = bench.trainer("cut", seed=98)
    run_steps(resumed, 8 - resumed.step)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("damage", ["zeros", "cut", "empty"])
def test_a_damaged_checkpoint_is_named(bench: Bench, damage: str) -> None:
    trainer = bench.trainer("run")
    with watched_disk() as disk:
        run_steps(trainer, 2)
    assert trainer.checkpoint.name in disk.renamed and trainer.checkpoint.with_suffix(".tmp").name not in disk.unsettled
    path, size = trainer.checkpoint, trainer.checkpoint.stat().st_size
    if damage == "zeros":
        forgotten(path, size - 5000, 4096)
    else:
        os.truncate(path, size - 4096 if damage == "cut" else 0)
    with pytest.raises(ValueError, match=r"is damaged; delete it to train from the beginning, or give another"):
        bench.trainer("run")
    path.unlink()
    assert bench.trainer("run").step == 0


def test_a_resumed_run_keeps_its_curve(bench: Bench) -> None:
    cut = bench.trainer("cut")
    cut.curve.append((3, 1.5, 0.25))
    run_steps(cut, 4)
    assert bench.trainer("cut").curve == [(3, 1.5, 0.25)]


def test_text_of_another_target_is_refused(target: Target) -> None:
    vocab = target.config.vocab_size
    for wrong in (Sequence([4, vocab], ((1, 2),)), Sequence([4, -1], ((1, 2),)), Sequence([4, 5], ((1, 3),))):
        with pytest.raises(ValueError, match=f"conversation 1 is not of tiny, whose vocabulary is {vocab} tokens"):
            TrainingSet(target, [Sequence([4, 5], ((1, 2),)), wrong], layers=2, draft_vocab=64)


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

    monkeypatch.setattr(module, "save_file", full_disk)
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
    build = module.build_batch

    def spy(cache: FeatureCache, indices: list[int], *rest: Any) -> Any:
        trained.update(indices)
        return build(cache, indices, *rest)

    monkeypatch.setattr(module, "build_batch", spy)
    list(trainer.run())
    assert trainer.held_out == [0, 1]
    assert trained == set(range(2, 23))


def test_evaluation_counts_what_the_head_agrees_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter whose states are the target's own agrees everywhere that is measured."""
    monkeypatch.setattr("export.train.calibration.LEAST_ROWS", 2)
    trainer = bench.trainer("run")
    assert all(0 <= share <= 1 for shares in trainer.evaluate()[0].values() for share in shares)
    monkeypatch.setattr(module, "forward", lambda moa, batch: batch.hidden)
    report, calibration = trainer.evaluate()
    assert calibration and calibration.temperature < 1  # as it is always right
    assert calibration.error < calibration.error_before
    assert report["top1"][0] == report["top4"][0] == 1.0
    assert set(report["top1"]) <= {0.0, 1.0} and len(report["top1"]) == 6
    monkeypatch.setattr(module, "forward", lambda moa, batch: torch.where(batch.answer[..., None], batch.hidden, 0.0))
    assert trainer.evaluate() == (report, calibration)  # what the target did not write itself is not measured


# text of the drafter's own


def states_of(student: MoA, target: Target, sequence: Sequence) -> TrainingBatch:
    """A batch of one text, its features as the target has them."""
    batch = build_batch(OnlineFeatures(target, student.config, [sequence]), [0], random.Random(0), TrainSettings())
    return replace(batch, kv=batch.kv.float())


@torch.no_grad()
def test_text_written_alone_is_the_drafters(cache: FeatureCache, target: Target, tmp_path: Path) -> None:
    """Greedy tokens of a whole forward that sees the rows before the last verified token and no later one.

    They begin where the drafter, with the rows of all tokens before the newest, does not foresee the answer.
    """
    student = TrainingSet(target, cache.sequences, layers=2, draft_vocab=64).student().eval()
    assert isinstance(student, MoA)
    for parameter in student.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            parameter.normal_(0, 0.3)
    ended: list[int] = []
    some = list(range(20))  # two batches, of texts of several lengths
    own = write_alone(student, cache, some, 5, tmp_path / "own.jsonl", ended.append)
    assert ended == [0, 16, 20]
    for index, sequence in zip(some, own, strict=True):
        cut, whole = sequence.alone, cache.sequences[index]
        [(begin, end)] = whole.answers
        assert begin <= cut <= end - 1 and sequence.ids[:cut] == whole.ids[:cut]
        assert len(sequence.ids) == cut + 5
        batch = states_of(student, target, sequence)
        length = len(sequence.ids) - cut
        assert batch.weight[0].nonzero()[:, 0].tolist() == list(range(cut - 1, cut + length - 1))
        assert batch.lag[0, cut - 1 :].tolist() == list(range(1, length + 2))
        visible = batch.row_mask[0, cut - 1 :] == 0
        assert (visible.nonzero()[:, 1] < cut).all() and visible[:, :cut].all()  # column 0 is the null row
        logits = student.head(module.forward(student, batch)[0, cut - 1 : -1])
        # the cache keeps keys and values as int8, so a near-tie may fall either way
        written = [student.device_half.draft_ids.tolist().index(token) for token in sequence.ids[cut:]]
        assert (logits.amax(-1) - logits.gather(-1, torch.tensor(written)[:, None])[:, 0] < 0.1).all()
        batch = states_of(student, target, whole)
        batch = replace(batch, row_mask=row_mask_of(len(whole.ids), 1, 0)[0][None])
        best = student.device_half.draft_ids[student.head(module.forward(student, batch)[0]).argmax(-1)].tolist()
        failed = [place + 1 for place in range(begin - 1, end - 1) if best[place] != whole.ids[place + 1]]
        assert cut in failed or not failed
    again = write_alone(student, cache, some, 5, tmp_path / "own.jsonl", ended.append)
    assert again == own

    end = own[0].ids[own[0].alone + 2]
    cache.target = replace(target, eos_ids=(end,))
    shorter = write_alone(student, cache, some, 5, tmp_path / "ended.jsonl", ended.append)
    assert len(shorter[0].ids) <= own[0].alone + 3
    for sequence, longer in zip(shorter, own, strict=True):
        written = longer.ids[longer.alone :]
        kept = written.index(end) + 1 if end in written else 5
        assert sequence.ids == longer.ids[: longer.alone + kept]


@torch.no_grad()
def test_own_text_keeps_to_the_context(target: Target, tmp_path: Path) -> None:
    """Also where an answer begins behind it, or is a single token; all of it can be learnt."""
    texts = [Sequence(list(range(4, 4 + n)), ((begin, n),)) for n, begin in [(30, 3), (30, 20), (5, 4), (12, 10)]]
    student = TrainingSet(target, texts, layers=2, draft_vocab=64, max_context=12).student().eval()
    assert isinstance(student, MoA)
    features = OnlineFeatures(target, student.config, texts)
    for text, own in zip(texts, write_alone(student, features, range(4), 5, tmp_path / "own", print), strict=True):
        assert 0 < own.alone < len(own.ids) <= 12 and own.ids[: own.alone] == text.ids[: own.alone]
        assert own.alone <= text.answers[0][1] - 1
        batch = states_of(student, target, own)
        assert batch.weight[0].nonzero()[:, 0].tolist() == list(range(own.alone - 1, len(own.ids) - 1))


# the number format


@pytest.mark.parametrize("slow", [torch.float32, torch.bfloat16])
def test_training_takes_the_format_that_is_faster_here(monkeypatch: pytest.MonkeyPatch, slow: torch.dtype) -> None:
    assert training_dtype("cpu") in ("float32", "bfloat16") and training_dtype("cuda:1") == "bfloat16"
    monkeypatch.setattr(precision, "_seconds", lambda dtype: 2.0 if dtype == slow else 1.0)
    assert getattr(torch, training_dtype("cpu")) != slow


# going on from an earlier drafter


def test_a_student_goes_on_from_an_earlier_drafter(target: Target, tmp_path: Path) -> None:
    """With its weights, shapes and draft vocabulary, whatever the new texts would give."""
    first = TrainingSet(target, some_sequences(5), layers=2, draft_vocab=64).student(seed=3)
    save_drafter(tmp_path / "drafter", first.config, first.trained(), {}, as_given=True)
    data = TrainingSet(target, some_sequences(23), start_from=[tmp_path / "drafter"])
    student = data.student(seed=4)
    assert student.config == first.config and set(student.trained()) == set(first.trained())
    for name, tensor in first.trained().items():
        assert torch.equal(student.trained()[name], tensor), name
    fresh = TrainingSet(target, some_sequences(23), layers=2, draft_vocab=64)
    assert data.checkpoint(student, SETTINGS, tmp_path) != fresh.checkpoint(student, SETTINGS, tmp_path)


def test_a_student_goes_on_from_the_mean_of_several_drafters(target: Target, tmp_path: Path) -> None:
    texts, folders = some_sequences(5), [tmp_path / "one", tmp_path / "two"]
    students = [TrainingSet(target, texts, layers=2, draft_vocab=64).student(seed=seed) for seed in (3, 4)]
    for folder, student, temperature in zip(folders, students, (0.8, 0.9), strict=True):
        config = replace(student.config, confidence_temperature=temperature)
        save_drafter(folder, config, student.trained(), {}, as_given=True)
    data = TrainingSet(target, some_sequences(23), start_from=folders)
    mean, (one, two) = data.student(seed=5).trained(), (student.trained() for student in students)
    for name in set(mean) - {"draft_ids"}:
        torch.testing.assert_close(mean[name], (one[name] + two[name]) / 2)
    assert torch.equal(mean["draft_ids"], one["draft_ids"])
    assert data.start_hash == "+".join(TrainingSet(target, texts, start_from=[folder]).start_hash for folder in folders)


def test_unlike_drafters_have_no_mean(target: Target, tmp_path: Path) -> None:
    def written(name: str, layers: int, **changed: torch.Tensor) -> Path:
        student = TrainingSet(target, some_sequences(5), layers=layers, draft_vocab=64).student()
        save_drafter(tmp_path / name, student.config, {**student.trained(), **changed}, {})
        return tmp_path / name

    one = written("one", 2)
    others = {
        "other shapes than .*one": [written("layers", 1), written("weights", 2, **{"norm.weight": torch.ones(3)})],
        "another draft vocabulary than .*one": [
            written("ids", 2, draft_ids=torch.arange(64, dtype=torch.int32).flip(0))
        ],
    }
    for why, folders in others.items():
        for folder in folders:
            with pytest.raises(DrafterError, match=why):
                TrainingSet(target, some_sequences(5), start_from=[one, folder])


def test_another_targets_drafter_is_no_start(target: Target, tmp_path: Path) -> None:
    first = TrainingSet(target, some_sequences(5), layers=2, draft_vocab=64).student()
    config = replace(first.config, target_hash="0" * 16)
    save_drafter(tmp_path / "drafter", config, first.trained(), {})
    with pytest.raises(DrafterError, match="was trained on target 0000000000000000"):
        TrainingSet(target, some_sequences(5), start_from=[tmp_path / "drafter"])
    with pytest.raises(OptionsError, match=r"--start-from: .* is not a drafter folder"):
        TrainOptions(tmp_path, self_prompts=1, start_from=(tmp_path,))


@pytest.mark.gpu
def test_a_step_there_is_a_step_on_the_cpu(config: MoAConfig) -> None:
    """Features, masks, weights and losses of a batch on the device under test."""
    found = []
    for device in (torch.device("cpu"), DEVICE):
        target = tiny_target(tiny_model(dtype=torch.float32).to(device))
        student = fresh_moa(target, config).to(device)
        batch = build_batch(
            OnlineFeatures(target, config, some_sequences(6)), [0, 3, 5], random.Random(1), TrainSettings()
        )
        loss, agreement = losses(student, batch, TrainSettings())
        loss.backward()
        slopes = [p.grad.cpu() for p in student.parameters() if p.grad is not None]
        found.append([loss.detach().cpu(), agreement.cpu(), batch.weight.cpu(), batch.row_mask.cpu(), *slopes])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
