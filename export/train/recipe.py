"""The settings of a training run: its budget, and how a drafter is taught."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """Budget and recipe. `lab.ablations` measures the effect of each choice of the recipe."""

    epochs: int = 3
    batch_tokens: int = 2048  # padding included
    learning_rate: float = 2e-3
    final_rate: float = 0.05  # of learning_rate, where the cosine ends
    warmup: int = 50  # steps
    distribution_weight: float = 1.0  # soft cross-entropy with the target's distribution (as in the paper)
    total_variation: float = 0.0  # how soon total variation replaces it: `eta` of export.train.loss.HeadLoss
    feature_weight: float = 0.1  # SmoothL1 to the target's last hidden state (as in the paper)
    lag_decay: float = 0.9  # loss weight per extra token of lag, floored at 0.25
    prompt_weight: float = (
        0.3  # loss weight of text that the target did not write itself: its distribution is known there too
    )
    long_windows: float = 0.15  # share of windows longer than a tree, as in offline spans
    held_out: int = 64  # sequences kept from training to measure agreement
    seed: int = 0
