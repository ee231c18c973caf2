"""The model of a verifier: a target on some engine, with the drafter's server half, ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloud.engine.runner import FeatureProducer, ModelRunner
from cloud.engine.scheduler import Scheduler
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.drafting.ngrams import NgramTable


@dataclass(frozen=True)
class ServedModel:
    """name: the target's; target_hash, drafter_hash: sent in the handshake; "" without a drafter.

    arithmetic: of the target, such as "onnx-8-v6-1f0c33d2" or "torch-float32"; with another one the same target may
    write different text. tokenizer: the target's; None: no chat completions. eos_ids: token ids that end an answer.
    max_positions: longest sequence that the target supports. exact: a token's logits are the same bits whatever else
    its step computes. top: number of likeliest tokens known of a row, if not all are; then there are no feature rows
    either. ngrams: of its answers. scheduler: makes the scheduler of its steps.
    """

    name: str
    target_hash: str
    drafter_hash: str
    arithmetic: str
    tokenizer: ChatTokenizer | None
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int
    runner: ModelRunner
    features: FeatureProducer
    exact: bool = False
    top: int = 0
    ngrams: NgramTable | None = None
    scheduler: Callable[..., Scheduler] = Scheduler
