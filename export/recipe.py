"""What a training run may choose: its budget, and how a drafter is taught."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """Budget and recipe. `lab.ablations` shows what each choice of the recipe is worth."""

    epochs: int = 5
    batch_tokens: int = 2048  # padding included
    learning_rate: float = 2e-3
    final_rate: float = 0.05  # of learning_rate, where the cosine ends
    warmup: int = 50  # steps
    distribution_weight: float = 1.0  # soft cross-entropy with the target's distribution (as in the paper)
    feature_weight: float = 0.1  # SmoothL1 to the target's last hidden state (as in the paper)
    top_tokens_weight: float = 0.0  # of the same once more over the target's TOP_TOKENS, within distribution_weight
    lag_decay: float = 0.9  # loss weight per extra token of lag, floored at 0.25
    prompt_weight: float = 0.3  # loss weight of what the target did not write itself: its law is known there too
    long_windows: float = 0.15  # share of windows longer than a tree, as in offline spans
    random_phase: bool = True  # of windows; False: they begin at multiples of their length (as in the paper)
    own_row: bool = False  # a root sees its own feature row, which never exists at run time (as in the paper)
    rounded_rows: bool = False  # rows are rounded as they travel
    held_out: int = 64  # sequences kept from training to measure agreement
    seed: int = 0
