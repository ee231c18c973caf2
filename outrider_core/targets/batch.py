"""The inputs of one run of a target graph, which computes the parts of several sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_core.protocol.tree import ROOT
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.weights import Floats

Ints = NDArray[np.int64]

#: most tokens in a run of several parts; longer parts run alone
JOINED_TOKENS = 256
#: most that padding the parts of a run to the longest may multiply the cost of its attention
MOST_PADDING = 2.0


@dataclass(frozen=True)
class BlockRange:
    """Blocks of the pool that belong to a part: `count` of them, starting with `first`."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """Index of the first block after the range."""
        return self.first + self.count


def span_of(part: Part) -> BlockRange:
    """Return the blocks that a part reads and writes."""
    return BlockRange(part.base // POOL_BLOCK, -(-(part.past + len(part)) // POOL_BLOCK))


def group_parts(parts: Sequence[Part], idle_blocks: int) -> list[list[int]]:
    """Group parts into runs; each group holds indices into `parts`, in the order of their extents.

    A run reads the weights once, but computes all blocks from its first part's to its last part's. idle_blocks: how
    many unused blocks cost as much as another run.
    """
    groups = list[list[int]]()
    for index in sorted(range(len(parts)), key=lambda index: parts[index].base):
        if groups and _fit([parts[other] for other in groups[-1]], parts[index], idle_blocks):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _fit(group: Sequence[Part], part: Part, idle_blocks: int) -> bool:
    together = [*group, part]
    tokens = [len(each) for each in together]
    spans = [span_of(each) for each in together]
    idle = sum(after.first - before.end for before, after in pairwise(spans))
    work = sum(span.count * count for span, count in zip(spans, tokens, strict=True))
    padded = sum(span.count for span in spans) * max(tokens)
    return sum(tokens) <= JOINED_TOKENS and idle <= idle_blocks and padded <= MOST_PADDING * work


class Batch:
    """The inputs of the graph for `parts`, whose blocks follow one another in the pool.

    span: the blocks of the pool that are computed. feeds: the other inputs by name; see `graph.TargetGraph.build`.
    """

    def __init__(self, parts: Sequence[Part], config: TargetConfig) -> None:
        spans = [span_of(part) for part in parts]
        first = spans[0].first
        self.span = BlockRange(first, spans[-1].end - first)
        local = [BlockRange(span.first - first, span.count) for span in spans]
        counts = [len(part) for part in parts]
        begins = np.cumsum(counts) - counts
        self.feeds: dict[str, NDArray[Any]] = {
            "ids": np.array([token for part in parts for token in (*part.chain, *part.tree.tokens)], np.int64),
            "positions": np.concatenate([_positions(part) for part in parts])[None],
            "mask": _joined_mask(parts, local, self.span.count, config.group),
            "slots": slots(np.concatenate([_rows(part) for part in parts]) - first * POOL_BLOCK, config),
            "wanted": np.concatenate([begin + _wanted(part) for part, begin in zip(parts, begins, strict=True)]),
            **routes(counts, local, self.span.count, config),
        }
        if config.windowed_layers:
            window = config.sliding_window
            self.feeds["window_mask"] = _joined_mask(parts, local, self.span.count, config.group, window)


def routes(
    counts: Sequence[int], spans: Sequence[BlockRange], blocks: int, config: TargetConfig
) -> dict[str, NDArray[Any]]:
    """Return the five inputs of the graph that assign queries to blocks, and sums to tokens.

    counts: tokens of each part. spans: each part's blocks, counted within the run's `blocks`.
    """
    parts, padded, heads = len(counts), max(counts), np.arange(config.num_attention_heads)
    begins = np.cumsum(counts) - counts
    part_of_block = np.zeros(blocks if parts > 1 else 1, np.int64)  # the mask hides unused blocks from the first part
    shares = np.zeros((parts, blocks), np.float64)
    blocks_of_part = np.empty((parts, max(span.count for span in spans)), np.int64)
    tokens = np.empty((parts, padded), np.int64)
    for part, span in enumerate(spans):
        part_of_block[span.first : span.end] = part
        shares[part, span.first : span.end] = 1
        blocks_of_part[part] = span.first + np.minimum(np.arange(blocks_of_part.shape[1]), span.count - 1)
        tokens[part] = begins[part] + np.minimum(np.arange(padded), counts[part] - 1)
    # queries lie [heads, T]; a part's are [kv, group, padded]
    queries = heads.reshape(1, config.num_key_value_heads, -1, 1) * sum(counts) + tokens[:, None, None]
    queries = queries.reshape(parts, config.num_key_value_heads, -1)
    part_of_token = np.repeat(np.arange(parts), counts)[:, None]
    within = np.concatenate([np.arange(count) for count in counts])[:, None]
    return {
        "queries": queries[part_of_block],
        "part_of_block": part_of_block,
        "blocks_of_part": blocks_of_part,
        "shares_of_blocks": shares,
        "answers": (part_of_token * len(heads) + heads) * padded + within,
    }


def slots(rows: Ints, config: TargetConfig) -> Ints:
    """Return (block, head, row) of each new token, given its pool row within the run: int64 [1, kv_heads, T, 3]."""
    places = np.empty((1, config.num_key_value_heads, len(rows), 3), np.int64)
    places[..., 0], places[..., 2] = np.divmod(rows, POOL_BLOCK)
    places[..., 1] = np.arange(places.shape[1])[:, None]
    return places


def _joined_mask(
    parts: Sequence[Part], spans: Sequence[BlockRange], blocks: int, group: int, window: int = 0
) -> Floats:
    """Return 0 where a token attends, else -inf: float32 [blocks, 1, group * padded, POOL_BLOCK]. window 0: none."""
    padded = max(len(part) for part in parts)
    joined = np.full((blocks, group, padded, POOL_BLOCK), -np.inf, np.float32)
    for part, span in zip(parts, spans, strict=True):
        mask = _mask(part, span.count, window)[:, None]
        joined[span.first : span.end, :, : len(part)] = mask
        joined[span.first : span.end, :, len(part) :] = mask[:, :, -1:]  # padding repeats its last token
    return joined.reshape(blocks, 1, group * padded, POOL_BLOCK)


def _mask(part: Part, blocks: int, window: int) -> Floats:
    """Return the mask of one part alone: float32 [blocks, T, POOL_BLOCK]."""
    count, chain, past = len(part), len(part.chain), part.past
    mask = np.full((count, blocks * POOL_BLOCK), -np.inf, np.float32)
    mask[:, :past] = 0
    mask[:chain, past : past + chain][np.tril_indices(chain)] = 0
    mask[chain:, past : past + chain] = 0
    for node, parent in enumerate(part.tree.parents):
        row, own = chain + node, past + chain + node
        if parent != ROOT:
            mask[row, past + chain : own] = mask[chain + parent, past + chain : own]
        mask[row, own] = 0
    if window:
        keys, own_positions = np.arange(blocks * POOL_BLOCK), _positions(part)
        keys[past : past + count] = own_positions
        mask[own_positions[:, None] - keys >= window] = -np.inf
    return mask.reshape(count, blocks, POOL_BLOCK).transpose(1, 0, 2)


def _rows(part: Part) -> Ints:
    return np.arange(part.base + part.past, part.base + part.past + len(part))


def _positions(part: Part) -> Ints:
    chain = len(part.chain)
    steps = [*range(chain), *(chain - 1 + depth for depth in part.tree.depths)]
    return np.array(steps, np.int64) + part.past


def _wanted(part: Part) -> Ints:
    return np.arange(len(part.chain) - 1, len(part)) if part.wanted else np.arange(0)
