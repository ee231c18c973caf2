"""The forecast of a training run before it begins."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from export.train import train
from export.train.features import FeatureCache, Sequence
from export.train.forecast import Forecast, forecast, forecast_training
from export.train.prompts import Conversation, UserTurn
from export.train.share import ALONE
from export.train.train_options import TrainOptions
from export.train.training_set import MOA, TrainingSet
from outrider_core.models.drafter_files import save_drafter
from outrider_core.models.target import Target
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer

PLANS = [Conversation((UserTurn("w5 " * 8),)), Conversation((UserTurn("w5"), UserTurn("", True)))]


@pytest.fixture(scope="module")
def target() -> Target:
    return replace(tiny_target(tiny_model("llama", 0).float(), (3,)), tokenizer=tiny_tokenizer())


def options(folder: Path, **more: object) -> TrainOptions:
    given = {
        "output_dir": folder / "out", "work_dir": folder / "work", "self_prompts": 2, "max_new_tokens": 10,
        "max_tokens": 40, "epochs": 3, "batch_tokens": 64, "layers": 2, "draft_vocab": 64, "slots": 4, "device": "cpu",
        "own_text": 0, "on_policy": 1,
    }  # fmt: skip
    (folder / "work").mkdir(exist_ok=True)
    return TrainOptions.from_given({**given, **more})


def test_tokens_disk_and_hours(target: Target, tmp_path: Path) -> None:
    """Three answers of seven tokens, prompts of 6, 0 and 40 tokens, of which 10 may be used."""
    told = forecast(target, MOA, None, PLANS, 2, options(tmp_path, max_prompt_tokens=10))
    assert (told.answers, told.tokens, told.epochs) == (21, 21 + 6 + 0 + 10, 3)
    assert told.writing > 0 and told.training > 0 and told.free > 0
    text = Sequence(list(range(4, 24)), ((5, 20),))
    data = TrainingSet(target, [text], layers=2, draft_vocab=64)
    cache = data.features("cache", tmp_path)
    assert isinstance(cache, FeatureCache)
    cache.batch([0])
    assert told.disk == told.tokens * cache.files[0].stat().st_size // 20
    assert not forecast(target, MOA, None, PLANS, 2, options(tmp_path, features="online")).disk
    drafter = tmp_path / "drafter"
    save_drafter(drafter, data.config, data.student().trained(), {})
    untrained = forecast(target, MOA, None, PLANS, 2, options(tmp_path, epochs=0, start_from=(drafter,)))
    assert untrained.training == 0.0
    assert target.model.config._attn_implementation != "outrider_slots"
    assert not list((tmp_path / "work").glob("checkpoint*"))


def test_only_what_is_left_is_written(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.train.forecast.writing_rate", lambda *_: 2.0)
    monkeypatch.setattr("export.train.forecast.step_seconds", lambda *_: (5.0, 4.0))
    told = [forecast(target, MOA, None, PLANS, left, options(tmp_path, batch_tokens=1)) for left in (2, 1)]
    assert [one.writing for one in told] == [21 / 2, 21 / 4]
    kept, online = told[0], forecast(target, MOA, None, PLANS, 2, options(tmp_path, batch_tokens=1, features="online"))
    assert math.isclose(kept.training, kept.tokens * (3 * 1 + 4)) and math.isclose(online.training, kept.tokens * 15)


def test_given_answers_are_told_too(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes, and in two rounds four texts of the drafter's beside as many of the target's, read once more."""
    monkeypatch.setattr("export.train.forecast.step_seconds", lambda *_: (5.0, 4.0))
    texts = [Sequence(list(range(4, 24)), ((5, 20),))] * 8
    given = options(tmp_path, batch_tokens=1, own_text=2, on_policy=2, features="online")
    told = forecast_training(target, MOA, texts, given)
    assert (told.answers, told.tokens, told.writing, told.own) == (8 * 15, 160, 0.0, 4)
    assert math.isclose(told.training, 160 * 3 * 5 + 2 * 4 * 20 * 5)
    assert "writing" not in str(told) and "3 epochs and the drafter's own texts" in str(told)


def test_it_reads_as_one_line() -> None:
    text = str(Forecast(6_700_000, 9_900_000, 75_000.0, 1200.0, 5, 27_000_000_000, 61_000_000_000))
    assert text == (
        "about 6.7 M tokens of answers, 9.9 M in all; features 27.0 GB of 61.0 GB free; writing 20.8 h, "
        "5 epochs 20 min, by a few steps of each"
    )


@pytest.mark.parametrize("long", [True, False])
def test_a_long_run_is_told_what_it_takes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], long: bool
) -> None:
    monkeypatch.setattr(train, "WORTH_A_COPY", 2 if long else 3)
    given = options(tmp_path, writer="torch")
    train.answer(target, MOA, PLANS, given, ALONE)
    train.answer(target, MOA, PLANS, given, ALONE)  # all is there already
    assert capsys.readouterr().out.count("by a few steps of each") == long
