"""`cloud.engine.runner.ModelRunner` on vLLM's executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cloud.torch_engine.drawing import TorchLogits
from cloud.vllm_engine.executor import MOST_REQUESTS, MOST_TOKENS, StepExecutor
from cloud.vllm_engine.paths import Layout, PathLayout, PathRequest
from outrider_core.targets.part import Part


class VllmRunner:
    """Runs steps as requests of their trees' paths; see `cloud.vllm_engine.paths`.

    Of a tree's keys and values, those of accepted nodes alone are brought to their pool rows: the engine moves them.
    """

    def __init__(self, executor: StepExecutor, layout: PathLayout, scratch: int) -> None:
        """scratch: blocks for paths, enough for any one tree."""
        self._executor, self._layout, self._scratch = executor, layout, scratch
        self._block = layout.block
        self._elsewhere: dict[int, int] = {}  # slots of the last step's nodes, by pool row
        self._stale = set[int]()  # slots that hold something that is not a number

    def forward(self, parts: Sequence[Part]) -> TorchLogits:
        """See ModelRunner.forward."""
        self._clean(parts)
        step, batch, tokens = Layout(), list[PathRequest](), 0
        logits, places = list[Tensor](), dict[int, int]()

        def run() -> None:
            here = {row for each in batch for row in each.rows.tolist()}
            rows = [row for row in dict.fromkeys(step.wanted) if row in here and row not in places]
            found, broken = self._executor.run(batch, rows or [min(here)])
            self._stale.update(broken)
            places.update(zip(rows, range(len(places), len(places) + len(rows)), strict=True))
            logits.append(found[: len(rows)])
            batch.clear()

        for part in parts:
            laid = self._layout.of(part, step.rows, step.scratch)
            if laid.scratch > self._scratch:  # bring all that has run to its pool rows
                run()
                tokens = 0
                self._copy([(slot, row + self._block) for row, slot in step.elsewhere.items()])
                step.elsewhere.clear()
                laid = self._layout.of(part, step.rows, 0)
            step.add(laid)
            for request in laid.requests:
                if len(batch) == MOST_REQUESTS or tokens + len(request.tokens) > MOST_TOKENS:
                    run()
                    tokens = 0
                batch.append(request)
                tokens += len(request.tokens)
        run()
        self._elsewhere = step.elsewhere
        values, order = torch.cat(logits) if len(logits) > 1 else logits[0], [places[row] for row in step.wanted]
        if order != list(range(len(values))):
            values = values[torch.tensor(order, device=values.device)]
        return TorchLogits(values, step.depths)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        slots = [self._elsewhere.get(row, row + self._block) for row in sources]
        for row in targets:
            self._elsewhere.pop(row, None)
        self._copy([(slot, row + self._block) for slot, row in zip(slots, targets, strict=True)])

    @torch.inference_mode()
    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See ModelRunner.gather."""
        block, slot = self._split(torch.tensor(rows, device=self._executor.device) + self._block)
        pairs = [self._cells(self._executor.caches[layer]) for layer in layers]
        both = [torch.stack([keys[block, slot], values[block, slot]], 2) for keys, values in pairs]
        return torch.stack(both, 1).flatten(2)

    def rest(self) -> None:
        """See ModelRunner.rest; vLLM keeps its memory."""

    def stop(self) -> None:
        """See ModelRunner.stop; there is nothing to end."""

    @torch.inference_mode()
    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots over slots; sources are read first."""
        pairs = [(source, target) for source, target in pairs if source != target]
        if not pairs:
            return
        stale = {target for source, target in pairs if source in self._stale}
        self._stale = self._stale.difference(target for _, target in pairs) | stale
        source, target = torch.tensor(pairs, device=self._executor.device).T
        (block, slot), (to, at) = self._split(source), self._split(target)
        for keys, values in map(self._cells, self._executor.caches):
            keys[to, at], values[to, at] = keys[block, slot], values[block, slot]

    @torch.inference_mode()
    def _clean(self, parts: Sequence[Part]) -> None:
        """Empty slots that parts take over, if they hold something that is not a number.

        An attention kernel reads whole blocks, and what it masks out must still be numbers.
        """
        if not self._stale:
            return
        taken = [slot for slot in self._stale if slot >= self._layout.first_scratch * self._block]
        for part in parts:
            begin = self._block + part.base + part.past
            end = -(-(begin + len(part)) // self._block) * self._block
            taken += [slot for slot in self._stale if begin <= slot < end]
        self._stale.difference_update(taken)
        block, slot = self._split(torch.tensor(taken, dtype=torch.int64, device=self._executor.device))
        for keys, values in map(self._cells, self._executor.caches):
            keys[block, slot] = values[block, slot] = 0.0

    def _split(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots // self._block, slots % self._block

    def _cells(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a layer's keys and values, each [blocks, block, kv_heads, head_dim].

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
