"""Train a drafter on the target's own answers: MoA, or a baseline with the same losses on the same batches.

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
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from export.features import OnlineFeatures, Sequence
from export.loss import HeadCrossEntropy
from export.share import ALONE, Share
from models.baselines.networks import Baseline
from models.moa import MoA

Student = MoA | Baseline
MASKED = -1e9
TOP_TOKENS = 10
EVALUATED_AT_ONCE = 8  # sequences
# Under autocast the norms get bfloat16 input and keep float32 gains; torch says once that this is not its fastest path.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


@dataclass(frozen=True)
class TrainSettings:
    """Budget and recipe. `benchmarks.ablations` shows what each choice of the recipe is worth."""

    epochs: int = 5
    batch_tokens: int = 2048  # padding included
    learning_rate: float = 2e-3
    final_rate: float = 0.05  # of learning_rate, where the cosine ends
    warmup: int = 50  # steps
    distribution_weight: float = 1.0  # soft cross-entropy with the target's distribution (as in the paper)
    feature_weight: float = 0.1  # SmoothL1 to the target's last hidden state (as in the paper)
    top_tokens_weight: float = 0.0  # of the same once more over the target's TOP_TOKENS, within distribution_weight
    lag_decay: float = 0.9  # loss weight per extra token of lag, floored at 0.25
    prompt_weight: float = 0.0  # loss weight of what the target did not write itself
    long_windows: float = 0.15  # share of windows longer than a tree, as in offline spans
    random_phase: bool = True  # of windows; False: they begin at multiples of their length (as in the paper)
    own_row: bool = False  # a root sees its own feature row, which never exists at run time (as in the paper)
    int8_rows: bool = False  # rows are rounded as they travel
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


def draw_window(rng: random.Random, long_windows: float) -> int:
    """Tokens drafted behind one root. Mostly what a tree needs; a heavy tail for offline spans."""
    draw = rng.random()
    if draw >= long_windows:
        return rng.randint(3, 12)
    return rng.choice((16, 32, 64, 128)) if draw < long_windows * 2 / 3 else 0  # 0: no rows at all


def row_mask_of(length: int, window: int, phase: int, own_row: bool = False) -> tuple[Tensor, Tensor]:
    """The lagged cross-attention mask: (additive [length, length + 1], lag [length]).

    Query i belongs to the window whose root is the largest r <= i with r = phase (mod window), and sees
    the null row (column 0) and the rows of tokens j < r (own_row: j <= r). Window 0: the null row only.
    """
    i = torch.arange(length)
    root = torch.zeros_like(i) if window == 0 else (i - phase).div(window, rounding_mode="floor") * window + phase
    root = root.clamp(min=0)
    seen = root + 1 if own_row and window else root
    visible = torch.arange(-1, length)[None] < seen[:, None]
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
    weight = torch.zeros(count, size)
    for b, sequence in enumerate(sequences):
        n = len(sequence.ids)
        tokens[b, :n] = torch.tensor(sequence.ids)
        window = draw_window(rng, settings.long_windows)
        phase = rng.randrange(max(1, window)) if settings.random_phase else 0
        mask, lags = row_mask_of(n, window, phase, settings.own_row)
        if sequence.alone:  # one window from the last verified token to the end
            root = sequence.alone - 1
            mask[root:, : root + 1] = 0.0
            mask[root:, root + 1 :] = MASKED
            lags[root:] = torch.arange(1, n - root + 1)
        row_mask[b, :n, : n + 1], lag[b, :n] = mask, lags
        decayed = (settings.lag_decay ** (lags - 1).float()).clamp(min=0.25)
        weight[b, : n - 1] = settings.prompt_weight * decayed[:-1]
        for begin, end in sequence.answers:
            learn = slice(begin - 1, end - 1)  # position i predicts token i + 1
            weight[b, learn] = decayed[learn]
    causal = torch.full((size, size), MASKED).triu(1)[None]
    return Batch(tokens, kv.bfloat16(), hidden.bfloat16(), causal, row_mask, lag, weight)


def forward(student: Student, batch: Batch) -> Tensor:
    """Drafter states before the LM head [B, S, hidden_size], every position with its own lag."""
    return student.states(batch.tokens, batch.kv, batch.hidden, batch.sa_mask, batch.row_mask)


def losses(student: Student, batch: Batch, settings: TrainSettings) -> tuple[Tensor, Tensor]:
    """(loss, top-1 agreement) over the learnt positions. Entropy and feature terms are the paper's."""
    chosen = batch.weight > 0
    truth, weight = batch.hidden[chosen], batch.weight[chosen]
    state = forward(student, batch)[chosen].to(truth.dtype)
    weight = weight / weight.sum()
    loss, agreement = HeadCrossEntropy.apply(
        state, truth, student.head.weight.to(truth.dtype), weight, settings.top_tokens_weight, TOP_TOKENS
    )
    loss = settings.distribution_weight * loss
    if settings.feature_weight:
        feature = functional.smooth_l1_loss(state.float(), truth.float(), reduction="none").mean(-1)
        loss = loss + settings.feature_weight * (weight * feature).sum()
    return loss, agreement


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


@dataclass(frozen=True)
class Progress:
    step: int
    steps: int
    tokens: int  # trained on in this step
    loss: float
    agreement: float


class Trainer:
    """One training run with a checkpoint that resumes at the step where it stopped."""

    def __init__(
        self, student: Student, features: OnlineFeatures, settings: TrainSettings, checkpoint: Path,
        share: Share = ALONE,
    ) -> None:  # fmt: skip
        self.student, self.features, self.settings, self.checkpoint = student, features, settings, checkpoint
        if isinstance(student, MoA):
            student.int8_rows = settings.int8_rows
        self.device = next(student.parameters()).device
        self.parameters = {n: p for n, p in student.named_parameters() if p.requires_grad}
        # Muon for the matrices: at the same learning rate it needs about half of AdamW's steps here.
        matrices = [p for p in self.parameters.values() if p.ndim == 2]
        others = [p for p in self.parameters.values() if p.ndim != 2]
        rate = settings.learning_rate
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        sequences = features.sequences
        self.held_out = list(range(min(settings.held_out, len(sequences) // 10)))
        learnt, first = sequences[len(self.held_out) :], len(self.held_out)
        self.plan = [
            [first + i for i in batch]
            for epoch in range(settings.epochs)
            for batch in epoch_order(learnt, settings.batch_tokens, settings.seed + epoch)
        ]
        self.share = share  # each rank takes its own batch of every step
        self.step, self.steps = 0, len(self.plan) // share.size
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
        batches = self.plan[self.step * self.share.size : (self.step + 1) * self.share.size]
        seed = self.settings.seed * 1_000_003 + self.step * self.share.size + self.share.rank
        batch = self._batch(batches[self.share.rank], seed)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self._rate()
        self.student.train()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, agreement = losses(self.student, batch, self.settings)
        loss.backward()
        self.share.average(self.parameters.values())
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        tokens = sum(len(self.features.sequences[i].ids) for indices in batches for i in indices)
        return Progress(self.step, self.steps, tokens, loss.item(), agreement.item())

    def _rate(self) -> float:
        settings, step = self.settings, self.step
        if step < settings.warmup:
            return settings.learning_rate * (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, self.steps - settings.warmup)
        floor = settings.final_rate
        return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    def _batch(self, indices: list[int], seed: int) -> Batch:
        batch = build_batch(self.features, indices, random.Random(seed), self.settings)
        return Batch(**{name: value.to(self.device) for name, value in vars(batch).items()})

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """Held-out agreement with the target's greedy choice: share in the drafter's top 1 and top 4.

        One value per lag 1..6, measured with the same masks as training.
        """
        self.student.eval()
        hits = {1: torch.zeros(7), 4: torch.zeros(7)}
        seen = torch.zeros(7)
        for at in range(0, len(self.held_out), EVALUATED_AT_ONCE):
            batch = self._batch(self.held_out[at : at + EVALUATED_AT_ONCE], seed=at)
            with torch.autocast(self.device.type, torch.bfloat16):
                state = forward(self.student, batch)
                for lag in range(1, 7):
                    chosen = (batch.weight > 0) & (batch.lag == lag)
                    wanted = self.student.head(batch.hidden[chosen]).argmax(-1)
                    top = self.student.head(state[chosen]).topk(4, -1).indices == wanted[:, None]
                    seen[lag] += len(wanted)
                    hits[1][lag] += top[:, :1].any(-1).sum().item()
                    hits[4][lag] += top.any(-1).sum().item()
        return {f"top{k}": [round(x, 4) for x in (h[1:] / seen[1:].clamp(min=1)).tolist()] for k, h in hits.items()}

    def save(self) -> None:
        """Write weights, optimiser moments and the step, aside first, then renamed. The first rank does it for all."""
        if not self.share.first:
            return
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
                    "use the same prompts, --epochs and --batch-tokens, or another --work-dir"
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
