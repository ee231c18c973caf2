"""Load a target and a drafter for `cloud.torch_engine`."""

from __future__ import annotations

import torch
from torch import Tensor

from cloud.engine.features import NoServerHalf
from cloud.engine.runner import FeatureProducer
from cloud.engine.served_model import ServedModel
from cloud.settings import Settings
from cloud.torch_engine.features import TorchFeatures
from cloud.torch_engine.runner import TorchRunner
from outrider_core.cache import expanded
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.models.drafter_arrays import check_target
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.moa import server_half
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.packing import pack_linears
from outrider_core.models.target import Target, TargetFiles, head_dim_of, longest_text, open_target
from outrider_core.targets.source import TargetSource

LoadedDrafter = tuple[MoAConfig, dict[str, Tensor], str]


def load_model(settings: Settings, source: TargetSource) -> ServedModel:
    """Load the target in `source`, and the drafter if the settings name one.

    Raises TargetError or DrafterError with a message of one line.
    """
    torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() - 1))
    drafter = load_drafter(expanded(settings.drafter)) if settings.drafter else None
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    target = open_target(source).load(settings.torch_dtype, device)
    pack_linears(target.model)
    return torch_model(target, drafter, settings)


def torch_model(target: Target, drafter: LoadedDrafter | None, settings: Settings) -> ServedModel:
    """Prepare a loaded target and drafter for serving. The target's attention is replaced: use its model nowhere else.

    Raises DrafterError if the drafter does not belong to the target.
    """
    shape = target.config
    drafter_hash, features = torch_features(drafter, target, settings, target.model.device)
    return ServedModel(
        name=target.name,
        target_hash=target.model_hash,
        drafter_hash=drafter_hash,
        arithmetic=f"torch-{str(target.model.dtype).removeprefix('torch.')}",
        tokenizer=target.tokenizer and chat_tokenizer_of(target.tokenizer),
        eos_ids=target.eos_ids,
        vocab_size=shape.vocab_size,
        max_positions=longest_text(shape),
        runner=TorchRunner(target.model, settings.kv_tokens, shape.num_key_value_heads, head_dim_of(shape)),
        features=features,
    )


def torch_features(
    drafter: LoadedDrafter | None, target: Target | TargetFiles, settings: Settings, device: torch.device
) -> tuple[str, FeatureProducer]:
    """Return the drafter's hash and its server half. Raises DrafterError if it does not belong to the target."""
    if drafter is None:
        return "", NoServerHalf()
    config, tensors, drafter_hash = drafter
    check_target(config.target_hash, target.name, target.model_hash, settings.drafter or "")
    config.check_fits(target.config, target.name)
    return drafter_hash, TorchFeatures(config, server_half(config, tensors), device)
