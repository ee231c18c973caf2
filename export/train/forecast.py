"""Forecast a long training run before it begins: tokens, disk, and hours by a few steps of each stage."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from export.train.answers import decoder_for
from export.train.features import FeatureCache, OnlineFeatures, Sequence, row_bytes
from export.train.prompts import Conversation
from export.train.recipe import TrainSettings
from export.train.train_options import TrainOptions
from export.train.trainer import Trainer
from export.train.training_set import Kind, TrainingSet
from outrider_core.models.target import Target
from outrider_core.targets.bundle import TargetBundle

#: the share of --max-new-tokens that an answer takes (in the default target's corpus 176 of 256), characters per token
#: of a prompt, tokens of a user's turn that the target writes itself, and tokens before the timed ones
ANSWERED, CHARACTERS, OWN_TURN, BEHIND = 0.7, 4, 40, 16
#: timed steps, after one that is not
TIMED = 2


@dataclass(frozen=True)
class Forecast:
    """answers: tokens that the target writes, roughly; tokens: with prompts; own: texts of the drafter, in all rounds.

    writing, training: seconds, training without the drafter's own writing. disk, free: bytes.
    """

    answers: int
    tokens: int
    writing: float
    training: float
    epochs: int
    disk: int
    free: int
    own: int = 0

    def __str__(self) -> str:
        """Return one line for a user."""
        disk = f"features {self.disk / 1e9:.1f} GB of {self.free / 1e9:.1f} GB free; " if self.disk else ""
        writing = f"writing {_hours(self.writing)}, " if self.writing else ""
        rounds = " and the drafter's own texts" if self.own else ""
        return (
            f"about {self.answers / 1e6:.2g} M tokens of answers, {self.tokens / 1e6:.2g} M in all; {disk}"
            f"{writing}{self.epochs} epochs{rounds} {_hours(self.training)}, by a few steps of each"
        )


def forecast(
    target: Target, kind: Kind, bundle: TargetBundle | None, plans: Seq[Conversation], left: int, options: TrainOptions
) -> Forecast:
    """Forecast a run whose `left` last conversations are unanswered. bundle: the copy that answers, if one does.

    Raises DrafterError and OSError.
    """
    turns = [turn for conversation in plans for turn in conversation.turns]
    answers = round(len(turns) * ANSWERED * options.max_new_tokens)
    asked = (OWN_TURN if turn.goes_on else len(turn.text) // CHARACTERS for turn in turns)
    tokens = answers + sum(min(options.max_prompt_tokens, length) for length in asked)
    rate = writing_rate(target, bundle, min(options.slots, left), options.max_tokens)
    told = _training(target, kind, answers, tokens, len(plans), options)
    return replace(told, writing=answers * left / len(plans) / rate)


def forecast_training(target: Target, kind: Kind, sequences: Seq[Sequence], options: TrainOptions) -> Forecast:
    """Forecast a run on these answers. Raises DrafterError and OSError."""
    answers, tokens = sum(one.answered for one in sequences), sum(len(one.ids) for one in sequences)
    return _training(target, kind, answers, tokens, len(sequences), options)


def _training(target: Target, kind: Kind, answers: int, tokens: int, texts: int, options: TrainOptions) -> Forecast:
    shapes = (options.layers, options.draft_vocab, options.max_context)
    any_text = [Sequence([0, 0], ((1, 2),))]
    data = TrainingSet(target, any_text, *shapes, start_from=options.start_from)
    kept = isinstance(data.features(options.features, options.work_dir), FeatureCache)
    settings = kind.taught(options.settings(tokens))
    step, read = step_seconds(data, kind, settings, options.max_tokens)
    passes = min(1, settings.epochs) if kept else settings.epochs  # passes of the target over its text
    own = min(options.own_text * options.on_policy, texts)
    # a round learns from the drafter's texts and as many of the target's, all of which the target reads again
    seconds = settings.epochs * (step - read) + passes * read + 2 * own / texts * step
    read_again = own / texts * tokens  # the drafter's texts; those of the target are kept already
    disk = round((tokens + read_again) * row_bytes(data.config)) if kept else 0
    free = shutil.disk_usage(options.work_dir).free
    return Forecast(answers, tokens, 0.0, seconds * tokens / settings.batch_tokens, settings.epochs, disk, free, own)


def writing_rate(target: Target, bundle: TargetBundle | None, slots: int, longest: int) -> float:
    """Measure tokens per second with `slots` conversations at a time."""
    rng, vocab = random.Random(0), range(target.config.vocab_size)
    decoder = decoder_for(target, bundle, slots, longest)
    try:
        prompts = {slot: rng.choices(vocab, k=min(BEHIND, longest // 2)) for slot in range(slots)}
        tokens = decoder.prefill(prompts).argmax(-1)
        decoder.step(tokens)
        began = time.monotonic()
        for _ in range(TIMED):
            decoder.step(tokens).argmax(-1).tolist()
        return slots * TIMED / (time.monotonic() - began)
    finally:
        decoder.close()


def step_seconds(data: TrainingSet, kind: Kind, settings: TrainSettings, longest: int) -> tuple[float, float]:
    """Measure (a training step, the target's pass in it) in seconds, on random text, an eighth as long."""
    settings = replace(settings, epochs=1, held_out=0)
    rng, length = random.Random(0), min(longest, max(8, settings.batch_tokens // 8))
    count = max(1, settings.batch_tokens // length) * (TIMED + 1)
    ids = [rng.choices(range(data.config.vocab_size), k=length) for _ in range(count)]
    features = OnlineFeatures(data.target, data.config, [Sequence(own, ((length // 3, length),)) for own in ids])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(data.student(kind), features, settings, Path(folder) / "checkpoint")
        steps = trainer.run()
        next(steps).loss.item()  # waits for a GPU
        began = time.monotonic()
        for last in islice(steps, TIMED):
            loss = last.loss
        loss.item()
        step = (time.monotonic() - began) / TIMED
        steps.close()
    began = time.monotonic()
    features.batch(trainer.plan[0])[1].sum().item()
    return step, min(step, time.monotonic() - began)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{max(1, round(seconds / 60))} min"
