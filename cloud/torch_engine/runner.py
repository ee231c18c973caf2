"""The only code that touches the target's tensors: one ragged forward over the KV store.

Each rank of a tensor-parallel verifier has a TorchRunner; a verifier on one device has a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cloud.torch_engine.attention import ATTENTION, Plan, Span, span_mask
from cloud.torch_engine.drawing import TorchLogits
from cloud.torch_engine.kvstore import KVStore
from outrider_core.targets.part import Part

#: (up to, multiple of): steps are padded to a row count of this scale
_ROW_SCALE = ((2, 1), (48, 4), (128, 8), (256, 16), (512, 32))


def padded_rows(tokens: int) -> int:
    """The number of rows with which a step of `tokens` tokens runs.

    oneDNN compiles and keeps kernels for each number of rows it meets, some megabytes each, so a server that meets all
    of them grows for hours. About fifty sizes are enough: above 16 tokens, padding adds less than a fifth to a step.
    """
    multiple = next((each for up_to, each in _ROW_SCALE if tokens <= up_to), 64)
    return -(-tokens // multiple) * multiple


class TorchRunner:
    """The target on this rank's device with this rank's share of the KV heads.

    All tokens of a step travel in one row [1, T] through the unmodified `transformers` model, none padded to another's
    length; a few meaningless rows pad the total to `padded_rows`.
    """

    def __init__(self, model: Any, rows: int, kv_heads: int, head_dim: int) -> None:
        self.store = KVStore(model.config.num_hidden_layers, rows, kv_heads, head_dim, model.dtype, model.device)
        self.model, self.device = model, model.device
        self._group = model.config.num_attention_heads // model.config.num_key_value_heads
        model.set_attn_implementation(ATTENTION)

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part]) -> TorchLogits:
        """See ModelRunner.forward."""
        ids, positions, rows, kept = list[int](), list[int](), list[int](), list[int]()
        spans: list[Span] = []
        for part in parts:
            chain, tree, past, begin = len(part.chain), part.tree, part.past, len(ids)
            ids += part.chain
            ids += tree.tokens
            positions += range(past, past + chain)
            positions += [past + chain - 1 + depth for depth in tree.depths]
            rows += range(part.base + past, part.base + past + len(part))
            mask = span_mask(past, chain, tree, self.store.keys.dtype)
            device_mask = None if mask is None else mask.to(self.device, non_blocking=True).repeat(self._group, 1)
            causal = mask is None and len(part) > 1
            spans.append(Span(begin, begin + len(part), part.base, past + len(part), device_mask, causal))
            if part.wanted:
                kept += range(begin + chain - 1, begin + len(part))
        count = len(ids)
        filling = [0] * (padded_rows(count) - count)
        packed = torch.tensor([ids + filling, positions + filling, rows + filling], device=self.device)
        plan = Plan(self.store.keys, self.store.values, packed[2, :count], tuple(spans))
        # prefill alone needs no logits, but the model must be given some row
        keep = torch.tensor(kept + [0] * (padded_rows(max(1, len(kept))) - len(kept)), device=self.device)
        output = self.model(
            input_ids=packed[:1], position_ids=packed[1:2], use_cache=False, logits_to_keep=keep, plan=plan
        )
        return TorchLogits(output.logits[0, : len(kept)])

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        self.store.move(sources, targets)

    @torch.inference_mode()
    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See ModelRunner.gather; only this rank's heads."""
        index = torch.tensor(rows, device=self.device)
        taken = (torch.tensor(layers, device=self.device)[:, None], index[None])
        both = torch.stack([self.store.keys[taken], self.store.values[taken]], 3)  # [layers, rows, heads, 2, head_dim]
        return both.transpose(0, 1).flatten(2)

    def stop(self) -> None:
        """See ModelRunner.stop; there is nothing to end."""
