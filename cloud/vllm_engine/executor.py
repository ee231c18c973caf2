"""vLLM's executor, given steps that this verifier composes. Everything of vLLM that is not public API is used here.

`tests/cloud/test_vllm.py` checks each of these internals; they are those of one release and its V1 model runner.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cloud.vllm_engine.paths import Ints, PathRequest
from outrider_core.targets.source import TargetError

#: in this process, with the model runner whose internals are used, and without reports to anybody
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
#: requests and tokens that vLLM runs at once; more of a step run behind them
MOST_REQUESTS, MOST_TOKENS = 256, 2048
#: vLLM keeps what belongs to a forward in a global of the process
_forward = threading.Lock()


class StepExecutor:
    """A model that vLLM has loaded. block: slots of a KV cache block. caches: each layer's KV cache.

    A request lives for one step, so vLLM keeps no state of any session.
    """

    def __init__(self, folder: Path, blocks: int, block: int, positions: int, dtype: str, eager: bool = True) -> None:
        """Load `folder`. blocks: of the KV cache. positions: tokens of the longest sequence.

        dtype: "auto" is float32 on a CPU unless the weights are quantised, and else what vLLM takes. eager: no CUDA
        graphs. Raises TargetError with one line if vLLM cannot run the model here, or keeps anything but full attention
        for it.
        """
        os.environ.update(ENVIRONMENT)
        self._block = block
        from vllm import EngineArgs, SamplingParams
        from vllm.platforms import current_platform
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        plain = dtype == "auto" and "quantization_config" not in json.loads((folder / "config.json").read_text())
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
            ).create_engine_config()
            model, parallel = self.config.model_config, self.config.parallel_config
            numbers = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
            self.config.cache_config.kv_cache_memory_bytes = blocks * block * numbers * model.dtype.itemsize
            core = EngineCore(self.config, Executor.get_class(self.config), log_stats=False)
        except Exception as error:  # vLLM raises many kinds
            raise _refusal(folder, error) from error
        self._runner: Any = core.model_executor.driver_worker.worker.model_runner
        self.device: torch.device = self._runner.device
        self._check_cache(folder, block, blocks)
        layers = [self._runner.compilation_config.static_forward_context[name] for name in self._layer_names()]
        self.caches: list[Tensor] = [layer.kv_cache for layer in layers]
        if self.device.type == "cpu" and (kernels := {layer.isa for layer in layers} - {"vec"}):
            raise TargetError(
                f"{folder}: vLLM's {kernels.pop()} kernels lay keys out in a way not tried here; try float32"
            )
        self._params, self._steps, self._last = SamplingParams(temperature=0), 0, set[str]()
        self._requests: Sequence[PathRequest] = ()
        self._wanted = np.empty(0, np.int64)
        #: row of the step -> one of its tokens in the batch; token in the batch -> its row. None: no row twice
        self._tokens: Ints = self._wanted
        self._shared: tuple[Tensor, Tensor] | None = None
        self._replace_inputs()
        if eager:  # a recorded graph has as many rows as the batch has tokens
            self._share_rows([layer.impl for layer in layers])
        try:  # kernels that do not take the model's shapes fail here
            self.run([PathRequest(0, np.zeros(1, np.int64), np.zeros(1, np.int64), [1], None)], [0])
        except Exception as error:
            raise _refusal(folder, error) from error

    @property
    def dtype(self) -> str:
        """The model's number format, such as "bfloat16", with its quantization, such as "bfloat16-awq"."""
        model = self.config.model_config
        names = [str(model.dtype).removeprefix("torch."), *([model.quantization] if model.quantization else [])]
        return "-".join(names)

    @torch.inference_mode()
    def run(self, requests: Sequence[PathRequest], wanted: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Run requests in one batch.

        Returns logits [len(wanted), vocab] of these rows, at least one, and the slots of tokens that have become
        something that is not a number.
        """
        from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        self._steps += 1
        self._requests, self._wanted = requests, np.array(wanted)
        names = [f"{self._steps}.{index}" for index in range(len(requests))]
        new = [
            NewRequestData(name, _prompt(each), [], self._params, None, (each.blocks,), each.past, None)
            for name, each in zip(names, requests, strict=True)
        ]
        counts = {name: len(each.tokens) for name, each in zip(names, requests, strict=True)}
        step = SchedulerOutput(
            new, CachedRequestData.make_empty(), counts, sum(counts.values()), {}, {}, self._last, []
        )
        step.kv_cache_block_copies = [KVCacheBlockCopy(*each.copied) for each in requests if each.copied] or None
        self._last = set(names)
        try:
            with _forward:
                self._runner.execute_model(step)
            done = self._runner.execute_model_state
            return done.logits, self._broken(done.hidden_states)
        finally:
            self._runner.execute_model_state, self._requests, self._shared = None, (), None

    def _broken(self, states: Tensor) -> list[int]:
        finite = states.isfinite().all(-1)
        if finite.all():
            return []
        slots = np.concatenate([each.slots(self._block) for each in self._order()])
        return slots[~finite[: len(slots)].cpu().numpy()].tolist()

    def _order(self) -> list[PathRequest]:
        """The requests in the order of the batch."""
        return [self._requests[int(name.partition(".")[2])] for name in self._runner.input_batch.req_ids]

    def _check_cache(self, folder: Path, block: int, blocks: int) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = self._runner.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec or specs[0].sliding_window:
            kinds = ", ".join(type(spec).__name__ for spec in specs)
            raise TargetError(f"{folder}: vLLM keeps {kinds} for it; only full attention in all layers is supported")
        assert specs[0].block_size == block and self._runner.kv_cache_config.num_blocks == blocks

    def _layer_names(self) -> list[str]:
        """Of the attention layers, in the order of the model."""
        from vllm.model_executor.models.utils import extract_layer_index

        names: list[str] = list(self._runner.kv_cache_config.kv_cache_groups[0].layer_names)
        return sorted(names, key=extract_layer_index)

    def _replace_inputs(self) -> None:
        """Let vLLM compute the logits of the rows that are wanted, where it would take each request's last.

        The only place that selects rows of logits. Outside of `run`, nothing changes.
        """
        prepare = self._runner._prepare_inputs

        def prepared(*arguments: Any) -> tuple[Any, ...]:
            last, *others = prepare(*arguments)
            if not self._requests:
                return (last, *others)
            rows = np.concatenate([each.rows for each in self._order()])
            present, self._tokens, places = np.unique(rows, return_index=True, return_inverse=True)
            if len(present) < len(rows):
                self._shared = self._index(self._tokens), self._index(places)
            return (self._index(self._tokens[np.searchsorted(present, self._wanted)]), *others)

        self._runner._prepare_inputs = prepared

    def _share_rows(self, attentions: Sequence[Any]) -> None:
        """Run a token that several paths have once, but for attention, where each path has its own.

        The token has the same prefix in all of them, so its row is the same.
        """
        forward = self._runner._model_forward

        def shared_forward(input_ids: Tensor, positions: Tensor, **options: Any) -> Any:
            if self._shared is None:
                return forward(input_ids=input_ids, positions=positions, **options)
            tokens, places = self._shared
            return forward(input_ids=input_ids[tokens], positions=positions[..., tokens], **options)[places]

        self._runner._model_forward = shared_forward
        for each in attentions:
            self._share_attention(each)

    def _share_attention(self, attention: Any) -> None:
        forward, update = attention.forward, attention.do_kv_cache_update

        def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Any:
            if self._shared is None:
                return forward(layer, query, key, value, *others, **named)
            tokens, places = self._shared
            output = named.pop("output")
            wide = output.new_empty((len(places), *output.shape[1:]))
            forward(layer, query[places], key[places], value[places], *others, output=wide, **named)
            output.copy_(wide[tokens])
            return output

        def write(layer: Any, key: Tensor, value: Tensor, *others: Any) -> None:
            if self._shared is not None:
                key, value = key[self._shared[1]], value[self._shared[1]]
            update(layer, key, value, *others)

        attention.forward, attention.do_kv_cache_update = attend, write

    def _index(self, places: Ints) -> Tensor:
        return torch.from_numpy(places).to(self.device)


def _refusal(folder: Path, error: Exception) -> TargetError:
    return TargetError(f"vLLM does not run {folder}: {' '.join(str(error).split())[:300]}")


def _prompt(request: PathRequest) -> Ints:
    """Token ids from the sequence's first on; those that have keys and values already are not looked at."""
    return np.concatenate([np.zeros(request.past, np.int64), request.tokens])
