"""Stop drafting early: a small network that predicts whether a draft will be accepted (arXiv 2409.10644).

"Soft" reads the drafter's last hidden state and learns the acceptance probability itself; "hard" reads entropy and
the ten largest probabilities of q and learns whether drafter and target agree on the most likely token.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

Reals = NDArray[np.floating]
#: largest probabilities among the hard model's features
TOP = 10
#: the published threshold
THRESHOLD = 0.4


class DecisionError(RuntimeError):
    """A file is not a decision model."""


@dataclass(frozen=True)
class DecisionConfig:
    """features: width of the input; hidden: widths of the hidden layers.

    Published: soft 768 -> 512, 256 and 2048 -> 1024, 512; hard 11 -> 44.
    """

    kind: Literal["soft", "hard"]
    features: int
    hidden: tuple[int, ...]

    @classmethod
    def soft(cls, hidden_size: int) -> DecisionConfig:
        """Return the shapes for hidden states [n, hidden_size]."""
        return cls("soft", hidden_size, (1024, 512) if hidden_size >= 2048 else (512, 256))

    @classmethod
    def hard(cls) -> DecisionConfig:
        """Return the shapes for `hard_features`."""
        return cls("hard", 1 + TOP, (44,))


class DecisionModel(nn.Module):
    """Maps features [n, features] float32 to logits [n] of the acceptance probability; ReLU between linear layers."""

    def __init__(self, config: DecisionConfig) -> None:
        super().__init__()
        self.config = config
        widths = (config.features, *config.hidden)
        layers = list[nn.Module]()
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.layers(features)[:, 0]
        return logits

    @torch.inference_mode()
    def scores(self, features: Reals) -> NDArray[np.float32]:
        """Return predicted acceptance probabilities [n], float32."""
        predicted: NDArray[np.float32] = torch.sigmoid(self(_tensor(features))).numpy()
        return predicted

    def proceed(self, features: Reals, threshold: float = THRESHOLD) -> bool:
        """Return whether to draft another level: if ANY node scores above the threshold; features [nodes, features]."""
        return bool((self.scores(features) > threshold).any())


def hard_features(q: Reals) -> NDArray[np.float32]:
    """Return float32 [n, 11] of distributions q [n, vocab]: entropy in nats, then the ten largest probabilities.

    The largest comes first. A vocabulary of fewer than ten tokens is padded with zeros.
    """
    features = np.zeros((len(q), 1 + TOP), np.float32)
    top = min(TOP, q.shape[1])
    features[:, 0] = -(q * np.log(np.where(q > 0.0, q, 1.0))).sum(1)
    features[:, 1 : 1 + top] = -np.sort(np.partition(-q, top - 1, axis=1)[:, :top], axis=1)
    return features


def soft_labels(p: Reals, q: Reals, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return float32 [n]: clamp(p / q, 0, 1) of the tokens [n] drafted from q [n, vocab], for the target's p."""
    rows = np.arange(len(tokens))
    chosen = np.asarray(tokens, np.int64)
    labels: NDArray[np.float32] = np.clip(p[rows, chosen] / q[rows, chosen], 0.0, 1.0).astype(np.float32)
    return labels


def hard_labels(p: Reals, q: Reals) -> NDArray[np.float32]:
    """Return float32 [n]: 1 where p [n, vocab] and q [n, vocab] agree on the most likely token."""
    return (p.argmax(1) == q.argmax(1)).astype(np.float32)


def balanced(labels: Reals, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return indices of as many 1s as 0s, the larger class subsampled, in ascending order; labels [n] of 0 and 1."""
    ones, zeros = np.flatnonzero(labels == 1.0), np.flatnonzero(labels == 0.0)
    size = min(len(ones), len(zeros))
    return np.sort(np.concatenate([generator.choice(part, size, replace=False) for part in (ones, zeros)]))


@dataclass(frozen=True)
class Examples:
    """features [n, features] and labels [n] in [0, 1]."""

    features: Reals
    labels: Reals


def train(
    model: DecisionModel,
    training: Examples,
    validation: Examples,
    *,
    epochs: int = 10,
    batch: int = 50,
    learning_rate: float = 1e-3,
    seed: int = 0,
    report: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Minimise binary cross-entropy with Adam; keep the weights of the epoch with the lowest validation loss.

    Defaults as published. report: called with the validation loss after each epoch. Returns the validation loss before
    training and after each epoch.
    """
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    features, labels = _tensor(training.features), _tensor(training.labels)
    losses = [validation_loss(model, validation)]
    best = copy.deepcopy(model.state_dict())
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(batch):
            optimiser.zero_grad()
            functional.binary_cross_entropy_with_logits(model(features[rows]), labels[rows]).backward()
            optimiser.step()
        losses.append(validation_loss(model, validation))
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
        report(losses[-1])
    model.load_state_dict(best)
    return losses


@torch.inference_mode()
def validation_loss(model: DecisionModel, examples: Examples) -> float:
    """Return the mean binary cross-entropy in nats."""
    logits = model(_tensor(examples.features))
    return float(functional.binary_cross_entropy_with_logits(logits, _tensor(examples.labels)))


class Trained(NamedTuple):
    """drafter: hash of the drafter it judges. prompts: names of its training prompts, on which it proves nothing."""

    model: DecisionModel
    drafter: str
    prompts: frozenset[str]


def save(trained: Trained, path: Path) -> None:
    """Write one safetensors file; its header holds everything but the weights."""
    model, drafter, prompts = trained
    described = asdict(model.config) | {"drafter": drafter, "prompts": sorted(prompts)}
    save_file(model.state_dict(), path, metadata={"decision": json.dumps(described)})


def load(path: Path) -> Trained:
    """Read a file of `save`. Raises DecisionError, one line, if it is something else."""
    try:
        with safe_open(path, "pt") as file:
            stored = json.loads((file.metadata() or {})["decision"])
            config = DecisionConfig(stored["kind"], stored["features"], tuple(stored["hidden"]))
            model = DecisionModel(config)
            model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return Trained(model, stored["drafter"], frozenset(stored["prompts"]))
    except (KeyError, SafetensorError, ValueError) as error:
        raise DecisionError(f"{path} holds no decision model") from error


def _tensor(values: Reals) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))
