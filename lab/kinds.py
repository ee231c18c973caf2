"""The kinds of drafter that are compared: MoA, and baselines with as many trained parameters."""

from __future__ import annotations

from collections.abc import Callable

from export.train.training_set import MOA, Kind
from lab.baselines.files import VARIANTS, build_baseline
from lab.baselines.networks import Baseline, BaselineConfig
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import MoAConfig


def _baseline(name: str, layers: int) -> Callable[[MoAConfig], Baseline]:
    def make(config: MoAConfig) -> Baseline:
        budget = sum(p.numel() for p in MoA(config).parameters() if p.requires_grad)
        return build_baseline(BaselineConfig.like(name, config, budget, layers))

    return make


KINDS = {
    "moa": MOA,
    **{name: Kind(name, make) for name, make in VARIANTS.items()},
    "eagle2": Kind("eagle2", _baseline("eagle2", layers=1)),
    "eagle3": Kind("eagle3", _baseline("eagle3", layers=1), feature_loss=False),
    "lm": Kind("lm", _baseline("lm", layers=2)),
}
