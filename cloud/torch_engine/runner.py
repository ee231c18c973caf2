"""The only code that touches the target's tensors: one ragged forward over the KV store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cloud.engine.runner import ModelRunner
from cloud.torch_engine.attention import ATTENTION, span_plan
from cloud.torch_engine.drawing import TorchLogits
from cloud.torch_engine.kvstore import KVStore
from outrider_core.targets.part import Part

#: (up to, multiple of): steps are padded to a row count of this scale
_ROW_SCALE = ((2, 1), (48, 4), (128, 8), (256, 16), (512, 32))


def padded_rows(tokens: int) -> int:
    """Return the number of rows with which a step of `tokens` tokens runs.

    oneDNN compiles and keeps kernels for each number of rows it meets, some megabytes each, so a server that meets all
    of them grows for hours. About fifty sizes are enough: above 16 tokens, padding adds less than a fifth to a step.
    """
    multiple = next((each for up_to, each in _ROW_SCALE if tokens <= up_to), 64)
    return -(-tokens // multiple) * multiple


class TorchRunner(ModelRunner):
    """The target in this process: the float reference that the other engines are compared with.

    All tokens of a step travel in one row [1, T] through the unmodified `transformers` model, none padded to another's
    length; a few meaningless rows pad the total to `padded_rows`.
    """

    def __init__(self, model: Any, rows: int, kv_heads: int, head_dim: int) -> None:
        self.store = KVStore(model.config.num_hidden_layers, rows, kv_heads, head_dim, model.dtype, model.device)
        self.model, self.device = model, model.device
        self._group = model.config.num_attention_heads // model.config.num_key_value_heads
        self._window = getattr(model.config, "sliding_window", None) or 0
        model.set_attn_implementation(ATTENTION)

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part]) -> TorchLogits:
        """See ModelRunner.forward."""
        count = sum(map(len, parts))
        ids, positions, rows = np.zeros((3, padded_rows(count)), np.int64)
        kept, depths, begin = list[int](), list[int](), 0
        for part in parts:
            end, root = begin + len(part), begin + len(part.chain) - 1
            ids[begin:end] = part.chain + part.tree.tokens
            positions[begin : root + 1] = range(part.past, part.past + len(part.chain))
            positions[root + 1 : end] = positions[root] + np.array(part.tree.depths, np.int64)
            rows[begin:end] = part.base + part.past + np.arange(len(part))
            if part.wanted:
                kept += range(root, end)
                depths += (0, *part.tree.depths)
            begin = end
        # prefill alone needs no logits, but the model must get some row
        keep = [*kept, *[0] * (padded_rows(max(1, len(kept))) - len(kept))]
        written = torch.from_numpy(rows[:count]).to(self.device)
        output = self.model(
            input_ids=torch.from_numpy(ids)[None].to(self.device),
            position_ids=torch.from_numpy(positions)[None].to(self.device),
            use_cache=False,
            plan=span_plan(self.store, parts, written, self._group, self._window),
            logits_to_keep=torch.tensor(keep, device=self.device),
        )
        return TorchLogits(output.logits[0][: len(kept)], depths)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        self.store.move(sources, targets)

    @torch.inference_mode()
    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See ModelRunner.gather."""
        return self.store.gather(layers, rows)
