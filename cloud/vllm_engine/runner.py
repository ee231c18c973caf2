"""`cloud.engine.runner.ModelRunner` on vLLM's executor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cloud.engine.runner import Logits, ModelRunner
from cloud.vllm_engine.executor import MOST_REQUESTS, MOST_TOKENS, StepExecutor
from cloud.vllm_engine.paths import Layout, PathLayout, PathRequest
from cloud.vllm_engine.steps import Copy, Operation, Run, StepCommand, Take
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.part import Part


class VllmRunner(ModelRunner):
    """Runs steps as requests of their trees' paths; see `cloud.vllm_engine.paths`.

    Only the keys and values of accepted nodes are brought to their pool rows: the engine moves them, and the next
    command does so first. With several ranks a step is one command: they draw from all rows at once, and report the
    keys and values that it wrote, from which feature rows are made.
    """

    def __init__(self, executor: StepExecutor, layout: PathLayout, scratch: int, layers: Sequence[int]) -> None:
        """scratch: blocks for paths, enough for any one tree. layers: source of feature rows."""
        self._executor, self._layout, self._scratch, self._layers = executor, layout, scratch, list(layers)
        self._block = layout.block
        self._elsewhere: dict[int, int] = {}  # slots of the last step's nodes, by pool row
        self._moves = list[Operation]()
        self._fresh: dict[int, int] = {}  # pool row -> row of `_written`, which ranks have reported
        self._written: Tensor | None = None

    def forward(self, parts: Sequence[Part]) -> Logits:
        """See ModelRunner.forward."""
        step, places = Layout(), dict[int, int]()
        batch, tokens = list[PathRequest](), 0
        operations, self._moves = [*self._moves, self._take(parts)], []

        def run() -> None:
            here = {row for each in batch for row in each.rows.tolist()}
            rows = [row for row in dict.fromkeys(step.wanted) if row in here and row not in places]
            operations.append(Run(list(batch), rows or [min(here)]))
            places.update(zip(rows, range(kept := sum(found), kept + len(rows)), strict=True))
            found.append(max(1, len(rows)))
            batch.clear()

        found = list[int]()  # rows of logits that each run returns
        for part in parts:
            laid = self._layout.of(part, step.rows, step.scratch)
            if laid.scratch > self._scratch:  # bring everything that has run to its pool rows
                run()
                tokens = 0
                operations += self._copies([(slot, row + self._block) for row, slot in step.elsewhere.items()])
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
        rows = [row for part in parts for row in range(part.base + part.past, part.base + part.past + len(part))]
        rows = rows if self._executor.remote else []
        order = [places[row] for row in step.wanted]
        slots = [self._elsewhere.get(row, row + self._block) for row in rows]
        logits, self._written = self._executor.step(
            StepCommand(operations, order, step.depths, self._draws(parts), self._layers, slots)
        )
        self._fresh = {row: index for index, row in enumerate(rows)}
        return logits

    def _draws(self, parts: Sequence[Part]) -> list[tuple[Sampling, int]]:
        """Return how ranks draw from each wanted row; nothing if one waits for its answer's adjustment."""
        wanted = [part for part in parts if part.wanted]
        if not self._executor.remote or any(part.sampling is None for part in wanted):
            return []
        roots = [(part.sampling, part.past + len(part.chain), part.tree.depths) for part in wanted]
        return [(how, at + depth) for how, at, depths in roots for depth in (0, *depths) if how is not None]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        slots = [self._elsewhere.get(row, row + self._block) for row in sources]
        fresh = [self._fresh.get(row) for row in sources]
        for row, index in zip(targets, fresh, strict=True):
            self._elsewhere.pop(row, None)
            self._fresh.pop(row, None)
            if index is not None:
                self._fresh[row] = index
        self._moves += self._copies([(slot, row + self._block) for slot, row in zip(slots, targets, strict=True)])

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See ModelRunner.gather."""
        if self._written is not None and list(layers) == self._layers and all(row in self._fresh for row in rows):
            return self._written[[self._fresh[row] for row in rows]]
        moves, self._moves = self._moves, []
        return self._executor.step(StepCommand(moves, [], [], (), layers, [row + self._block for row in rows]))[1]

    def stop(self) -> None:
        """See ModelRunner.stop."""
        self._executor.stop()

    def _copies(self, pairs: Sequence[tuple[int, int]]) -> list[Operation]:
        pairs = [(source, target) for source, target in pairs if source != target]
        return [Copy(pairs)] if pairs else []

    def _take(self, parts: Sequence[Part]) -> Take:
        """Return the slots that the parts will write, up to the ends of their blocks."""
        begins = [self._block + part.base + part.past for part in parts]
        ends = [begin + len(part) for begin, part in zip(begins, parts, strict=True)]
        ranges = [(begin, -(-end // self._block) * self._block) for begin, end in zip(begins, ends, strict=True)]
        return Take(ranges, self._layout.first_scratch * self._block)
