"""Draft steps for lowering, comparing and timing the device half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from export.progress import Meter
from export.train.answers import AnswerLimits, generate_answers, read_answers
from export.train.prompts import Conversation, UserTurn
from outrider_core.drafting.bundle import BundleError
from outrider_core.drafting.drafter import MAX_WIDTH
from outrider_core.drafting.engines import MASKED, Engine, Floats, Ints
from outrider_core.models.moa import ServerHalf, server_half
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target, TargetFiles
from outrider_core.protocol.rows import RowShape, pack_rows, unpack_rows

#: prompts whose answers every bundle is compared on, one a line
PROMPTS = (Path(__file__).parents[1] / "prompts.txt").read_text(encoding="utf-8").splitlines()
ANSWER_TOKENS = 64
#: tokens drafted after every root, and from one root to the next
LOOKAHEAD = 6


def example_inputs(config: MoAConfig, width: int, past: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return random inputs of one draft step, in the order of outrider_core.drafting.engines.INPUTS."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    row_keys, row_values = normal(rows, 2, config.ca_kv_heads, config.head_dim).unbind(1)
    return (
        torch.randint(0, config.vocab_size, (width,), generator=generator),
        torch.arange(past, past + width),
        torch.arange(width),
        torch.where(torch.arange(past + width) > torch.arange(past, past + width)[:, None], float(MASKED), 0.0),
        normal(past, config.sa_kv_heads, config.head_dim),
        normal(past, config.sa_kv_heads, config.head_dim),
        row_keys.contiguous(),
        row_values.contiguous(),
    )


@dataclass(frozen=True)
class Passage:
    """A text to draft along. tokens [n] int64; rows [n, 2, ca_kv_heads, head_dim] by position; start: first root."""

    tokens: Ints
    rows: Floats
    start: int


def passages_for(
    files: TargetFiles, config: MoAConfig, tensors: dict[str, torch.Tensor], folder: Path, load: bool
) -> list[Passage]:
    """Return texts to compare on: the target's own answers, or without `load` the prompts with random rows.

    Answers are kept in `folder`, so that an interrupted export continues with them. Raises BundleError if the context
    is too short for either.
    """
    passages = _target_passages(files, config, tensors, folder) if load else []
    if not passages:
        passages = synthetic_passages(files, config)
    if not passages:
        raise BundleError(f"--max-context {config.max_context} leaves no room to compare engines in; give more")
    return passages


def _target_passages(
    files: TargetFiles, config: MoAConfig, tensors: dict[str, torch.Tensor], folder: Path
) -> list[Passage]:
    target = files.load()
    with Meter("target answers to compare on", len(PROMPTS)) as meter:
        return target_passages(
            target, server_half(config, tensors), folder, lambda answers: meter.update(meter.done + answers, "")
        )


def target_passages(
    target: Target, server: ServerHalf, folder: Path, on_answers: Callable[[int], None]
) -> list[Passage]:
    """Return the target's greedy answers to PROMPTS, with rows as on the wire; answers are kept in `folder`."""
    answers = folder / "answers.jsonl"
    limit = server.config.max_context - ANSWER_TOKENS
    done = {row["index"] for row in read_answers(answers)}
    on_answers(len(done))
    asked = {i: Conversation((UserTurn(text),)) for i, text in enumerate(PROMPTS) if i not in done}
    limits = AnswerLimits(limit, ANSWER_TOKENS, limit + ANSWER_TOKENS)
    if asked:
        generate_answers(target, asked, answers, limits=limits, slots=len(asked), on_end=lambda _: on_answers(1))
    passages = []
    for row in read_answers(answers):
        ids = torch.tensor(row["ids"])
        for begin, end in row["answers"]:
            if end - begin > LOOKAHEAD:
                passages.append(Passage(ids.numpy(), _rows(target, server, ids), begin))
    return passages


@torch.inference_mode()
def _rows(target: Target, server: ServerHalf, ids: torch.Tensor) -> Floats:
    config = server.config
    cache = DynamicCache()  # of all tokens, also in layers with a sliding window
    target.model.model(ids[None], cache=cache, use_cache=True)
    layers = [cache.layers[layer] for layer in config.target_layers]
    kv = torch.stack([torch.stack([x.keys[0], x.values[0]], 1).permute(2, 0, 1, 3).flatten(1) for x in layers], 1)
    exact = server(kv.float(), torch.arange(len(ids))).numpy()
    return unpack_rows(pack_rows(exact), RowShape(config.ca_kv_heads, config.head_dim))


def synthetic_passages(files: TargetFiles, config: MoAConfig) -> list[Passage]:
    """Return the same for a target too large to load here: the prompts themselves, with random rows."""
    rng = np.random.default_rng(0)
    passages = []
    for prompt in PROMPTS:
        ids = np.array(files.tokenizer(prompt)["input_ids"][: config.max_context], np.int64)
        if len(ids) > 2 * LOOKAHEAD:
            rows = rng.standard_normal((len(ids), 2, config.ca_kv_heads, config.head_dim), np.float32)
            passages.append(Passage(ids, rows, LOOKAHEAD))
    return passages


def follow(engine: Engine, config: MoAConfig, null_row: Floats | None, passage: Passage) -> Iterator[Floats]:
    """Draft along the passage: logits [LOOKAHEAD, draft_vocab] after every root that has as many tokens after it.

    Each step sees only the rows before its root. Keys and values are the engine's own, made in chunks as on a device.
    """
    tokens, positions = passage.tokens, np.arange(len(passage.tokens))
    keys = np.zeros((0, config.sa_kv_heads, config.head_dim), np.float32)
    values = keys
    seen = _seen(passage.rows[:0], null_row)
    for first in range(0, len(tokens), MAX_WIDTH):
        chunk = slice(first, min(first + MAX_WIDTH, len(tokens)))
        mask = _causal(first, chunk.stop)
        _, new_keys, new_values = engine.step(
            tokens[chunk], positions[chunk], np.array([0]), mask, keys, values, seen[0], seen[1]
        )
        keys, values = np.concatenate([keys, new_keys]), np.concatenate([values, new_values])
    for root in roots(passage):
        step, seen = slice(root, root + LOOKAHEAD), _seen(passage.rows[:root], null_row)
        yield engine.step(
            tokens[step], positions[step], np.arange(LOOKAHEAD), _causal(root, root + LOOKAHEAD), keys[:root],
            values[:root], seen[0], seen[1],
        )[0]  # fmt: skip


def roots(passage: Passage) -> range:
    return range(passage.start, len(passage.tokens) - LOOKAHEAD, LOOKAHEAD)


def _seen(rows: Floats, null_row: Floats | None) -> tuple[Floats, Floats]:
    if null_row is not None:
        rows = np.concatenate([null_row[None], rows])
    elif not len(rows):
        rows = np.zeros((1, *rows.shape[1:]), np.float32)
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


def _causal(first: int, end: int) -> NDArray[np.float32]:
    mask = np.zeros((end - first, end), np.float32)
    mask[:, first:] = np.triu(np.full((end - first, end - first), MASKED, np.float32), 1)
    return mask
