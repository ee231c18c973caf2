"""What a verifier serves: a target on some engine, with the drafter's server half, ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloud.engine.runner import FeatureProducer, ModelRunner
from cloud.engine.scheduler import Scheduler
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.drafting.ngrams import NgramTable


@dataclass(frozen=True)
class ServedModel:
    """name: the target's; target_hash, drafter_hash: what the handshake tells; without a drafter "".

    arithmetic: how the target is computed, such as "onnx-8-v6-1f0c33d2" or "torch-float32"; two that differ here may
    write different text, though their target hash is the same.
    tokenizer: the target's; None: no chat completions. eos_ids: token ids that end an answer. max_positions: longest
    sequence that the target was made for. exact: a token's logits are the same bits whatever else its step computes.
    top: likeliest tokens that are known of a row, if not all are; then there are no feature rows either.
    ngrams: of its answers. scheduler: makes what shares its steps among sessions.
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
