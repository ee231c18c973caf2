"""Let a lowered target answer many prompts at once. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from outrider_core.chat.tokenizer import ChatTokenizer, open_chat_tokenizer
from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.runner import OnnxRunner


@dataclass(frozen=True)
class WrittenAnswer:
    """A prompt and its answer. ids: token ids of both. start: index in `ids` of the first token of the answer."""

    ids: list[int]
    start: int


def write_answers(
    bundle: TargetBundle,
    prompts: Sequence[str],
    tokens: int,
    sampling: Sampling,
    done: Callable[[int, int], None] = lambda token, tokens: None,
) -> list[WrittenAnswer]:
    """Answer each prompt with at most `tokens` tokens. done(token, tokens): called after every token of the answers."""
    tokenizer = open_chat_tokenizer(bundle.folder)
    room = bundle.max_positions - 1
    texts = [_prompt(tokenizer, prompt)[:room] for prompt in prompts]
    starts = [len(text) for text in texts]
    extent = POOL_BLOCK * math.ceil((max(starts) + tokens) / POOL_BLOCK)
    runner = OnnxRunner.of(bundle, extent * len(texts))
    parts = {index: Part(extent * index, 0, tuple(text)) for index, text in enumerate(texts)}
    for token in range(tokens):
        logits = runner.forward(list(parts.values()))
        for index, row in zip(list(parts), logits, strict=True):
            text = texts[index]
            past = len(text)
            text.append(draw(row, sampling, past))
            if text[-1] in bundle.eos_ids or past == room:
                del parts[index]
            else:
                parts[index] = Part(extent * index, past, (text[-1],))
        done(token, tokens)
        if not parts:
            break
    return [WrittenAnswer(text, start) for text, start in zip(texts, starts, strict=True)]


def _prompt(tokenizer: ChatTokenizer, prompt: str) -> list[int]:
    try:
        if tokenizer.template:
            return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    except (TemplateError, ValueError):
        pass  # the template expects another kind of conversation
    return tokenizer.encode(prompt) or [0]
