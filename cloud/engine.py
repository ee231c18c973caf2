"""The engine: one ragged forward of the target for everything that waits, then acceptance and features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloud.acceptance import Walk, walk
from cloud.attention import ATTENTION, Plan, Span, span_mask
from cloud.features import FeatureProducer
from cloud.kvpool import KVPool
from cloud.sessions import Session
from protocol.rows import pack_rows
from protocol.tree import TokenTree

_NO_TREE = TokenTree()


@dataclass(frozen=True)
class Segment:
    """One session's part of a step: `chain` committed tokens without keys and values yet, then a tree.

    tree: hangs below the last committed token, which then must be the chain's last; None for a prefill
    chunk, which yields no logits. features: bring the session's feature rows up to date.
    """

    session: Session
    chain: int
    tree: TokenTree | None = None
    features: bool = True


class Engine:
    """Runs steps on a transformers causal LM; one thread at a time.

    All tokens of a step travel in one row [1, T] without padding. Attention reads and writes the pool, so
    a session's result does not depend on its neighbours.
    """

    def __init__(
        self, model: Any, eos_ids: Iterable[int], max_context: int, pool: KVPool, producer: FeatureProducer
    ) -> None:
        self.pool, self.producer = pool, producer
        self._model, self._eos_ids, self._max_context = model, frozenset(eos_ids), max_context
        self._device = pool.keys.device
        model.set_attn_implementation(ATTENTION)

    @torch.inference_mode()
    def step(self, segments: Sequence[Segment]) -> list[Walk | None]:
        """Run all segments; the pool must hold room for them. One Walk per segment with a tree, else None.

        Sessions change only when all of it succeeded: tokens, feature rows and the extent's used rows grow.
        """
        logits = iter(self._forward(segments))
        walks: list[Walk | None] = []
        for segment in segments:
            if segment.tree is None:
                walks.append(None)
            else:
                walks.append(self._walk(segment.session, segment.tree, next(logits)))
        self._compact(segments, walks)
        used = [
            self.pool.used(segment.session.id) + segment.chain + (len(walked.accepted) if walked else 0)
            for segment, walked in zip(segments, walks, strict=True)
        ]
        features = self._features(segments, used)
        for segment, walked, rows_used, packed in zip(segments, walks, used, features, strict=True):
            session = segment.session
            self.pool.extent(session.id).used = rows_used
            session.rows.append(packed)
            if walked is not None and segment.tree is not None:
                session.tokens += [segment.tree.tokens[node] for node in walked.accepted]
                session.tokens.append(walked.bonus)
        return walks

    def _forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Logits [1 + nodes, vocab] per segment with a tree, in order."""
        ids, positions, rows, kept = list[int](), list[int](), list[int](), list[int]()
        spans: list[Span] = []
        counts: list[int] = []
        for segment in segments:
            session, tree, chain = segment.session, segment.tree or _NO_TREE, segment.chain
            extent = self.pool.extent(session.id)
            past, begin = extent.used, len(ids)
            total = chain + len(tree)
            if total == 0:
                continue
            ids += session.tokens[past : past + chain]
            ids += tree.tokens
            positions += range(past, past + chain)
            positions += [past + chain - 1 + depth for depth in tree.depths]
            rows += range(extent.base + past, extent.base + past + total)
            mask = span_mask(past, chain, tree, self.pool.keys.dtype)
            causal = mask is None and total > 1
            device_mask = None if mask is None else mask.to(self._device)
            spans.append(Span(begin, begin + total, extent.base, past + total, device_mask, causal))
            if segment.tree is not None:
                kept += range(begin + chain - 1, begin + total)
                counts.append(1 + len(tree))
        if not ids:
            return []
        packed = torch.tensor([ids, positions, rows], device=self._device)
        plan = Plan(self.pool.keys, self.pool.values, packed[2], tuple(spans))
        # no logits are wanted of prefill alone, but the model must be given some row
        keep = torch.tensor(kept or [0], device=self._device)
        output = self._model(
            input_ids=packed[:1], position_ids=packed[1:2], use_cache=False, logits_to_keep=keep, plan=plan
        )
        return list(output.logits[0, : len(kept)].split(counts))

    def _walk(self, session: Session, tree: TokenTree, logits: Tensor) -> Walk:
        def row(index: int) -> NDArray[np.floating]:
            values = logits[index]
            if values.dtype not in (torch.float32, torch.float64):
                values = values.float()
            visited: NDArray[np.floating] = values.cpu().numpy()
            return visited

        return walk(row, tree, session.sampling, len(session.tokens), self._eos_ids, self._max_context)

    def _compact(self, segments: Sequence[Segment], walks: Sequence[Walk | None]) -> None:
        """Move accepted nodes' rows right behind the prefix, for all sessions in one gather."""
        sources, targets = list[int](), list[int]()
        for segment, walked in zip(segments, walks, strict=True):
            if walked is None:
                continue
            extent = self.pool.extent(segment.session.id)
            first = extent.base + extent.used + segment.chain
            for index, node in enumerate(walked.accepted):
                if node != index:
                    sources.append(first + node)
                    targets.append(first + index)
        self.pool.move(sources, targets)

    def _features(self, segments: Sequence[Segment], used: Sequence[int]) -> list[bytes]:
        """Packed feature rows per segment that its session lacks, for all sessions in one pass."""
        lacking = [
            range(segment.session.rows.stop, rows_used if segment.features else 0)
            for segment, rows_used in zip(segments, used, strict=True)
        ]
        pool_rows, positions = list[int](), list[int]()
        for segment, span in zip(segments, lacking, strict=True):
            base = self.pool.extent(segment.session.id).base
            pool_rows += [base + position for position in span]
            positions += span
        if not positions:
            return [b""] * len(segments)
        rows = self.producer.rows(pool_rows, positions)
        packed, begin = list[bytes](), 0
        for span in lacking:
            packed.append(pack_rows(rows[begin : begin + len(span)]) if len(span) else b"")
            begin += len(span)
        return packed
