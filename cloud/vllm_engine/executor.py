"""vLLM's engine in this process, without its scheduler, running steps that this verifier composes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cloud.engine.acceptance import Chances
from cloud.engine.runner import Logits
from cloud.vllm_engine.paths import PathRequest
from cloud.vllm_engine.steps import Run, StepCommand, StepRunner
from outrider_core.protocol.constraint import Adjustment
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetError

#: in this process, with the model runner whose internals are used, and without usage reports
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
#: requests and tokens that vLLM runs at once; larger steps run in several batches
MOST_REQUESTS, MOST_TOKENS = 256, 2048


class StepExecutor:
    """A model that vLLM has loaded, on one rank in this process or on several in processes that vLLM starts.

    device: of the keys and values that are reported. remote: there are several ranks. A request lives for one step, so
    vLLM keeps no state of any session.
    """

    def __init__(
        self,
        folder: Path,
        blocks: int,
        block: int,
        positions: int,
        dtype: str,
        eager: bool = True,
        ranks: int = 1,
    ) -> None:
        """Load `folder`. blocks: of the KV cache. positions: tokens of the longest sequence.

        dtype: "auto" is float32 on a CPU unless the weights are quantised, and vLLM's choice otherwise. eager: no CUDA
        graphs. ranks: that share the heads. Raises TargetError with one line if vLLM cannot run the model here, or
        caches anything but keys and values of each token for it.
        """
        os.environ.update(ENVIRONMENT)
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        plain = dtype == "auto" and "quantization_config" not in json.loads((folder / "config.json").read_text())
        self.remote = ranks > 1
        try:
            self.config = EngineArgs(
                str(folder),
                skip_tokenizer_init=True,
                use_tqdm_on_load=False,
                dtype="float32" if plain and current_platform.is_cpu() else dtype,
                enforce_eager=eager,
                block_size=block,
                num_gpu_blocks_override=blocks,
                max_model_len=positions,
                max_num_seqs=MOST_REQUESTS,
                max_num_batched_tokens=MOST_TOKENS,
                enable_prefix_caching=False,
                async_scheduling=False,
                disable_hybrid_kv_cache_manager=True,  # keep all tokens, also of layers with a sliding window
                tensor_parallel_size=ranks,
                distributed_executor_backend="mp" if self.remote else None,
                worker_extension_cls="cloud.vllm_engine.steps.StepWorker" if self.remote else "",
            ).create_engine_config()
            model, parallel = self.config.model_config, self.config.parallel_config
            if model.get_total_num_kv_heads() % ranks:
                raise TargetError(f"{model.get_total_num_kv_heads()} key/value heads cannot be divided among {ranks}")
            numbers = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
            self.config.cache_config.kv_cache_memory_bytes = blocks * block * numbers * model.dtype.itemsize
            core = EngineCore(self.config, Executor.get_class(self.config), log_stats=False)
            self._workers: Any = core.model_executor
            if self.remote:
                self._workers.collective_rpc("outrider_start", args=(block, eager))
            else:
                self._steps = StepRunner(self._workers.driver_worker.worker.model_runner, block, eager)
            self.device = torch.device("cpu") if self.remote else self._steps.device
            # kernels that do not support the model's shapes fail here
            first = PathRequest(0, np.zeros(1, np.int64), np.zeros(1, np.int64), [1], None)
            self.step(StepCommand([Run([first], [0])], [0], [0], (), (0,), ()))
        except Exception as error:  # vLLM raises many kinds
            raise _refusal(folder, error) from error

    @property
    def dtype(self) -> str:
        """Return the model's number format, such as "bfloat16", with its quantization, such as "bfloat16-awq"."""
        model = self.config.model_config
        names = [str(model.dtype).removeprefix("torch."), *([model.quantization] if model.quantization else [])]
        return "-".join(names)

    def step(self, command: StepCommand) -> tuple[Logits, Tensor]:
        """Run a step on all ranks. Returns its logits, and the requested keys and values."""
        if not self.remote:
            logits = self._steps.step(command.operations, command.order, command.depths)
            assert logits is not None
            return logits, self._steps.gather(command.layers, command.slots)
        try:
            replies = self._workers.collective_rpc("outrider_step", args=(command,))
        except Exception as error:
            if self._workers.is_failed:  # nothing can run any more
                raise SystemExit("a tensor-parallel rank has ended") from error
            raise
        return RemoteLogits(self._workers, replies[0][0]), torch.cat([each for _, each in replies], -1)

    def stop(self) -> None:
        """End the processes of other ranks."""
        if self.remote:
            self._workers.shutdown()


class RemoteLogits:
    """`cloud.engine.runner.Logits` on the first rank. drawn: a token of each row without adjustments."""

    def __init__(self, workers: Any, drawn: Sequence[int]) -> None:
        self._workers, self._drawn = workers, drawn

    def draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """See Logits.draw."""
        if not any(adjustments) and self._drawn:
            return [self._drawn[row] for row in rows]
        asked = (list(rows), list(samplings), list(positions), list(adjustments))
        drawn: list[int] = self._workers.collective_rpc("outrider_draw", args=asked, unique_reply_rank=0)
        return drawn

    def chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """See Logits.chances."""
        asked = (list(rows), list(tokens), top)
        found: list[Chances] = self._workers.collective_rpc("outrider_chances", args=asked, unique_reply_rank=0)
        return found


def _refusal(folder: Path, error: Exception) -> TargetError:
    return TargetError(f"vLLM does not run {folder}: {' '.join(str(error).split())[:300]}")
