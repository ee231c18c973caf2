"""How near a lowered target is to another copy of the same model, on answers that the model writes itself. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_core.protocol.sampling import Sampling, log_probs
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.answers import WrittenAnswer
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.runner import OnnxRunner

Floats = NDArray[np.float32]

#: tokens of an answer that are judged in one step
CHUNK = 64


@dataclass(frozen=True)
class Quality:
    """Over all tokens of some answers.

    tokens: how many. agreement: share at which both copies have the same likeliest token. divergence: KL of the copy's
    distribution from the reference's, nats a token. surprise, reference_surprise: -log p of the answers' tokens under
    the copy and under the reference, nats a token.
    """

    tokens: int
    agreement: float
    divergence: float
    surprise: float
    reference_surprise: float

    @property
    def excess(self) -> float:
        """By which share -log p is above the reference's."""
        return self.surprise / self.reference_surprise - 1


def compare(
    copy: TargetBundle,
    reference: TargetBundle,
    answers: Sequence[WrittenAnswer],
    done: Callable[[int], None] = lambda answers: None,
) -> Quality:
    """Both are held in memory. done: told after each answer how many are done."""
    rows = POOL_BLOCK * max(-(-len(answer.ids) // POOL_BLOCK) for answer in answers)
    ours, theirs = (OnnxRunner.of(each, rows) for each in (copy, reference))
    sums, count = np.zeros(4), 0
    for index, answer in enumerate(answers):
        for written, p, q in zip(_chunks(answer), _log_probs(theirs, answer), _log_probs(ours, answer), strict=True):
            tokens = np.arange(len(written)), np.array(written)
            sums += (
                (p.argmax(-1) == q.argmax(-1)).sum(),
                (np.exp(p) * (p - q)).sum(),
                -q[tokens].sum(),
                -p[tokens].sum(),
            )
            count += len(written)
        done(index + 1)
    agreement, divergence, surprise, reference_surprise = (float(value) / count for value in sums)
    return Quality(count, agreement, divergence, surprise, reference_surprise)


def _chunks(answer: WrittenAnswer) -> Iterator[Sequence[int]]:
    """What was written, in pieces."""
    for start in range(answer.start, len(answer.ids), CHUNK):
        yield answer.ids[start : start + CHUNK]


def _log_probs(runner: OnnxRunner, answer: WrittenAnswer) -> Iterator[NDArray[np.float64]]:
    """Of each piece, the distributions that its tokens were drawn from: [tokens, vocab]."""
    if answer.start > 1:
        runner.forward([Part(0, 0, tuple(answer.ids[: answer.start - 1]), wanted=False)])
    past = answer.start - 1
    for written in _chunks(answer):
        tree = TokenTree.chain(list(written[:-1]))
        logits = runner.forward([Part(0, past, (answer.ids[past],), tree)])
        yield np.stack([log_probs(row, Sampling()).astype(np.float64) for row in logits])
        past += len(written)
