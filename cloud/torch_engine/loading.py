"""Load a target and a drafter for `cloud.torch_engine`."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from cloud.engine.runner import ModelRunner
from cloud.engine.served_model import ServedModel
from cloud.settings import Settings
from cloud.torch_engine.features import TorchFeatures
from cloud.torch_engine.parallel import Leader, Ranks, follow
from cloud.torch_engine.quantization import quantize
from cloud.torch_engine.runner import Steps, TorchRunner
from outrider_core.cache import expanded
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.models.drafter_arrays import check_target
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.moa import server_half
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.packing import pack_linears
from outrider_core.models.target import Target, head_dim_of, longest_text, open_target
from outrider_core.targets.source import TargetError, TargetSource

LoadedDrafter = tuple[MoAConfig, dict[str, Tensor], str]


def load_model(settings: Settings, source: TargetSource) -> ServedModel:
    """Load the target in `source`, and the drafter that the settings name.

    Raises TargetError or DrafterError with a message of one line. Of several tensor-parallel ranks only rank 0
    returns; the others follow it until it ends, then raise SystemExit(0).
    """
    if settings.tensor_parallel_size == 1 or settings.threads:  # else torchrun has set them
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() - 1))
    drafter = load_drafter(expanded(settings.drafter))
    ranks = _ranks(settings)
    target = open_target(source).load(settings.torch_dtype, _device(settings, ranks), settings.tensor_parallel_size)
    quantize(target.model, settings.quantization)
    runner = make_runner(target, settings)
    if ranks is None:
        pack_linears(target.model)
        runner.warm_up()
        return torch_model(target, drafter, settings, runner)
    if ranks.rank > 0:
        follow(runner, ranks)
        raise SystemExit(0)
    return torch_model(target, drafter, settings, Leader(runner, ranks, drafter[0].target_layers))


def torch_model(
    target: Target, drafter: LoadedDrafter, settings: Settings, runner: ModelRunner | None = None
) -> ServedModel:
    """A loaded target and drafter, to be served. The target's attention is replaced: use its model nowhere else.

    runner: runs the target (default: in this process alone).

    Raises DrafterError if the drafter does not belong to the target.
    """
    config, tensors, drafter_hash = drafter
    shape = target.config
    check_target(config.target_hash, target.name, target.model_hash, settings.drafter)
    config.check_fits(shape, target.name)
    return ServedModel(
        name=target.name,
        target_hash=target.model_hash,
        drafter_hash=drafter_hash,
        arithmetic=arithmetic(target, settings),
        tokenizer=target.tokenizer and chat_tokenizer_of(target.tokenizer),
        eos_ids=target.eos_ids,
        vocab_size=shape.vocab_size,
        max_positions=longest_text(shape),
        runner=runner or make_runner(target, settings),
        features=TorchFeatures(config, server_half(config, tensors), target.model.device),
    )


def arithmetic(target: Target, settings: Settings) -> str:
    """The name that the handshake gives it, such as torch-bfloat16 or torch-bfloat16-int8."""
    names = ["torch", str(target.model.dtype).removeprefix("torch.")]
    return "-".join(names if settings.quantization == "none" else [*names, settings.quantization])


def make_runner(target: Target, settings: Settings) -> TorchRunner:
    """This rank's runner, with its share of the KV heads."""
    shape = target.config
    heads = shape.num_key_value_heads // settings.tensor_parallel_size
    return TorchRunner(target.model, settings.kv_tokens, heads, head_dim_of(shape), _steps(target, settings))


def _steps(target: Target, settings: Settings) -> Steps:
    """How steps run: compiled, if asked to, on a GPU, for the formats and heads that flex_attention has kernels for."""
    model = target.model
    kernels = model.dtype != torch.float64 and head_dim_of(target.config) >= 16
    fitting = model.device.type == "cuda" and settings.tensor_parallel_size == 1 and kernels
    return "compiled" if fitting and settings.cuda_graphs == "on" else "loop"


def _ranks(settings: Settings) -> Ranks | None:
    size = settings.tensor_parallel_size
    if size == 1:
        return None
    ranks = Ranks() if "RANK" in os.environ else None
    if ranks is None or ranks.size != size:
        found = 1 if ranks is None else ranks.size
        raise TargetError(
            f"--tensor-parallel-size {size} needs as many processes, but there is {found}; "
            f"start with: torchrun --nproc-per-node {size} -m cloud.verifier --tensor-parallel-size {size} ..."
        )
    return ranks


def _device(settings: Settings, ranks: Ranks | None) -> str:
    if settings.device != "auto":
        return settings.device
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if ranks is None else f"cuda:{torch.cuda.current_device()}"
