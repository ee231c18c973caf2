"""Run a lowered target over a pool of keys and values: three calls, forward, move and gather. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from outrider_core.targets.batch import Batch, BlockRange, group_parts
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.memory import give_back, untouched
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.products import open_session
from outrider_core.targets.weights import Floats

#: a longer chain runs in pieces of this many tokens, as the memory of attention grows with them
PIECE_TOKENS = 128
#: a larger run takes memory that is given back after a number of smaller ones
LARGE_TOKENS, SMALL_RUNS = 32, 4


class OnnxRunner:
    """A target graph (`outrider_core.targets.graph`) and its pool of `rows` rows, a multiple of POOL_BLOCK.

    The pool takes memory only as rows are written. value_scales: the factor of each layer's values.
    """

    def __init__(
        self, graph: Path, config: TargetConfig, value_scales: Sequence[float], rows: int, threads: int = 0
    ) -> None:
        self._session = open_session(str(graph), threads)
        give_back()  # memory that unpacking weights took
        self._config = config
        blocks = -(-rows // POOL_BLOCK)
        shape = (config.num_hidden_layers, blocks, config.num_key_value_heads, POOL_BLOCK, config.head_dim)
        self._keys, self._values = untouched(shape), untouched(shape)
        self._value_scales = np.array(value_scales, np.float32)
        self._binding = self._session.io_binding()
        self._bound = BlockRange(0, 0)
        # in the time another run takes to read the 8-bit weights, attention reads half as many bytes
        self._idle_blocks = config.linear_weights // (4 * self._keys[:, 0].nbytes)
        self._small_runs: int | None = None  # small runs since the last large one, whose memory is still held
        self._shrinking = onnxruntime.RunOptions()
        self._shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    @classmethod
    def of(cls, bundle: TargetBundle, rows: int, threads: int = 0) -> OnnxRunner:
        """Open a bundle; `check_products` tells whether this machine computes it correctly."""
        return cls(bundle.graph, bundle.config, bundle.value_scales, rows, threads)

    def forward(self, parts: Sequence[Part]) -> Floats:
        """Run all parts, one of each session, and write their keys and values after each prefix.

        Returns logits float32 [wanted tokens, vocab]: parts in order, in each part the chain's last token first.
        """
        parts = [self._last_piece(part) for part in parts]
        logits = list[Floats]([np.empty((0, self._config.vocab_size), np.float32)] * len(parts))
        for group in group_parts(parts, self._idle_blocks):
            together = [parts[index] for index in group]
            found = self._run(together)
            if len(group) > 1 and not self._all_numbers(together, found):
                # NaNs spread to all parts of a run
                found = np.concatenate([self._run([part]) for part in together])
            ends = np.cumsum([1 + len(part.tree) if part.wanted else 0 for part in together])
            for index, rows in zip(group, np.split(found, ends[:-1]), strict=True):
                logits[index] = rows
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def _last_piece(self, part: Part) -> Part:
        """Run all of a long chain but its end, and return the remaining part."""
        while len(part.chain) > PIECE_TOKENS:
            self._run([Part(part.base, part.past, part.chain[:PIECE_TOKENS], wanted=False)])
            part = replace(part, past=part.past + PIECE_TOKENS, chain=part.chain[PIECE_TOKENS:])
        return part

    def rest(self) -> None:
        """Note that large runs are over for now: the next small one gives back their memory."""
        if self._small_runs is not None:
            self._small_runs = SMALL_RUNS - 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pool rows over pool rows, in all layers. Sources and targets may overlap: sources are read first."""
        (from_block, from_row), (to_block, to_row) = _places(sources), _places(targets)
        for pool in (self._keys, self._values):
            pool[:, to_block, :, to_row] = pool[:, from_block, :, from_row]

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Floats:
        """Return keys and values of pool rows, float32 [rows, layers, 2 * kv_heads * head_dim].

        Keys and values alternate, head by head.
        """
        block, row = _places(rows)
        taken = []
        for layer in layers:
            keys = self._keys[layer][block, :, row]  # [rows, kv_heads, head_dim]
            values = self._values[layer][block, :, row] / self._value_scales[layer]
            taken.append(np.stack([keys, values], 2).reshape(len(rows), -1))
        both: Floats = np.stack(taken, 1)
        return both

    def _run(self, parts: Sequence[Part]) -> Floats:
        batch = Batch(parts, self._config)
        self._bind(batch.span)
        for name, value in batch.feeds.items():
            self._binding.bind_cpu_input(name, value)
        self._binding.bind_output("logits", "cpu")
        options = self._run_options(sum(map(len, parts)))
        self._session.run_with_iobinding(self._binding, options)
        logits: Floats = self._binding.get_outputs()[-1].numpy()
        if options is not None:
            give_back()
        return logits

    def _run_options(self, tokens: int) -> onnxruntime.RunOptions | None:
        """Return the options of a run: whether the memory of larger runs is given back."""
        if tokens > LARGE_TOKENS:
            self._small_runs = 0
        elif self._small_runs is not None:
            self._small_runs += 1
            if self._small_runs >= SMALL_RUNS:
                self._small_runs = None
                return self._shrinking
        return None

    def _all_numbers(self, parts: Sequence[Part], logits: Floats) -> bool:
        """Return whether logits and the last layer's new rows, and so those of the layers before, are finite."""
        rows = [row for part in parts for row in range(part.base + part.past, part.base + part.past + len(part))]
        block, row = _places(rows)
        new = self._keys[-1][block, :, row], self._values[-1][block, :, row]
        return all(np.isfinite(each).all() for each in (logits, *new))

    def _bind(self, span: BlockRange) -> None:
        """Let the graph read and write these blocks of the pool in place."""
        if span == self._bound:
            return
        for layer in range(self._config.num_hidden_layers):
            for name, pool in (("keys", self._keys), ("values", self._values)):
                view = pool[layer, span.first : span.end]
                where = ("cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
                self._binding.bind_input(f"{name}_{layer}", *where)
                self._binding.bind_output(f"new_{name}_{layer}", *where)
        self._bound = span


def _places(rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (block, row within it) of pool rows."""
    block, row = np.divmod(np.asarray(rows, np.int64), POOL_BLOCK)
    return block, row
