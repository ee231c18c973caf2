"""Steps as compiled functions, one for each number of rows; on a GPU each is recorded once as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: the numbers of rows that steps are compiled for
COMPILED_ROWS = (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)
#: of one function; torch gives up on one that is compiled more often
_MOST_COMPILATIONS = 64


class Recorded(NamedTuple):
    """A CUDA graph: it reads `table` and writes `logits`, at the same addresses every time."""

    graph: torch.cuda.CUDAGraph
    table: Tensor
    logits: Tensor


class CompiledSteps:
    """`step`, a function from a table [fields, rows] on the device to logits [rows, vocab], compiled for each `rows`.

    The compiler must take it as one graph without breaks; otherwise the first call raises what torch raises. On CUDA
    the logits of one call are overwritten by the next.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], device: torch.device) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_COMPILATIONS)
        self._step = torch.compile(step, fullgraph=True, dynamic=False)
        self._device = device
        self._recorded: dict[int, Recorded] = {}
        self._pool: Any = None  # the graphs' memory: never two of them run at once

    def __call__(self, table: NDArray[np.int64]) -> Tensor:
        """Run a step. The first call with a number of rows compiles it, and on CUDA records it."""
        if self._device.type != "cuda":
            return self._step(torch.from_numpy(table).to(self._device))
        recorded = self._recorded.get(table.shape[1])
        if recorded is None:
            recorded = self._recorded[table.shape[1]] = self._record(table)
        recorded.table.copy_(torch.from_numpy(table))
        recorded.graph.replay()
        return recorded.logits

    def _record(self, like: NDArray[np.int64]) -> Recorded:
        """Record the step with this table; that it is run several times meanwhile changes nothing in the pool."""
        table = torch.from_numpy(like).to(self._device)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # compiles, and fills what libraries allocate at first
            for _ in range(2):
                self._step(table)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._step(table)
        self._pool = graph.pool()
        return Recorded(graph, table, logits)
