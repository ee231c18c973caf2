"""The drafters that MoA is compared with learn as it does."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export.train.batches import build_batch
from export.train.features import FeatureCache
from export.train.recipe import TrainSettings
from export.train.trainer import Trainer, forward
from export.train.training_set import TrainingSet
from lab.baselines.eagle3 import DRAFTED, Eagle3
from lab.baselines.files import VARIANTS, load_baseline, save_baseline
from lab.kinds import KINDS
from lab.train import main
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.layers import tables_of
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.models.target import Target
from tests.export.tiny_training import some_sequences
from tests.tiny import tiny_model, tiny_target

#: torch says once that its fused norm is not used where activations are bfloat16 and weights float32
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")

SETTINGS = TrainSettings(epochs=3, batch_tokens=64, learning_rate=5e-3, warmup=3, held_out=2)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tiny_model("llama", dtype=torch.float32))


@pytest.fixture
def cache(target: Target, tmp_path: Path) -> FeatureCache:
    config = MoAConfig.for_target(target.config, target.model_hash, layers=2, draft_vocab=64)
    return FeatureCache(target, config, some_sequences(23), tmp_path / "features")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "lm"])
def test_baselines_have_moas_budget_and_learn(
    kind: str, target: Target, tmp_path: Path, one_thread: None, cache: FeatureCache
) -> None:
    lab = TrainingSet(target, cache.sequences, layers=2, draft_vocab=64)
    student, moa = lab.student(KINDS[kind]), lab.student()
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
    student = TrainingSet(target, cache.sequences, layers=2, draft_vocab=64).student(KINDS[kind]).eval()
    batch = build_batch(cache, [4], random.Random(0), TrainSettings())
    batch = replace(batch, hidden=batch.hidden.float())
    with torch.no_grad():
        before = forward(student, batch)[0]
        for changed in range(batch.tokens.shape[1]):
            hidden = batch.hidden.clone()
            hidden[0, changed] += 1.0
            after = forward(student, replace(batch, hidden=hidden))[0]
            moved = (after != before).any(-1).nonzero()[:, 0].tolist()
            assert (min(moved, default=None) or None) == (
                changed + sees if sees and changed + 1 < len(before) else None
            )


@pytest.mark.parametrize("seed", range(4))
def test_eagle3_drafts_in_training_as_it_does_behind_a_root(seed: int, target: Target, cache: FeatureCache) -> None:
    """Every position, token by token: the target's features before its root, the head's own states behind it."""
    student = TrainingSet(target, cache.sequences, layers=2, draft_vocab=64).student(KINDS["eagle3"])
    assert isinstance(student, Eagle3)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    batch = build_batch(cache, [4, 7], random.Random(seed), TrainSettings(long_windows=0.5))
    batch = replace(batch, hidden=batch.hidden.float())
    with torch.no_grad():
        states = forward(student, batch)
        known = student.known(batch.kv, batch.hidden)
    checked = Counter[int]()
    for row, index in enumerate((4, 7)):
        for at in range(len(cache.sequences[index].ids)):
            verified = int((batch.row_mask[row, at, 1:] == 0).sum())
            root = at - (at - verified) % DRAFTED
            assert root == verified or at - verified >= DRAFTED
            features = [torch.zeros_like(known[0, 0]), *known[row, :root]]
            for end in range(root + 1, at + 2):
                empty = torch.zeros(1, 0, student.config.kv_heads, student.config.head_dim)
                mask = torch.full((1, end, end), -1e9).triu(1)
                ids, places = batch.tokens[row : row + 1, :end], torch.arange(end)[None]
                with torch.no_grad():
                    drafted = student.hidden(ids, torch.stack(features)[None], places, mask, empty, empty)[0][0]
                features.append(drafted[-1])
            torch.testing.assert_close(states[row, at], features[-1], rtol=1e-4, atol=1e-5)
            checked[at - root] += 1
    assert checked[0] and checked[1] and max(checked) >= 2


@pytest.mark.parametrize("kind", ["moa", "eagle2", "eagle3", *VARIANTS])
def test_the_command_trains_on_given_answers(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.train.keep_freed_memory", lambda: None)  # would last for the whole test run
    with (tmp_path / "answers.jsonl").open("w") as file:
        for index, sequence in enumerate(some_sequences(12)):
            row = {"index": index, "ids": sequence.ids, "answers": sequence.answers}
            file.write(json.dumps(row) + "\n")
    options = {
        "drafter": kind, "answers": tmp_path / "answers.jsonl", "target": folder / "target",
        "work-dir": tmp_path / "work",
        "output-dir": tmp_path / kind, "epochs": 1, "batch-tokens": 64, "layers": 2, "draft-vocab": 64, "device": "cpu",
        "max-tokens": 64,
    }  # fmt: skip
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    assert main(arguments) == 0
    stored = json.loads((tmp_path / kind / "config.json").read_text())
    assert stored["type"] == kind and stored["notes"]["conversations"] == 12
    assert "python -m export bundle" not in capsys.readouterr().out

    with pytest.raises(SystemExit):
        main([*arguments, "--own-text", "3"])
    assert "--own-text is for `export train`" in capsys.readouterr().err


def test_an_imported_drafter_is_not_trained_further(folder: Path, tmp_path: Path, target: Target) -> None:
    config, tensors, _ = load_drafter(folder / "moa")
    config = replace(config, null_row=False, target_hash=target.model_hash)
    save_drafter(tmp_path, config, {name: tensor for name, tensor in tensors.items() if name != "null_row"}, {})
    with pytest.raises(DrafterError, match="no null row"):
        TrainingSet(target, some_sequences(12), start_from=[tmp_path])
