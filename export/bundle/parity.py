"""Compare an exported engine with the eager device half, step by step on the same text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from export.bundle.steps import LOOKAHEAD, Passage, follow, roots
from outrider_core.drafting.bundle import Bundle
from outrider_core.drafting.engines import Engine, Floats, Ints
from outrider_core.models.moa_config import MoAConfig

#: an argmax flip is at a near-tie if the eager model's first two logits are closer than this (the second is then at
#: least 60 % as likely as the first)
NEAR_TIE = 0.5


@dataclass(frozen=True)
class Parity:
    """Agreement of an engine with the eager device half on `steps` drafted tokens.

    top1_agreement: share of equal argmaxes. top4_agreement: share of steps whose eager argmax is among the engine's
    four best. flips: unequal argmaxes, flips_at_near_ties: those at a near-tie of the eager model (NEAR_TIE).
    eager_hits, hits: share of steps whose argmax is the target's own next token.
    """

    steps: int
    top1_agreement: float
    top4_agreement: float
    flips: int
    flips_at_near_ties: int
    mean_abs_logit_error: float
    max_abs_logit_error: float
    eager_hits: float
    hits: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(engine: Engine, eager: Engine, config: MoAConfig, bundle: Bundle, passages: list[Passage]) -> Parity:
    """Run both engines along the passages."""
    parts = []
    for passage in passages:
        pairs = zip(
            follow(engine, config, bundle.null_row, passage),
            follow(eager, config, bundle.null_row, passage),
            strict=True,
        )
        for root, (got, exact) in zip(roots(passage), pairs, strict=True):
            parts.append(_one(got, exact, bundle.draft_ids, passage.tokens[root + 1 : root + 1 + LOOKAHEAD]))
    steps = np.concatenate(parts) if parts else np.zeros((1, 7))
    same, in_top4, near_tie, mean_error, max_error, eager_hit, hit = steps.T
    return Parity(
        steps=len(steps),
        top1_agreement=round(float(same.mean()), 4),
        top4_agreement=round(float(in_top4.mean()), 4),
        flips=int((same == 0).sum()),
        flips_at_near_ties=int(near_tie[same == 0].sum()),
        mean_abs_logit_error=round(float(mean_error.mean()), 5),
        max_abs_logit_error=round(float(max_error.max()), 5),
        eager_hits=round(float(eager_hit.mean()), 4),
        hits=round(float(hit.mean()), 4),
    )


def _one(got: Floats, exact: Floats, draft_ids: Ints, following: Ints) -> Floats:
    """Return [LOOKAHEAD, 7], a column for each figure that is averaged."""
    first, best = exact.argmax(-1), got.argmax(-1)
    width = min(4, exact.shape[1])
    top4 = np.argpartition(-got, width - 1, -1)[:, :width]
    second = np.partition(exact, -2, -1)[:, -2] if exact.shape[1] > 1 else exact[:, 0]
    error = np.abs(got - exact)
    columns = (
        best == first,
        (top4 == first[:, None]).any(-1),
        exact.max(-1) - second < NEAR_TIE,
        error.mean(-1),
        error.max(-1),
        draft_ids[first] == following,
        draft_ids[best] == following,
    )
    return np.stack([np.asarray(column, np.float32) for column in columns], -1)
