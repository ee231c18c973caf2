"""The device half in eager torch, called as the device's engines are: numpy in, numpy out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider_core.models.moa import DeviceHalf

Array = NDArray[Any]


class EagerEngine:
    """The device half with the interface of outrider_core.drafting.engines.Engine, on the device of its weights."""

    def __init__(self, half: DeviceHalf) -> None:
        self.half = half
        self._device = next(half.parameters()).device

    @torch.inference_mode()
    def step(
        self,
        tokens: Array,
        positions: Array,
        wanted: Array,
        sa_mask: Array,
        sa_keys: Array,
        sa_values: Array,
        row_keys: Array,
        row_values: Array,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Compute one draft step, see `outrider_core.drafting.engines.Engine`."""
        inputs = (tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values)
        logits, keys, values = self.half(*(torch.from_numpy(x).to(self._device) for x in inputs))
        return logits.cpu().numpy(), keys.cpu().numpy(), values.cpu().numpy()
