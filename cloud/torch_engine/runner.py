"""The only code that touches the target's tensors: one ragged forward over the KV store.

Each rank of a tensor-parallel verifier has a TorchRunner; a verifier on one device has a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cloud.telemetry import log
from cloud.torch_engine.attention import ATTENTION
from cloud.torch_engine.compiled import COMPILED_ROWS, CompiledSteps
from cloud.torch_engine.drawing import TorchLogits
from cloud.torch_engine.kvstore import BLOCK, KVStore
from cloud.torch_engine.loop import span_plan
from cloud.torch_engine.plan import IDS, POSITIONS, ROWS, pool_plan, step_table
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part

#: how steps run: `loop`, attention session by session; `compiled`, by a plan of fixed shape, with one attention call
#: over the blocks of the pool that are needed, compiled, and on a GPU a CUDA graph; `pool`, by that plan operation by
#: operation, over the whole pool: what tests compare, in any number format
Steps = Literal["loop", "pool", "compiled"]
#: how far logits of compiled steps may be from the loop's, over these: what is summed in another order is much closer
FARTHEST, FARTHEST_16_BIT = 1e-3, 0.1
#: nodes of the tree in that comparison, at most
DEEPEST = 100
#: (up to, multiple of): steps are padded to a row count of this scale
_ROW_SCALE = ((2, 1), (48, 4), (128, 8), (256, 16), (512, 32))


def padded_rows(tokens: int) -> int:
    """The number of rows with which a step of `tokens` tokens runs.

    oneDNN compiles and keeps kernels for each number of rows it meets, some megabytes each, so a server that meets all
    of them grows for hours. About fifty sizes are enough: above 16 tokens, padding adds less than a fifth to a step.
    """
    multiple = next((each for up_to, each in _ROW_SCALE if tokens <= up_to), 64)
    return -(-tokens // multiple) * multiple


def compiled_rows(tokens: int) -> int:
    """The same for compiled steps: a few sizes, as each of them takes a compilation of its own."""
    return next((rows for rows in COMPILED_ROWS if tokens <= rows), -(-tokens // COMPILED_ROWS[-1]) * COMPILED_ROWS[-1])


class TorchRunner:
    """The target on this rank's device with this rank's share of the KV heads.

    All tokens of a step travel in one row [1, T] through the unmodified `transformers` model, none padded to another's
    length; a few meaningless rows pad the total to `padded_rows` or `compiled_rows`.
    """

    def __init__(self, model: Any, rows: int, kv_heads: int, head_dim: int, steps: Steps = "loop") -> None:
        self.store = KVStore(model.config.num_hidden_layers, rows, kv_heads, head_dim, model.dtype, model.device)
        self.model, self.device, self.steps = model, model.device, steps
        self._group = model.config.num_attention_heads // model.config.num_key_value_heads
        self._window = getattr(model.config, "sliding_window", None) or 0
        model.set_attn_implementation(ATTENTION)
        self._compiled = CompiledSteps(self._pool_step, self.device) if steps == "compiled" else None

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int] = COMPILED_ROWS) -> None:
        """Compile steps of so many rows, so that none is compiled while somebody waits. It empties the pool.

        Where the model cannot be compiled, the memory does not suffice, or what was compiled gives other logits than
        the loop, steps run as a loop from now on.
        """
        if self._compiled is None:
            return
        why, farthest = "", FARTHEST if self.store.dtype == torch.float32 else FARTHEST_16_BIT
        try:
            for rows in sizes:
                self._compiled(step_table((), rows, self.store.spare))
                if not (error := self._error_of_compiled(rows)) <= farthest:  # nan is far, too
                    why = f"compiled steps of {rows} rows are {error:.0%} off what the loop gives"
                    break
        except RuntimeError as error:  # torch's own errors of compiling are all of this kind
            why = str(error).strip().partition("\n")[0]
        self.store.empty()
        if why:
            log.warning("steps are not compiled", why=why)
            self.steps, self._compiled = "loop", None

    def _error_of_compiled(self, rows: int) -> float:
        """How far the logits of a compiled step are from the loop's, over these.

        It is of two sessions, one with a tree, or of one alone where the pool has no room for two.
        """
        assert self._compiled is not None
        vocab, room = self.model.config.vocab_size, self.store.spare  # the last row is nobody's
        half = min(rows // 2, room // BLOCK // 2 * BLOCK)
        tokens = tuple((7 + 13 * at) % vocab for at in range(min(rows, room)))
        parts = [Part(0, 0, tokens)]
        if half > 2:
            chain = max(2, half - DEEPEST)
            tree = TokenTree.chain(tokens[chain:half])
            parts = [Part(0, 0, tokens[half - 1 :: -1]), Part(-(-half // BLOCK) * BLOCK, 0, tokens[:chain], tree)]
        count = sum(map(len, parts))
        got = self._compiled(step_table(parts, rows, self.store.spare))[:count].float()
        want = self._loop_step(parts, count, range(count)).float()
        return float((got - want).norm() / want.norm())

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part]) -> TorchLogits:
        """See ModelRunner.forward."""
        kept, depths, begin = list[int](), list[int](), 0
        for part in parts:
            if part.wanted:
                kept += range(begin + len(part.chain) - 1, begin + len(part))
                depths += (0, *part.tree.depths)
            begin += len(part)
        if self.steps == "loop":
            return TorchLogits(self._loop_step(parts, begin, kept), depths)
        rows = padded_rows(begin) if self._compiled is None else compiled_rows(begin)
        table = step_table(parts, rows, self.store.spare)
        if self._compiled is None:
            logits = self._pool_step(torch.from_numpy(table).to(self.device))
        else:
            logits = self._compiled(table)
        return TorchLogits(logits[torch.tensor(kept, dtype=torch.int64, device=self.device)], depths)

    def _loop_step(self, parts: Sequence[Part], tokens: int, kept: Sequence[int]) -> Tensor:
        """Logits [len(kept), vocab] of these rows."""
        table = torch.from_numpy(step_table(parts, padded_rows(tokens), self.store.spare)).to(self.device)
        # prefill alone needs no logits, but the model must be given some row
        keep = torch.tensor([*kept, *[0] * (padded_rows(max(1, len(kept))) - len(kept))], device=self.device)
        plan = span_plan(self.store, parts, table[ROWS], self._group, self._window)
        return self._model(table, plan=plan, logits_to_keep=keep)[: len(kept)]

    def _pool_step(self, table: Tensor) -> Tensor:
        """Logits [rows, vocab] of all rows of a step's table: the same operations for every table of its size."""
        plan = pool_plan(self.store, table, self._compiled is not None, self._window)
        return self._model(table, plan=plan)

    def _model(self, table: Tensor, **options: Any) -> Tensor:
        output = self.model(input_ids=table[IDS][None], position_ids=table[POSITIONS][None], use_cache=False, **options)
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        self.store.move(sources, targets)

    @torch.inference_mode()
    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See ModelRunner.gather; only this rank's heads."""
        return self.store.gather(layers, rows)

    def rest(self) -> None:
        """See ModelRunner.rest; torch keeps its memory."""

    def stop(self) -> None:
        """See ModelRunner.stop; there is nothing to end."""
