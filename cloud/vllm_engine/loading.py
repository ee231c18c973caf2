"""Load a target and a drafter for `cloud.vllm_engine`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cloud.engine.choice import VLLM_RELEASE
from cloud.engine.kvpool import GRANULE
from cloud.engine.served_model import ServedModel
from cloud.engine.tree_budget import TIMED_TOKENS
from cloud.settings import Settings
from cloud.torch_engine.loading import LoadedDrafter, torch_features
from cloud.vllm_engine.executor import StepExecutor
from cloud.vllm_engine.paths import PathLayout, scratch_blocks
from cloud.vllm_engine.runner import VllmRunner
from outrider_core.cache import expanded
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.models.drafter_arrays import check_target
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import TargetFiles, longest_text, open_target
from outrider_core.targets.source import TargetError, TargetSource

#: slots of a KV cache block: the fewest that vLLM's fast kernels on CPUs and GPUs all support
BLOCK = 32
#: least number of scratch blocks, so that trees of several sessions run together
SCRATCH = 192


def load_model(settings: Settings, source: TargetSource) -> ServedModel:
    """Load the target in `source`, and the drafter if the settings name one.

    Raises TargetError or DrafterError with a message of one line.
    """
    torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() - 1))  # vLLM does not change it later
    drafter = load_drafter(expanded(settings.drafter)) if settings.drafter else None
    return vllm_model(open_target(source), drafter, settings)


def vllm_model(files: TargetFiles, drafter: LoadedDrafter | None, settings: Settings) -> ServedModel:
    """Prepare a target's files and a drafter for serving. Raises TargetError or DrafterError."""
    shape = files.config
    if (getattr(shape, "rope_parameters", None) or {}).get("llama_4_scaling_beta"):
        raise TargetError(f"{files.name}: vLLM ignores its llama_4_scaling_beta; use --engine torch or onnx")
    if drafter:  # before vLLM starts, which takes long
        check_target(drafter[0].target_hash, files.name, files.model_hash, settings.drafter or "")
    executor, runner = _start(files, settings, drafter[0].target_layers if drafter else (0,))
    drafter_hash, features = torch_features(drafter, files, settings, executor.device)
    return ServedModel(
        name=files.name,
        target_hash=files.model_hash,
        drafter_hash=drafter_hash,
        arithmetic=f"vllm-{VLLM_RELEASE}-{executor.dtype}",
        tokenizer=files.tokenizer and chat_tokenizer_of(files.tokenizer),
        eos_ids=files.eos_ids,
        vocab_size=shape.vocab_size,
        max_positions=longest_text(shape),
        runner=runner,
        features=features,
    )


def _start(files: TargetFiles, settings: Settings, layers: Sequence[int]) -> tuple[StepExecutor, VllmRunner]:
    """Start vLLM on a target's folder, with a KV cache for the pool and for the paths of at least one tree."""
    shape = files.config
    pool, scratch = -(-settings.kv_tokens // BLOCK), max(SCRATCH, scratch_blocks(settings.max_nodes, BLOCK))
    longest = max(settings.max_model_len, GRANULE + TIMED_TOKENS[-1])  # timed texts may be longer
    positions = min(longest, longest_text(shape))
    eager = settings.cuda_graphs == "off"
    ranks = settings.tensor_parallel_size
    executor = StepExecutor(files.folder, 1 + pool + scratch, BLOCK, positions, settings.dtype, eager, ranks)
    return executor, VllmRunner(executor, PathLayout(BLOCK, 1 + pool, positions), scratch, layers)
