"""Decode many sequences in lock step on the target's 8-bit copy: on a CPU several times as fast as torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from outrider_core.targets.batch import BlockRange
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.runner import OnnxRunner


class ExactDecoder:
    """`slots` sequences of at most `capacity` tokens; see `export.train.decoder.SlotDecoder`. threads: 0: all cores.

    A run computes all blocks of the pool from its first sequence's to its last one's, so sequences lie close together,
    each with room for one block more; one that needs more moves to the first gap that is wide enough. lengths int64
    [slots]: tokens of each sequence; 0 for a free slot, which is not decoded.
    """

    def __init__(self, bundle: TargetBundle, slots: int, capacity: int, threads: int = 0) -> None:
        blocks = 2 * slots * (-(-capacity // POOL_BLOCK) + 1)  # gaps are narrower than what they did not hold
        self._runner = OnnxRunner.of(bundle, blocks * POOL_BLOCK, threads)
        self._spans = Spans(slots)
        self._vocab = bundle.config.vocab_size
        self.lengths = np.zeros(slots, np.int64)

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Put prompts (slot -> ids) into their slots; return the logits [prompts, vocab] float32 that follow."""
        for slot, ids in prompts.items():
            self._spans.free(slot)
            self._spans.take(slot, len(ids))
            self.lengths[slot] = len(ids)
        parts = [Part(self._spans.base(slot), 0, tuple(ids)) for slot, ids in prompts.items()]
        return torch.from_numpy(self._runner.forward(parts))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every sequence: tokens [slots] int64 -> logits [slots, vocab], 0 for free slots."""
        busy = [int(slot) for slot in np.flatnonzero(self.lengths)]
        for free in np.flatnonzero(self.lengths == 0):
            self._spans.free(int(free))
        for slot in busy:
            self._make_room(slot)
        chosen = tokens.tolist()
        parts = [Part(self._spans.base(slot), int(self.lengths[slot]), (chosen[slot],)) for slot in busy]
        logits = torch.zeros(len(self.lengths), self._vocab)
        logits[busy] = torch.from_numpy(self._runner.forward(parts))
        self.lengths[busy] += 1
        return logits

    def close(self) -> None:
        """See SlotDecoder.close; there is nothing to free."""

    def _make_room(self, slot: int) -> None:
        length = int(self.lengths[slot])
        if length < self._spans.room(slot):
            return
        before = self._spans.base(slot)
        self._spans.free(slot)
        self._spans.take(slot, length + 1)
        if (after := self._spans.base(slot)) != before:
            self._runner.move(range(before, before + length), range(after, after + length))


class Spans:
    """Assigns blocks of a pool to slots, packed to its front."""

    def __init__(self, slots: int) -> None:
        self._spans: list[BlockRange | None] = [None] * slots

    def base(self, slot: int) -> int:
        """Return the first pool row."""
        return self._of(slot).first * POOL_BLOCK

    def room(self, slot: int) -> int:
        """Return the tokens that fit."""
        return self._of(slot).count * POOL_BLOCK

    def free(self, slot: int) -> None:
        """Free a slot's blocks, if it has any."""
        self._spans[slot] = None

    def take(self, slot: int, tokens: int) -> None:
        """Take blocks for `tokens` tokens and one block more: the first gap that is wide enough."""
        count, first = -(-tokens // POOL_BLOCK) + 1, 0
        for span in sorted((span for span in self._spans if span), key=lambda span: span.first):
            if span.first - first >= count:
                break
            first = span.end
        self._spans[slot] = BlockRange(first, count)

    def _of(self, slot: int) -> BlockRange:
        span = self._spans[slot]
        assert span is not None
        return span
