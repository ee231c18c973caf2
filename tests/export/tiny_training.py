"""Sequences with something to learn in them, and fresh drafters for a tiny target."""

from __future__ import annotations

import random

import torch

from export.train.features import Sequence
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target


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


def fresh_moa(target: Target, config: MoAConfig, seed: int = 0) -> MoA:
    torch.manual_seed(seed)
    moa = MoA(config)
    moa.adopt(target.model, torch.arange(64))
    return moa
