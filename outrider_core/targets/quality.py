"""Measure how close a lowered target is to the original model, on answers that it writes itself. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_core.protocol.sampling import Sampling, log_probs
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.answers import WrittenAnswer
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.streamed import final_states, head_logits
from outrider_core.targets.weights import Weights

Floats = NDArray[np.float32]

#: tokens of an answer that are judged in one step
CHUNK = 64
#: tokens whose logits are in memory at once
TOGETHER = 512


@dataclass(frozen=True)
class Quality:
    """How much a copy differs from the model, over all tokens of some answers.

    tokens: how many. agreement: share of tokens at which copy and model have the same likeliest token. divergence: KL
    of the copy's distribution from the model's, nats per token.
    """

    tokens: int
    agreement: float
    divergence: float


def compare(
    copy: TargetBundle,
    weights: Weights,
    config: TargetConfig,
    answers: Sequence[WrittenAnswer],
    done: Callable[[int], None] = lambda layers: None,
) -> Quality:
    """Compare a copy with the model's own weights in float32, one layer in memory at a time.

    done: called with the number of the model's finished layers. Raises ValueError if nothing was written.
    """
    answers = [answer for answer in answers if len(answer.ids) > answer.start]
    if not answers:
        raise ValueError("there is no answer to compare on")
    states = final_states(weights, config, [answer.ids[:-1] for answer in answers], done)
    rows = POOL_BLOCK * max(-(-len(answer.ids) // POOL_BLOCK) for answer in answers)
    runner = OnnxRunner.of(copy, rows)
    wanted = np.concatenate([state[answer.start - 1 :] for state, answer in zip(states, answers, strict=True)])
    found = (row for answer in answers for row in answer_logits(runner, answer))
    same, divergence = 0, 0.0
    for start in range(0, len(wanted), TOGETHER):
        for logits in head_logits(weights, config, wanted[start : start + TOGETHER]):
            p, q = (log_probs(row, Sampling()).astype(np.float64) for row in (logits, next(found)))
            same += int(p.argmax() == q.argmax())
            divergence += float((np.exp(p) * (p - q)).sum())
    return Quality(len(wanted), same / len(wanted), divergence / len(wanted))


def answer_logits(runner: OnnxRunner, answer: WrittenAnswer) -> Iterator[Floats]:
    """Yield the logits from which each token of the answer was drawn."""
    if answer.start > 1:
        runner.forward([Part(0, 0, tuple(answer.ids[: answer.start - 1]), wanted=False)])
    for start in range(answer.start, len(answer.ids), CHUNK):
        written = answer.ids[start : start + CHUNK]
        yield from runner.forward([Part(0, start - 1, (answer.ids[start - 1],), TokenTree.chain(list(written[:-1])))])
