"""What one step of training sees: batches under the lagged masks of the MoA paper (arXiv 2410.03804).

Within a window that begins at a root position r, every query sees the feature rows of tokens 0..r-1 and nothing
younger, which is exactly what the device has while it drafts behind root r. Two deliberate changes: keys are strictly
older than the root (the published lag 0 shows the drafter its own token's features, which never exist at run time),
and the window's phase is random. docs/design.md lists what else differs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from export.features import OnlineFeatures, Sequence
from export.recipe import TrainSettings

MASKED = -1e9


@dataclass(frozen=True)
class Batch:
    """B sequences padded to S tokens. Where `weight` is 0 nothing is learnt."""

    tokens: Tensor  # [B, S] int64
    kv: Tensor  # [B, S, layers, kv_width], in the target's number format
    hidden: Tensor  # [B, S, hidden_size], the target's, in the same
    sa_mask: Tensor  # [1, S, S] additive
    row_mask: Tensor  # [B, S, S + 1] additive; column 0 is the null row
    lag: Tensor  # [B, S] int64, distance to the youngest visible row
    weight: Tensor  # [B, S] float
    answer: Tensor  # [B, S] bool: the next token is in an answer


def draw_window(rng: random.Random, long_windows: float) -> int:
    """Tokens drafted behind one root. Mostly what a tree needs; a heavy tail for offline spans."""
    draw = rng.random()
    if draw >= long_windows:
        return rng.randint(3, 12)
    return rng.choice((16, 32, 64, 128)) if draw < long_windows * 2 / 3 else 0  # 0: no rows at all


def row_mask_of(length: int, window: int, phase: int) -> tuple[Tensor, Tensor]:
    """The lagged cross-attention mask: (additive [length, length + 1], lag [length]).

    Query i belongs to the window whose root is the largest r <= i with r = phase (mod window), and sees
    the null row (column 0) and the rows of tokens j < r. Window 0: the null row only.
    """
    i = torch.arange(length)
    root = torch.zeros_like(i) if window == 0 else (i - phase).div(window, rounding_mode="floor") * window + phase
    root = root.clamp(min=0)
    visible = torch.arange(-1, length)[None] < root[:, None]
    visible[:, 0] = True
    return torch.where(visible, 0.0, MASKED), i - root + 1


def build_batch(features: OnlineFeatures, indices: list[int], rng: random.Random, settings: TrainSettings) -> Batch:
    sequences = [features.sequences[i] for i in indices]
    kv, hidden = features.batch(indices)
    size, count = max(len(s.ids) for s in sequences), len(indices)
    tokens = torch.zeros(count, size, dtype=torch.long)
    row_mask = torch.full((count, size, size + 1), MASKED)
    row_mask[:, :, 0] = 0.0
    lag = torch.ones(count, size, dtype=torch.long)
    weight, answer = torch.zeros(count, size), torch.zeros(count, size, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        n = len(sequence.ids)
        tokens[b, :n] = torch.tensor(sequence.ids)
        window = draw_window(rng, settings.long_windows)
        mask, lags = row_mask_of(n, window, phase=rng.randrange(max(1, window)))
        if sequence.alone:  # one window from the last verified token to the end
            root = sequence.alone - 1
            mask[root:, : root + 1] = 0.0
            mask[root:, root + 1 :] = MASKED
            lags[root:] = torch.arange(1, n - root + 1)
        row_mask[b, :n, : n + 1], lag[b, :n] = mask, lags
        decayed = (settings.lag_decay ** (lags - 1).float()).clamp(min=0.25)
        for begin, end in sequence.answers:
            answer[b, begin - 1 : end - 1] = True  # position i predicts token i + 1
        elsewhere = 0.0 if sequence.alone else settings.prompt_weight
        weight[b, : n - 1] = decayed[:-1] * torch.where(answer[b, : n - 1], 1.0, elsewhere)
    causal = torch.full((size, size), MASKED).triu(1)[None]
    dtype = features.target.model.dtype
    return Batch(tokens, kv.to(dtype), hidden.to(dtype), causal, row_mask, lag, weight, answer)


def epoch_order(sequences: Seq[Sequence], batch_tokens: int, seed: int) -> list[list[int]]:
    """Batches of similar length (little padding), at most `batch_tokens` padded tokens unless one sequence has more.

    In random order, the same for the same seed.
    """
    rng = random.Random(seed)
    order = list(range(len(sequences)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    pool = 400
    for at in range(0, len(order), pool):
        batch: list[int] = []
        for index in sorted(order[at : at + pool], key=lambda i: len(sequences[i].ids)):
            if batch and len(sequences[index].ids) * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


def draft_vocabulary(sequences: Seq[Sequence], size: int, vocab: int, always: tuple[int, ...]) -> Tensor:
    """Ids of the `size` most frequent answer tokens [size] int32, ascending; ties and gaps: low ids first."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        for begin, end in sequence.answers:
            counts.update(sequence.ids[begin:end])
    ranked = sorted(range(vocab), key=lambda v: (v not in always, -counts[v], v))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int32)
