"""The last stage of training: in rounds, the drafter writes texts alone and learns the target's next token in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from export.progress import Meter
from export.train.features import Sequence
from export.train.own_text import write_alone
from export.train.recipe import TrainSettings
from export.train.trainer import Trainer
from export.train.training_set import TrainingSet
from outrider_core.models.moa import MoA

#: tokens written alone after every cut, and this stage's learning rate over the main one's
OWN_TOKENS, OWN_RATE = 32, 0.2


def own_text_rounds(main: Trainer, data: TrainingSet, count: int, rounds: int, where: str) -> Iterator[Trainer]:
    """Yield the rounds after the main stage, each ready to run; run it before asking for the next one.

    In each the drafter, as the round before left it, writes on alone in `count` of the answers, in others each time; it
    learns from these and from as much of the target's own text. where: see TrainingSet.features.
    """
    texts = range(len(main.held_out), len(main.features.sequences))
    some = drawn(texts, count * rounds, main.settings.seed)
    before = main
    for number in range(rounds):
        if here := some[number::rounds]:
            yield (before := _round(main, before, data, here, where))


def _round(main: Trainer, before: Trainer, data: TrainingSet, some: Seq[int], where: str) -> Trainer:
    student, share, work = main.student, main.share, main.checkpoint.parent
    assert isinstance(student, MoA), "only MoA can write alone"
    path = before.checkpoint.with_suffix(".alone.jsonl")  # named by everything that the drafter has learnt so far
    with share.first_then_all(), Meter("own text", len(some), quiet=not share.first) as meter:
        own = write_alone(student, main.features, some, OWN_TOKENS, path, lambda done: meter.update(done, ""))
    # a trainer holds out a tenth of its sequences at most
    held_out = [data.sequences[i] for i in main.held_out[: 2 * len(some) // 9]]
    mixed = replace(data, sequences=[*held_out, *own, *(data.sequences[i] for i in some)])
    rate = OWN_RATE * main.settings.learning_rate
    settings = replace(main.settings, epochs=1, learning_rate=rate, held_out=len(held_out))
    with share.first_then_all():
        features = mixed.features(where, work)
        return Trainer(student, features, settings, mixed.checkpoint(student, settings, work), share)


def drawn(among: range, count: int, seed: int) -> list[int]:
    """Draw `count` of them in their order, or all; each seed draws others."""
    return sorted(random.Random(seed).sample(among, min(count, len(among))))


def some_of(sequences: list[Sequence], count: int, settings: TrainSettings) -> list[Sequence]:
    """Return the `count` texts that a last stage would draw, after as many held-out ones as their trainer may keep."""
    held_out = min(settings.held_out, len(sequences) // 10)
    some = drawn(range(held_out, len(sequences)), count, settings.seed)
    return [sequences[i] for i in (*range(min(held_out, len(some) // 9)), *some)]
