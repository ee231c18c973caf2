"""A rank's share of a step: the code that uses vLLM's model runner and its KV cache.

With a single rank this runs in the verifier's process; with several, vLLM starts a worker process for each, which calls
`StepWorker`. Only this file and `executor.py` use vLLM's internals. `tests/cloud/test_vllm.py` checks each of them;
they are those of one release and its V1 model runner.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cloud.engine.acceptance import Chances
from cloud.torch_engine.drawing import TorchLogits
from cloud.vllm_engine.paths import Ints, PathRequest
from outrider_core.protocol.constraint import Adjustment
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetError

#: vLLM keeps a forward's context in a global of the process
_forward = threading.Lock()


class Copy(NamedTuple):
    """Copy slots over slots, (source, target) each; sources are read first."""

    pairs: list[tuple[int, int]]


class Take(NamedTuple):
    """Announce that parts will write these ranges of slots, and paths all from `scratch` on."""

    ranges: list[tuple[int, int]]
    scratch: int


class Run(NamedTuple):
    """Run requests in one batch; keep the logits of the `wanted` rows, at least one."""

    requests: list[PathRequest]
    wanted: list[int]


Operation = Copy | Take | Run


class StepCommand(NamedTuple):
    """A step. order: the step's rows among the logits that its runs return one after the other; depths: of these rows.

    draws: how to draw a token from each of these, and for which position, if ranks draw at once; else (). layers,
    slots: keys and values to report once all has run.
    """

    operations: list[Operation]
    order: list[int]
    depths: list[int]
    draws: Sequence[tuple[Sampling, int]]
    layers: Sequence[int]
    slots: Sequence[int]


class StepRunner:
    """vLLM's model runner in this process. block: slots of a KV cache block. eager: no CUDA graphs.

    Raises TargetError unless all layers cache keys and values of each token in a known layout.
    """

    def __init__(self, model_runner: Any, block: int, eager: bool) -> None:
        from vllm import SamplingParams

        self._runner, self._block = model_runner, block
        self.device: torch.device = model_runner.device
        self._check_cache()
        check_rounding(model_runner.model)
        layers = [self._runner.compilation_config.static_forward_context[name] for name in self._layer_names()]
        self._caches: list[Tensor] = [layer.kv_cache for layer in layers]
        if self.device.type == "cpu" and (kernels := {layer.isa for layer in layers} - {"vec"}):
            raise TargetError(f"vLLM's {kernels.pop()} kernels store keys in a layout not supported here; try float32")
        self._params, self._count, self._last = SamplingParams(temperature=0), 0, set[str]()
        self._requests: Sequence[PathRequest] = ()
        self._wanted = np.empty(0, np.int64)
        #: row of the step -> one of its tokens in the batch; token in the batch -> its row. None: no row twice
        self._tokens: Ints = self._wanted
        self._shared: tuple[Tensor, Tensor] | None = None
        self._stale = set[int]()  # slots with values that are not numbers
        self._replace_inputs()
        if eager:  # a recorded graph has as many rows as the batch has tokens
            self._share_rows([layer.impl for layer in layers])

    @torch.inference_mode()
    def step(self, operations: Sequence[Operation], order: Sequence[int], depths: Sequence[int]) -> TorchLogits | None:
        """Run these operations, and return the logits of a step; None on ranks without logits."""
        torch.get_num_threads()  # sets it for this thread: vLLM's CPU kernels check that it does not change
        found = list[Tensor]()
        for operation in operations:
            match operation:
                case Copy(pairs):
                    self._copy(pairs)
                case Take(ranges, scratch):
                    self._clean(ranges, scratch)
                case Run(requests, wanted):
                    found.append(self._run(requests, wanted))
        if found and found[0] is None:
            return None
        values = torch.cat(found) if found else torch.empty(0)
        if list(order) != list(range(len(values))):
            values = values[torch.tensor(order, dtype=torch.int64, device=values.device)]
        return TorchLogits(values, depths)

    @torch.inference_mode()
    def gather(self, layers: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Return keys and values of this rank's heads: see ModelRunner.gather."""
        block, slot = self._split(torch.tensor(slots, dtype=torch.int64, device=self.device))
        pairs = [self._cells(self._caches[layer]) for layer in layers]
        both = [torch.stack([keys[block, slot], values[block, slot]], 2) for keys, values in pairs]
        return torch.stack(both, 1).flatten(2)

    def _run(self, requests: Sequence[PathRequest], wanted: Sequence[int]) -> Tensor:
        from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        self._count += 1
        self._requests, self._wanted = requests, np.array(wanted)
        names = [f"{self._count}.{index}" for index in range(len(requests))]
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
            self._note_broken(done.hidden_states)
            logits: Tensor = done.logits
            return logits
        finally:
            self._runner.execute_model_state, self._requests, self._shared = None, (), None

    def _note_broken(self, states: Tensor) -> None:
        finite = states.isfinite().all(-1)
        if not finite.all():
            slots = np.concatenate([each.slots(self._block) for each in self._order()])
            self._stale.update(slots[~finite[: len(slots)].cpu().numpy()].tolist())

    def _order(self) -> list[PathRequest]:
        """Return the requests in the order of the batch."""
        return [self._requests[int(name.partition(".")[2])] for name in self._runner.input_batch.req_ids]

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        stale = {target for source, target in pairs if source in self._stale}
        self._stale = self._stale.difference(target for _, target in pairs) | stale
        source, target = torch.tensor(pairs, device=self.device).T
        (block, slot), (to, at) = self._split(source), self._split(target)
        for keys, values in map(self._cells, self._caches):
            keys[to, at], values[to, at] = keys[block, slot], values[block, slot]

    def _clean(self, ranges: Sequence[tuple[int, int]], scratch: int) -> None:
        """Empty reused slots that hold values which are not numbers.

        An attention kernel reads whole blocks, and values that it masks out must still be numbers.
        """
        taken = [slot for slot in self._stale if slot >= scratch or any(begin <= slot < end for begin, end in ranges)]
        if not taken:
            return
        self._stale.difference_update(taken)
        block, slot = self._split(torch.tensor(taken, dtype=torch.int64, device=self.device))
        for keys, values in map(self._cells, self._caches):
            keys[block, slot] = values[block, slot] = 0.0

    def _split(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots // self._block, slots % self._block

    def _cells(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values, each [blocks, block, kv_heads, head_dim].

        A cache is [blocks, kv_heads, block, a key then its value]; but on a CPU each head of a block has its keys
        first, dimension by dimension, then its values.
        """
        blocks, heads, size, both = cache.shape
        if cache.device.type == "cpu":
            whole = cache.view(blocks, heads, 2, size * both // 2)
            keys = whole[:, :, 0].view(blocks, heads, both // 2, size).permute(0, 3, 1, 2)
            return keys, whole[:, :, 1].view(blocks, heads, size, both // 2).permute(0, 2, 1, 3)
        cells = cache.transpose(1, 2)
        return cells[..., : both // 2], cells[..., both // 2 :]

    def _check_cache(self) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        groups = self._runner.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        if len(specs) != 1 or type(specs[0]) not in (FullAttentionSpec, SlidingWindowSpec):
            kinds = ", ".join(type(spec).__name__ for spec in specs)
            raise TargetError(f"vLLM caches {kinds} for it; only keys and values of every token are supported")
        assert specs[0].block_size == self._block
        if (kept := specs[0].dtype) != self._runner.dtype:
            raise TargetError(f"its configuration has vLLM keep keys and values as {kept}; remove its kv_cache_scheme")

    def _layer_names(self) -> list[str]:
        """Return the names of the attention layers, in the order of the model."""
        from vllm.model_executor.models.utils import extract_layer_index

        names: list[str] = list(self._runner.kv_cache_config.kv_cache_groups[0].layer_names)
        return sorted(names, key=extract_layer_index)

    def _replace_inputs(self) -> None:
        """Let vLLM compute the logits of the wanted rows instead of each request's last.

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
        """Run a token that several paths share once, except for attention, where each path has its own.

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


class StepWorker:
    """Methods added to each of vLLM's worker processes, if there are several ranks."""

    model_runner: Any
    rank: int

    def outrider_start(self, block: int, eager: bool) -> None:
        """Prepare this rank."""
        self._outrider = StepRunner(self.model_runner, block, eager)
        self._outrider_logits: TorchLogits | None = None

    def outrider_step(self, command: StepCommand) -> tuple[list[int], Tensor]:
        """Run a step. Returns the drawn tokens, on the first rank alone, and this rank's keys and values."""
        self._outrider_logits = logits = self._outrider.step(command.operations, command.order, command.depths)
        tokens = list[int]()
        if logits is not None and command.draws:
            tokens = logits.draw(range(len(command.draws)), *zip(*command.draws, strict=True))
        return tokens, self._outrider.gather(command.layers, command.slots).cpu()

    def outrider_draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None],
    ) -> list[int]:
        """Draw from the last step's logits: see Logits.draw."""
        logits = self._outrider_logits
        return [] if logits is None else logits.draw(rows, samplings, positions, adjustments)

    def outrider_chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """See Logits.chances."""
        return [] if self._outrider_logits is None else self._outrider_logits.chances(rows, tokens, top)


def _prompt(request: PathRequest) -> Ints:
    """Return token ids from the sequence's start; vLLM ignores those that have keys and values already."""
    return np.concatenate([np.zeros(request.past, np.int64), request.tokens])


def check_rounding(model: torch.nn.Module) -> None:
    """Raise TargetError if all tokens of a step share a scale of activations: each would change the others'."""
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel as Kernel

    for module in model.modules():
        kernel = getattr(getattr(module, "scheme", None) or getattr(module, "quant_method", None), "fp8_linear", None)
        if not isinstance(kernel, Kernel) or type(kernel).apply_weights is not Kernel.apply_weights:
            continue  # it does not round activations
        if not kernel.quant_fp8.static and kernel.quant_fp8.group_shape.is_per_tensor():
            raise TargetError(
                "vLLM rounds activations to FP8 by one scale for all tokens of a step here, so answers would "
                "depend on each other; use a model with static or per-token scales"
            )
