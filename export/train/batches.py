"""Batches for a training step, under the lagged masks of the MoA paper (arXiv 2410.03804).

Within a window that begins at a root position r, every query sees the feature rows of tokens 0..r-1 and none younger,
which is exactly what the device has while it drafts after root r. Two deliberate changes: keys are strictly older than
the root (the published lag 0 shows the drafter its own token's features, which never exist at run time), and the
window's phase is random. docs/design.md lists what else differs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from export.train.features import OnlineFeatures, Sequence, sent
from export.train.recipe import TrainSettings

MASKED = -1e9
#: number of batches, roughly, whose texts are sorted by length together; at least 400 texts are
BATCHES_SORTED = 16


@dataclass(frozen=True)
class TrainingBatch:
    """B sequences padded to S tokens. Nothing is learnt at positions of `weight` 0."""

    tokens: Tensor  # [B, S] int64
    kv: Tensor  # [B, S, layers, kv_width], in the target's number format
    hidden: Tensor  # [B, S, hidden_size], the target's, in the same
    sa_mask: Tensor  # [1, S, S] additive
    row_mask: Tensor  # [B, S, S + 1] additive; column 0 is the null row
    lag: Tensor  # [B, S] int64, distance to the youngest visible row
    weight: Tensor  # [B, S] float
    answer: Tensor  # [B, S] bool: the next token is in an answer
    learnt: Tensor  # [N] int64: positions of `weight` other than 0, as b * S + s


def draw_window(rng: random.Random, long_windows: float) -> int:
    """Draw the tokens drafted after one root: mostly as for a tree, with a heavy tail for offline spans."""
    draw = rng.random()
    if draw >= long_windows:
        return rng.randint(3, 12)
    return rng.choice((16, 32, 64, 128)) if draw < long_windows * 2 / 3 else 0  # 0: no rows at all


def _drawn_window(rng: random.Random, long_windows: float) -> tuple[int, int]:
    """Return (window, phase)."""
    window = draw_window(rng, long_windows)
    return window, rng.randrange(max(1, window))


def row_masks_of(length: int, windows: Tensor, phases: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lagged cross-attention masks of B texts: (additive [B, length, length + 1], lag [B, length]).

    Query i belongs to the window whose root is the largest r <= i with r = phase (mod window), and sees the null row
    (column 0) and the rows of tokens j < r. windows, phases [B] int64: window 0 shows the null row only. alone [B]
    int64: if it is not 0, all queries from the last verified token, alone - 1, on have that token as their root.
    """
    at = torch.arange(length, device=windows.device)
    windows, phases, last = windows[:, None], phases[:, None], alone[:, None] - 1
    roots = (at - phases).div(windows.clamp(min=1), rounding_mode="floor") * windows + phases
    roots = torch.where(windows > 0, roots, 0).clamp(min=0)
    roots = torch.where((last >= 0) & (at >= last), last, roots)
    columns = torch.arange(-1, length, device=at.device)
    visible = (columns < roots[..., None]) | (columns < 0)
    return torch.where(visible, 0.0, MASKED), at - roots + 1


def row_mask_of(length: int, window: int, phase: int) -> tuple[Tensor, Tensor]:
    """Return the same for one text that the target wrote: (additive [length, length + 1], lag [length])."""
    mask, lag = row_masks_of(length, torch.tensor([window]), torch.tensor([phase]), torch.tensor([0]))
    return mask[0], lag[0]


def build_batch(
    features: OnlineFeatures, indices: list[int], rng: random.Random, settings: TrainSettings
) -> TrainingBatch:
    """Return the batch of these texts, on the device of their features: on a GPU its masks are made there."""
    sequences = [features.sequences[i] for i in indices]
    kv, hidden = features.batch(indices)
    device, dtype = kv.device, features.target.model.dtype
    tokens = pad_sequence([torch.tensor(s.ids) for s in sequences], batch_first=True)
    count, size = tokens.shape
    drawn = [_drawn_window(rng, settings.long_windows) for _ in sequences]
    windows = torch.tensor([[*each, s.alone] for each, s in zip(drawn, sequences, strict=True)])
    row_mask, lag = row_masks_of(size, *sent(windows, device).T)

    answer = torch.zeros(count, size, dtype=torch.bool)
    elsewhere = torch.zeros(count, size)
    for b, sequence in enumerate(sequences):
        for begin, end in sequence.answers:
            answer[b, begin - 1 : end - 1] = True  # position i predicts token i + 1
        elsewhere[b, : len(sequence.ids) - 1] = 0.0 if sequence.alone else settings.prompt_weight
    whether = torch.where(answer, 1.0, elsewhere)
    decayed = (settings.lag_decay ** (lag - 1).float()).clamp(min=0.25)
    weight = decayed * sent(whether, device)
    learnt = whether.flatten().nonzero()[:, 0]  # here, as reading it from a GPU would wait
    causal = torch.full((size, size), MASKED, device=device).triu(1)[None]
    return TrainingBatch(
        sent(tokens, device), kv.to(dtype), hidden.to(dtype), causal, row_mask, lag, weight, sent(answer, device),
        sent(learnt, device),
    )  # fmt: skip


def epoch_order(sequences: Seq[Sequence], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return batches of similar length (little padding), at most `batch_tokens` padded tokens or a single sequence.

    In random order, the same for the same seed.
    """
    rng = random.Random(seed)
    order = list(range(len(sequences)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    tokens = sum(len(sequence.ids) for sequence in sequences)
    pool = max(400, BATCHES_SORTED * batch_tokens * len(sequences) // max(1, tokens))
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
    """Return ids of the `size` most frequent answer tokens [size] int32, ascending; ties and gaps: low ids first."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        for begin, end in sequence.answers:
            counts.update(sequence.ids[begin:end])
    ranked = sorted(range(vocab), key=lambda v: (v not in always, -counts[v], v))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int32)
