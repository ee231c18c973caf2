"""Train a MoA drafter on the target's own answers.

The lagged masks of the MoA paper (arXiv 2410.03804; docs/design.md lists what differs): within a window that begins
at a root position r, every query sees the feature rows of tokens 0..r-1 and nothing younger, which is
exactly what the device has while it drafts behind root r. Two deliberate changes: keys are strictly
older than the root (the published lag 0 shows the drafter its own token's features, which never exist
at run time), and the window's phase is random.
"""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from export.features import FeatureCache, Sequence
from models.moa import MoA

MASKED = -1e9
# Under autocast the norms get bfloat16 input and keep float32 gains; torch says once that this is not its fastest path.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


@dataclass(frozen=True)
class TrainSettings:
    epochs: int = 5
    batch_size: int = 12  # sequences
    learning_rate: float = 2e-3
    final_rate: float = 0.05  # of learning_rate, where the cosine ends
    warmup: int = 50  # steps
    distribution_weight: float = 1.0  # soft cross-entropy with the target's distribution (as in the paper)
    feature_weight: float = 0.1  # SmoothL1 to the target's last hidden state (as in the paper)
    lag_decay: float = 0.9  # loss weight per extra token of lag, floored at 0.25
    held_out: int = 64  # sequences kept from training to measure agreement
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """B sequences padded to S tokens. Where `weight` is 0 nothing is learnt."""

    tokens: Tensor  # [B, S] int64
    kv: Tensor  # [B, S, layers, kv_width]
    hidden: Tensor  # [B, S, hidden_size], the target's
    sa_mask: Tensor  # [1, S, S] additive
    row_mask: Tensor  # [B, S, S + 1] additive; column 0 is the null row
    lag: Tensor  # [B, S] int64, distance to the youngest visible row
    weight: Tensor  # [B, S] float


def draw_window(rng: random.Random) -> int:
    """Tokens drafted behind one root. Mostly what a tree needs; a heavy tail for offline spans."""
    draw = rng.random()
    if draw < 0.85:
        return rng.randint(3, 12)
    return rng.choice((16, 32, 64, 128)) if draw < 0.95 else 0  # 0: no rows at all


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


def build_batch(cache: FeatureCache, indices: list[int], rng: random.Random, decay: float) -> Batch:
    sequences = [cache.sequences[i] for i in indices]
    features = [cache.get(i) for i in indices]
    size, count = max(len(s.ids) for s in sequences), len(indices)
    config = cache.config
    tokens = torch.zeros(count, size, dtype=torch.long)
    kv = torch.zeros(count, size, len(config.target_layers), config.kv_width, dtype=torch.bfloat16)
    hidden = torch.zeros(count, size, config.hidden_size, dtype=torch.bfloat16)
    row_mask = torch.full((count, size, size + 1), MASKED)
    row_mask[:, :, 0] = 0.0
    lag = torch.ones(count, size, dtype=torch.long)
    weight = torch.zeros(count, size)
    for b, (sequence, (keys, states)) in enumerate(zip(sequences, features, strict=True)):
        n = len(sequence.ids)
        tokens[b, :n] = torch.tensor(sequence.ids)
        kv[b, :n], hidden[b, :n] = keys, states
        window = draw_window(rng)
        mask, lags = row_mask_of(n, window, rng.randrange(max(1, window)))
        row_mask[b, :n, : n + 1], lag[b, :n] = mask, lags
        for begin, end in sequence.answers:
            learn = slice(begin - 1, end - 1)  # position i predicts token i + 1
            weight[b, learn] = (decay ** (lags[learn] - 1).float()).clamp(min=0.25)
    causal = torch.full((size, size), MASKED).triu(1)[None]
    return Batch(tokens, kv, hidden, causal, row_mask, lag, weight)


def forward(moa: MoA, batch: Batch) -> Tensor:
    """Drafter states before the LM head [B, S, hidden_size], every position with its own lag."""
    count, size = batch.tokens.shape
    positions = torch.arange(size, device=batch.tokens.device)
    flat = positions.repeat(count)
    rows = moa.server(batch.kv.flatten(0, 1), flat).unflatten(0, (count, size))
    shape = (count, 0, moa.config.sa_kv_heads, moa.config.head_dim)
    empty = rows.new_zeros(shape)
    positions = positions.expand(count, size)
    assert moa.device_half.null_row is not None, "drafters are trained with a null row"
    rows = torch.cat([moa.device_half.null_row.to(rows.dtype).expand(count, 1, -1, -1, -1), rows], 1)
    keys, values = rows.unbind(2)
    return moa.device_half.hidden(batch.tokens, positions, batch.sa_mask, empty, empty, keys, values, batch.row_mask)[0]


class SoftCrossEntropy(torch.autograd.Function):
    """sum_i weight_i * -sum_v softmax(wanted)_iv log softmax(logits)_iv, with its gradient at once.

    logits, wanted [N, V] (wanted is a constant), weight [N] -> scalar float32. The gradient
    weight * (softmax(logits) - softmax(wanted)) is formed while both softmaxes are at hand, which on a CPU
    takes a third of the time of the composed form.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        log_total = logits.float().logsumexp(-1)
        teacher = torch.softmax(wanted, -1)
        cross = torch.linalg.vecdot(teacher.float(), logits.float())
        student = torch.softmax(logits, -1)
        ctx.save_for_backward(student.sub_(teacher).mul_(weight[:, None].to(student.dtype)))
        return (weight * (log_total - cross)).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None


def losses(moa: MoA, batch: Batch, settings: TrainSettings) -> tuple[Tensor, Tensor]:
    """(loss, top-1 agreement) over the learnt positions. Both loss terms are the paper's."""
    chosen = batch.weight > 0
    state, truth, weight = forward(moa, batch)[chosen], batch.hidden[chosen], batch.weight[chosen]
    weight = weight / weight.sum()
    logits = moa.device_half.head(state)
    with torch.no_grad():
        wanted = moa.device_half.head(truth)
        agreement = (wanted.argmax(-1) == logits.argmax(-1)).float().mean()
    entropy = SoftCrossEntropy.apply(logits, wanted, weight)
    feature = functional.smooth_l1_loss(state.float(), truth.float(), reduction="none").mean(-1)
    return settings.distribution_weight * entropy + settings.feature_weight * (weight * feature).sum(), agreement


def epoch_order(sequences: list[Sequence], batch_size: int, seed: int) -> list[list[int]]:
    """Batches of similar length (little padding) in random order; the same for the same seed."""
    rng = random.Random(seed)
    order = list(range(len(sequences)))
    rng.shuffle(order)
    pool = batch_size * 32
    batches: list[list[int]] = []
    for at in range(0, len(order), pool):
        near = sorted(order[at : at + pool], key=lambda i: len(sequences[i].ids))
        batches += [near[b : b + batch_size] for b in range(0, len(near), batch_size)]
    rng.shuffle(batches)
    return batches


def draft_vocabulary(sequences: list[Sequence], size: int, vocab: int, always: tuple[int, ...]) -> Tensor:
    """Ids of the `size` most frequent answer tokens [size] int32, ascending; ties and gaps: low ids first."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        for begin, end in sequence.answers:
            counts.update(sequence.ids[begin:end])
    ranked = sorted(range(vocab), key=lambda v: (v not in always, -counts[v], v))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int32)


@dataclass(frozen=True)
class Progress:
    step: int
    steps: int
    tokens: int  # trained on in this step
    loss: float
    agreement: float


class Trainer:
    """One training run with a checkpoint that resumes at the step where it stopped."""

    def __init__(self, moa: MoA, cache: FeatureCache, settings: TrainSettings, checkpoint: Path) -> None:
        self.moa, self.cache, self.settings, self.checkpoint = moa, cache, settings, checkpoint
        self.device = next(moa.parameters()).device
        self.parameters = {n: p for n, p in moa.named_parameters() if p.requires_grad}
        # Muon for the matrices: at the same learning rate it needs about half of AdamW's steps here.
        matrices = [p for p in self.parameters.values() if p.ndim == 2]
        others = [p for p in self.parameters.values() if p.ndim != 2]
        rate = settings.learning_rate
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.held_out = list(range(min(settings.held_out, len(cache.sequences) // 10)))
        self.learnt = cache.sequences[len(self.held_out) :]
        per_epoch = math.ceil(len(self.learnt) / settings.batch_size)
        self.step, self.steps = 0, settings.epochs * per_epoch
        self.per_epoch = per_epoch
        self.order: tuple[int, list[list[int]]] = (-1, [])
        if checkpoint.is_file():
            self._restore()

    def run(self, save_every: float = 60.0) -> Iterator[Progress]:
        """Train to the end, yielding after each step; saves every `save_every` seconds and on any exit."""
        saved = time.monotonic()
        try:
            while self.step < self.steps:
                yield self._one_step()
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()

    def _one_step(self) -> Progress:
        epoch, place = divmod(self.step, self.per_epoch)
        if self.order[0] != epoch:
            seed = self.settings.seed + epoch
            self.order = (epoch, epoch_order(self.learnt, self.settings.batch_size, seed))
        indices = [i + len(self.held_out) for i in self.order[1][place]]
        batch = self._batch(indices, seed=self.settings.seed * 1_000_003 + self.step)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self._rate()
        self.moa.train()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, agreement = losses(self.moa, batch, self.settings)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        tokens = sum(len(self.cache.sequences[i].ids) for i in indices)
        return Progress(self.step, self.steps, tokens, loss.item(), agreement.item())

    def _rate(self) -> float:
        settings, step = self.settings, self.step
        if step < settings.warmup:
            return settings.learning_rate * (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, self.steps - settings.warmup)
        floor = settings.final_rate
        return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    def _batch(self, indices: list[int], seed: int) -> Batch:
        batch = build_batch(self.cache, indices, random.Random(seed), self.settings.lag_decay)
        return Batch(**{name: value.to(self.device) for name, value in vars(batch).items()})

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """Held-out agreement with the target's greedy choice: share in the drafter's top 1 and top 4.

        One value per lag 1..6, measured with the same masks as training.
        """
        self.moa.eval()
        hits = {1: torch.zeros(7), 4: torch.zeros(7)}
        seen = torch.zeros(7)
        for at in range(0, len(self.held_out), self.settings.batch_size):
            indices = self.held_out[at : at + self.settings.batch_size]
            batch = self._batch(indices, seed=at)
            with torch.autocast(self.device.type, torch.bfloat16):
                state = forward(self.moa, batch)
                for lag in range(1, 7):
                    chosen = (batch.weight > 0) & (batch.lag == lag)
                    wanted = self.moa.device_half.head(batch.hidden[chosen]).argmax(-1)
                    top = self.moa.device_half.head(state[chosen]).topk(4, -1).indices == wanted[:, None]
                    seen[lag] += len(wanted)
                    hits[1][lag] += top[:, :1].any(-1).sum().item()
                    hits[4][lag] += top.any(-1).sum().item()
        return {f"top{k}": [round(x, 4) for x in (h[1:] / seen[1:].clamp(min=1)).tolist()] for k, h in hits.items()}

    def save(self) -> None:
        """Write weights, optimiser moments and the step, aside first, then renamed."""
        tensors = {f"weight.{n}": p.detach() for n, p in self.parameters.items()}
        for optimiser in self.optimisers:
            for name, parameter in self.parameters.items():
                for key, value in optimiser.state.get(parameter, {}).items():
                    tensors[f"optimiser.{name}|{key}"] = value
        aside = self.checkpoint.with_suffix(".tmp")
        contiguous = {k: v.clone().contiguous() for k, v in tensors.items()}
        save_file(contiguous, aside, metadata={"state": json.dumps({"step": self.step, "steps": self.steps})})
        aside.rename(self.checkpoint)

    def _restore(self) -> None:
        with safe_open(self.checkpoint, "pt", device=str(self.device)) as file:
            state = json.loads(file.metadata()["state"])
            if state["steps"] != self.steps:
                raise ValueError(
                    f"{self.checkpoint} is from a run of {state['steps']} steps, this one has {self.steps}; "
                    "use the same --prompts, --max-prompts, --epochs and --batch-size, or another --work-dir"
                )
            self.step = state["step"]
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(file.get_tensor(f"weight.{name}"))
            moments: dict[str, dict[str, Tensor]] = {}
            for entry in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                if entry.startswith("optimiser."):
                    name, key = entry.removeprefix("optimiser.").split("|")
                    moments.setdefault(name, {})[key] = file.get_tensor(entry)
        for optimiser in self.optimisers:
            owned = {id(p) for group in optimiser.param_groups for p in group["params"]}
            for name, parameter in self.parameters.items():
                if id(parameter) in owned and name in moments:
                    optimiser.state[parameter] = moments[name]
