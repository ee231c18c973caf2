"""Weights of fewer bits for a target in torch, by torchao: a GPU reads half the bytes a step."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from cloud.settings import Quantization
from outrider_core.targets.source import TargetError


def quantize(model: Any, quantization: Quantization) -> None:
    """Round the weights of all linear layers but the output layer, in place: per output channel one scale.

    int8: 8-bit integers. fp8: 8-bit floats (e4m3). Raises TargetError where torchao is missing or has no such format
    here.
    """
    if quantization == "none":
        return
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of each kernel that was built for another machine
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        config = Int8WeightOnlyConfig(version=2) if quantization == "int8" else Float8WeightOnlyConfig()
        quantize_(model, config, lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    except ImportError:
        raise TargetError(f"--quantization {quantization} takes torchao; run: pip install 'outrider[torch]'") from None
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).strip().partition("\n")[0]
        raise TargetError(f"--quantization {quantization} does not work here: {why}") from None
