"""Train a drafter on the target's own answers: steps, learning rate, evaluation, checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from export.train.batches import TrainingBatch, build_batch, epoch_order
from export.train.calibration import Calibration, Calibrator
from export.train.features import OnlineFeatures
from export.train.loss import HeadLoss
from export.train.muon import Muon
from export.train.recipe import TrainSettings
from export.train.share import ALONE, Share
from outrider_core import durable

EVALUATED_AT_ONCE = 8  # sequences
# Under autocast the norms get bfloat16 input and keep float32 gains; torch says once that this is not its fastest path.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


class Student(Protocol):
    """A drafter in training: a torch module over the target's frozen embedding and LM head. MoA is one."""

    @property
    def config(self) -> Any:
        """A dataclass of its shapes."""

    @property
    def head(self) -> nn.Linear:
        """The frozen LM head: states -> logits over the draft vocabulary."""

    def states(self, tokens: Tensor, kv: Tensor, hidden: Tensor, causal: Tensor, row_mask: Tensor) -> Tensor:
        """See MoA.states."""

    def adopt(self, target_model: Any, draft_ids: Tensor) -> None:
        """See MoA.adopt."""

    def trained(self) -> dict[str, Tensor]:
        """Return the tensors of a drafter folder."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def to(self, device: torch.device) -> Any: ...


def forward(student: Student, batch: TrainingBatch) -> Tensor:
    """Return drafter states before the LM head [B, S, hidden_size], every position with its own lag."""
    return student.states(batch.tokens, batch.kv, batch.hidden, batch.sa_mask, batch.row_mask)


def losses(student: Student, batch: TrainingBatch, settings: TrainSettings) -> tuple[Tensor, Tensor]:
    """Return (loss, top-1 agreement) over the learnt positions. Entropy and feature terms are the paper's."""
    truth, weight = batch.hidden.flatten(0, 1)[batch.learnt], batch.weight.flatten()[batch.learnt]
    state = forward(student, batch).flatten(0, 1)[batch.learnt].to(truth.dtype)
    weight = weight / weight.sum()
    head = student.head.weight.to(truth.dtype)
    loss, agreement = HeadLoss.apply(state, truth, head, weight, settings.total_variation)
    loss = settings.distribution_weight * loss
    if settings.feature_weight:
        feature = functional.smooth_l1_loss(state.float(), truth.float(), reduction="none").mean(-1)
        loss = loss + settings.feature_weight * (weight * feature).sum()
    return loss, agreement


#: a point of a learning curve: step, loss, agreement
Point = tuple[int, float, float]


@dataclass(frozen=True)
class Progress:
    """loss, agreement: scalars on the drafter's device; reading them waits for it."""

    step: int
    steps: int
    tokens: int  # trained on in this step
    loss: Tensor
    agreement: Tensor


class Trainer:
    """A training run with a checkpoint, which resumes at the step where it stopped."""

    def __init__(
        self,
        student: Student,
        features: OnlineFeatures,
        settings: TrainSettings,
        checkpoint: Path,
        share: Share = ALONE,
    ) -> None:
        self.student, self.features, self.settings, self.checkpoint = student, features, settings, checkpoint
        self.device = next(student.parameters()).device
        self.parameters = {n: p for n, p in student.named_parameters() if p.requires_grad}
        # Muon for the matrices: at the same learning rate it needs about half of AdamW's steps here.
        matrices = [p for p in self.parameters.values() if p.ndim == 2]
        others = [p for p in self.parameters.values() if p.ndim != 2]
        rate = settings.learning_rate
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, rate, features.target.model.dtype),
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
        self._whole = True  # the optimisers are not in the middle of a step
        self.curve: list[Point] = []  # kept with the checkpoint; the training loop appends to it
        if checkpoint.is_file():
            self._restore()

    def run(self, save_every: float = 60.0) -> Generator[Progress, None, None]:
        """Train to the end, yielding after each step; saves every `save_every` seconds and on any exit.

        An exit while the optimisers take a step keeps the checkpoint before it, as half of a step cannot be resumed.
        """
        saved = time.monotonic()
        try:
            while self.step < self.steps:
                yield self._one_step()
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
        finally:
            if self._whole:
                self.save()

    def _one_step(self) -> Progress:
        batches = self.plan[self.step * self.share.size : (self.step + 1) * self.share.size]
        seed = self.settings.seed * 1_000_003 + self.step * self.share.size + self.share.rank
        batch = self._batch(batches[self.share.rank], seed)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self._rate()
        self.student.train()
        with self._autocast():
            loss, agreement = losses(self.student, batch, self.settings)
        loss.backward()
        self.share.average(self.parameters.values())
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self._whole = False
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self._whole = True
        tokens = sum(len(self.features.sequences[i].ids) for indices in batches for i in indices)
        return Progress(self.step, self.steps, tokens, loss.detach(), agreement)

    def _autocast(self) -> torch.autocast:
        """Return a context that multiplies in the target's number format; weights stay in float32."""
        dtype = self.features.target.model.dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def _rate(self) -> float:
        settings, step = self.settings, self.step
        if step < settings.warmup:
            return settings.learning_rate * (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, self.steps - settings.warmup)
        floor = settings.final_rate
        return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    def _batch(self, indices: list[int], seed: int) -> TrainingBatch:
        batch = build_batch(self.features, indices, random.Random(seed), self.settings)
        return TrainingBatch(**{name: value.to(self.device) for name, value in vars(batch).items()})

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, list[float]], Calibration | None]:
        """Measure held-out agreement with the target's greedy choice, and calibrate the drafter on it.

        Agreement: the share in the drafter's top 1 and top 4, one value per lag 1..6. Measured within answers, with the
        same masks as training; the calibration is None if too little is held out.
        """
        self.student.eval()
        calibrator = Calibrator()
        hits = {1: torch.zeros(7), 4: torch.zeros(7)}
        seen = torch.zeros(7)
        for at in range(0, len(self.held_out), EVALUATED_AT_ONCE):
            batch = self._batch(self.held_out[at : at + EVALUATED_AT_ONCE], seed=at)
            with self._autocast():
                state = forward(self.student, batch)
                for lag in range(1, 7):
                    chosen = batch.answer & (batch.lag == lag)
                    wanted = self.student.head(batch.hidden[chosen]).argmax(-1)
                    logits = self.student.head(state[chosen])
                    calibrator.add(logits, wanted)
                    top = logits.topk(4, -1).indices == wanted[:, None]
                    seen[lag] += len(wanted)
                    hits[1][lag] += top[:, :1].any(-1).sum().item()
                    hits[4][lag] += top.any(-1).sum().item()
        shares = {f"top{k}": [round(x, 4) for x in (h[1:] / seen[1:].clamp(min=1)).tolist()] for k, h in hits.items()}
        return shares, calibrator.result()

    def save(self) -> None:
        """Write weights, optimiser moments and the step to a new file, then rename it.

        The first rank does it for all.
        """
        if not self.share.first:
            return
        tensors = {f"weight.{n}": p.detach() for n, p in self.parameters.items()}
        for optimiser in self.optimisers:
            for name, parameter in self.parameters.items():
                for key, value in optimiser.state.get(parameter, {}).items():
                    tensors[f"optimiser.{name}|{key}"] = value
        aside = self.checkpoint.with_suffix(".tmp")
        contiguous = {k: v.to("cpu", copy=True).contiguous() for k, v in tensors.items()}
        state = {"step": self.step, "steps": self.steps, "curve": self.curve, "sha256": _digest(contiguous)}
        save_file(contiguous, aside, metadata={"state": json.dumps(state)})
        durable.put_in_place(aside, self.checkpoint)

    def _restore(self) -> None:
        state, tensors = _read_checkpoint(self.checkpoint)
        if state["steps"] != self.steps:
            raise ValueError(
                f"{self.checkpoint} is from a run of {state['steps']} steps, this one has {self.steps}; "
                "use the same prompts, --epochs and --batch-tokens, or another --work-dir"
            )
        self.step, self.curve = state["step"], [tuple(point) for point in state["curve"]]
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight.{name}"])
        moments: dict[str, dict[str, Tensor]] = {}
        for entry, tensor in tensors.items():
            if entry.startswith("optimiser."):
                name, key = entry.removeprefix("optimiser.").split("|")
                moments.setdefault(name, {})[key] = tensor.to(self.device)
        for optimiser in self.optimisers:
            owned = {id(p) for group in optimiser.param_groups for p in group["params"]}
            for name, parameter in self.parameters.items():
                if id(parameter) in owned and name in moments:
                    optimiser.state[parameter] = moments[name]


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 over names and bytes of tensors on the CPU, 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read (state, tensors) as `save` wrote them. Raises ValueError."""
    try:
        with safe_open(path, "pt") as file:
            state: dict[str, Any] = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
        if state["sha256"] == _digest(tensors):
            return state, tensors
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is damaged; delete it to train from the beginning, or give another --work-dir")
