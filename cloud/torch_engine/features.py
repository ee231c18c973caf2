"""The drafter's server half in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_core.models.moa import ServerHalf
from outrider_core.models.moa_config import MoAConfig
from outrider_core.protocol.rows import RowShape


class TorchFeatures:
    """`cloud.engine.runner.FeatureProducer` on `device`."""

    def __init__(self, config: MoAConfig, half: ServerHalf, device: torch.device) -> None:
        self.shape = RowShape(config.ca_kv_heads, config.head_dim)
        self.layers = config.target_layers
        self._half = half.to(device=device, dtype=torch.float32)
        self._device = device

    @torch.inference_mode()
    def rows(self, kv: Tensor, positions: Sequence[int]) -> NDArray[np.float32]:
        """See FeatureProducer.rows."""
        rows: NDArray[np.float32] = self._half(kv.float(), torch.tensor(positions, device=self._device)).cpu().numpy()
        return rows
