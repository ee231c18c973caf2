"""Run a lowered target over a pool of keys and values: three calls, forward, move and gather. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from outrider_core.protocol.tree import ROOT
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.graph import POOL_BLOCK
from outrider_core.targets.part import Part
from outrider_core.targets.weights import Floats


class OnnxRunner:
    """A target graph (`outrider_core.targets.graph`) and its pool of `rows` rows, a multiple of POOL_BLOCK.

    The pool's memory is only taken as rows are written. value_exponents: the power of two of each layer's values.
    """

    def __init__(
        self, graph: Path, config: TargetConfig, value_exponents: Sequence[int], rows: int, threads: int = 0
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._config = config
        blocks = -(-rows // POOL_BLOCK)
        shape = (config.num_hidden_layers, blocks, config.num_key_value_heads, POOL_BLOCK, config.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float64)
        self._value_scales = np.exp2(-np.array(value_exponents, np.float64))
        self._binding = self._session.io_binding()
        self._bound = (-1, -1)

    def forward(self, parts: Sequence[Part]) -> Floats:
        """Run all parts and write their keys and values behind each prefix.

        Returns logits float32 [wanted tokens, vocab], parts in order, in a part the chain's last token first.
        """
        return np.concatenate([self._run(part) for part in parts])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pool rows over pool rows, in all layers. Sources and targets may overlap: sources are read first."""
        (from_block, from_row), (to_block, to_row) = _places(sources), _places(targets)
        for pool in (self._keys, self._values):
            pool[:, to_block, :, to_row] = pool[:, from_block, :, from_row]

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Floats:
        """Keys and values of pool rows, float32 [rows, layers, 2 * kv_heads * head_dim]: key and value head by head."""
        block, row = _places(rows)
        taken = []
        for layer in layers:
            keys = self._keys[layer][block, :, row]  # [rows, kv_heads, head_dim]
            values = self._values[layer][block, :, row] * self._value_scales[layer]
            taken.append(np.stack([keys, values.astype(np.float32)], 2).reshape(len(rows), -1))
        both: Floats = np.stack(taken, 1)
        return both

    def _run(self, part: Part) -> Floats:
        count, first = len(part), part.base // POOL_BLOCK
        blocks = -(-(part.past + count) // POOL_BLOCK)
        self._bind(first, blocks)
        chain = len(part.chain)
        ids = np.array([*part.chain, *part.tree.tokens], np.int64)
        steps = [*range(chain), *(chain - 1 + depth for depth in part.tree.depths)]
        wanted = np.arange(chain - 1, count) if part.wanted else np.arange(0)
        feeds: dict[str, NDArray[Any]] = {
            "ids": ids,
            "positions": np.array([steps], np.int64) + part.past,
            "mask": self._mask(part, blocks),
            "slots": self._slots(part.past, count),
            "wanted": wanted.astype(np.int64),
        }
        for name, value in feeds.items():
            self._binding.bind_cpu_input(name, value)
        self._binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(self._binding)
        logits: Floats = self._binding.get_outputs()[-1].numpy()
        return logits

    def _bind(self, first: int, blocks: int) -> None:
        """Let the graph read and write these blocks of the pool in place."""
        if (first, blocks) == self._bound:
            return
        for layer in range(self._config.num_hidden_layers):
            for name, pool in (("keys", self._keys), ("values", self._values)):
                view = pool[layer, first : first + blocks]
                where = ("cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
                self._binding.bind_input(f"{name}_{layer}", *where)
                self._binding.bind_output(f"new_{name}_{layer}", *where)
        self._bound = first, blocks

    def _mask(self, part: Part, blocks: int) -> Floats:
        """0 where a token attends, else -inf: float32 [blocks, 1, group * T, POOL_BLOCK]."""
        count, chain, past, group = len(part), len(part.chain), part.past, self._config.group
        mask = np.full((count, blocks * POOL_BLOCK), -np.inf, np.float32)
        mask[:, :past] = 0
        mask[:chain, past : past + chain][np.tril_indices(chain)] = 0
        mask[chain:, past : past + chain] = 0
        for node, parent in enumerate(part.tree.parents):
            row, own = chain + node, past + chain + node
            if parent != ROOT:
                mask[row, past + chain : own] = mask[chain + parent, past + chain : own]
            mask[row, own] = 0
        tiled = np.broadcast_to(mask.reshape(1, count, blocks, POOL_BLOCK), (group, count, blocks, POOL_BLOCK))
        ordered = tiled.reshape(group * count, blocks, POOL_BLOCK).transpose(1, 0, 2)
        return np.ascontiguousarray(ordered)[:, None]

    def _slots(self, past: int, count: int) -> NDArray[np.int64]:
        """(block, head, row) of each new token, of the bound blocks: int64 [1, kv_heads, T, 3]."""
        slots = np.empty((1, self._config.num_key_value_heads, count, 3), np.int64)
        slots[..., 0], slots[..., 2] = _places(range(past, past + count))
        slots[..., 1] = np.arange(slots.shape[1])[:, None]
        return slots


def _places(rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(block, row within it) of pool rows."""
    block, row = np.divmod(np.asarray(rows, np.int64), POOL_BLOCK)
    return block, row
