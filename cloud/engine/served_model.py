"""What a verifier serves: a target on some engine, with the drafter's server half, ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from cloud.engine.colocated import Colocated
from cloud.engine.runner import FeatureProducer, ModelRunner
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.drafting.ngrams import NgramTable


@dataclass(frozen=True)
class ServedModel:
    """name: the target's; target_hash, drafter_hash: what the handshake tells.

    arithmetic: how the target is computed, such as "onnx-8-v6-1f0c33d2" or "torch-float32"; two that differ here may
    write different text, though their target hash is the same.
    tokenizer: the target's; None: no chat completions. eos_ids: token ids that end an answer. max_positions: longest
    sequence that the target was made for. exact: a token's logits are the same bits whatever else its step computes.
    ngrams: of its answers. colocated: drafts here too.
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
    ngrams: NgramTable | None = None
    colocated: Colocated | None = None
