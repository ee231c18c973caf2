"""A step as one table of fixed shape, and attention over the whole KV pool in one call per layer.

A step is described by values in a device tensor, never by tensor shapes: the table has FIELDS numbers for each row of
the step, and nothing else changes from one step of so many rows to the next. So its operations do not depend on the
number of sessions, it can be compiled once for a number of rows, and recorded as a CUDA graph.

The tree's ancestors are intervals. A walk through the tree, parents first, numbers its nodes: a node is ENTERed at its
own number and LEFT at the number behind its last descendant. Row a is an ancestor of row b, or b itself, where
enter[a] <= enter[b] < leave[a]. A chain is a tree without branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cloud.torch_engine.kvstore import BLOCK, KVStore
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.part import Part

#: query rows that one session's keys are read for at once
TILE = 8

#: per row: token, position, pool row to write to;
IDS, POSITIONS, ROWS = range(3)
#: it sees pool rows base..new-1, and of those behind them, which the step writes, the ones whose interval it lies in;
#: pool row - shift is the row of the step that writes it
BASE, NEW, SHIFT, ENTER, LEAVE = range(3, 8)
#: where its query lies among the tiles;
SLOT = 8
#: per tile (there are as many as rows): its first row, the last row of its session, its first block of the pool, and
#: the number of blocks, 0 for tiles that are not needed
FIRST, LAST, BLOCK_BEGIN, BLOCK_COUNT = range(9, 13)
FIELDS = 13


class PoolPlan(NamedTuple):
    """What one forward does with the pool. T: rows of the step; tiles: as many; N: rows of the pool.

    keys, values: one tensor [N, kv_heads, head_dim] per layer. table: [FIELDS, T] int64. seen: [T, N] bool, which row
    sees which row of the pool; None for flex_attention, which asks. window: tokens that layers with a sliding window
    see, 0: there are none; window_seen: as `seen`, in those.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    table: Tensor
    seen: Tensor | None
    window: int
    window_seen: Tensor | None


def step_table(parts: Sequence[Part], rows: int, spare: int) -> NDArray[np.int64]:
    """The table [FIELDS, rows] of these parts, one behind the other. Rows behind them write to `spare`, and see it."""
    table = np.zeros((FIELDS, rows), np.int64)
    table[[ROWS, BASE]], table[NEW] = spare, spare + 1
    begin = tile = 0
    for part in parts:
        size, new = len(part), part.base + part.past
        span, chain = slice(begin, begin + size), len(part.chain)
        each = np.arange(size)
        table[IDS, span] = part.chain + part.tree.tokens
        table[POSITIONS, span] = part.past + each
        if len(part.tree):
            table[POSITIONS, begin + chain : begin + size] = part.past + chain - 1 + np.array(part.tree.depths)
        table[ROWS, span] = new + each
        table[BASE, span], table[NEW, span], table[SHIFT, span] = part.base, new, new - begin
        table[ENTER, span], table[LEAVE, span] = begin + intervals(chain, part.tree)
        table[SLOT, span] = tile * TILE + each
        tiles = slice(tile, tile - (-size // TILE))
        first = each[::TILE]
        table[FIRST, tiles], table[LAST, tiles] = begin + first, begin + size - 1
        block = part.base // BLOCK
        seen = new + np.minimum(first + TILE, size)  # a row sees none behind its own
        table[BLOCK_BEGIN, tiles], table[BLOCK_COUNT, tiles] = block, -(-seen // BLOCK) - block
        begin, tile = begin + size, tiles.stop
    return table


def intervals(chain: int, tree: TokenTree) -> NDArray[np.int64]:
    """[2, chain + nodes]: where a walk enters and leaves each token of a chain and of a tree below its last."""
    sizes = [1] * len(tree)
    for node in range(len(tree) - 1, -1, -1):
        if tree.parents[node] != ROOT:
            sizes[tree.parents[node]] += sizes[node]
    total = chain + len(tree)
    enter, free = list[int](), list[int]()  # free: the number of the next child to come
    top = chain
    for parent, size in zip(tree.parents, sizes, strict=True):
        if parent == ROOT:
            number, top = top, top + size
        else:
            number = free[parent]
            free[parent] += size
        enter.append(number)
        free.append(number + 1)
    leave = [number + size for number, size in zip(enter, sizes, strict=True)]
    return np.array([[*range(chain), *enter], [total] * chain + leave])


def pool_plan(store: KVStore, table: Tensor, flex: bool, window: int = 0) -> PoolPlan:
    """The plan of a table that is on the store's device.

    flex: for flex_attention, which is to be compiled; otherwise for plain products, which run anywhere in any format,
    with as many scores as rows of the step times rows of the pool.
    """
    seen = window_seen = None
    if not flex:
        every = torch.arange(table.shape[1], device=table.device), torch.arange(store.rows, device=table.device)
        seen = visible(table, every[0][:, None], every[1])
        window_seen = visible(table, every[0][:, None], every[1], window) if window else None
    return PoolPlan(store.keys, store.values, table, seen, window, window_seen)


def visible(table: Tensor, row: Tensor, seen: Tensor, window: int = 0) -> Tensor:
    """Whether rows of the step see rows of the pool; of any shapes that go together. window: 0: at any distance."""
    last = table.shape[1] - 1
    writer, entered = seen - table[SHIFT][row], table[ENTER][row]
    known = writer.clamp(0, last)
    above = (writer <= last) & (table[ENTER][known] <= entered) & (entered < table[LEAVE][known])
    found = (seen >= table[BASE][row]) & ((seen < table[NEW][row]) | above)
    if window:
        position = torch.where(seen < table[NEW][row], seen - table[BASE][row], table[POSITIONS][known])
        found = found & (table[POSITIONS][row] - position < window)
    return found


def attend_pool(
    plan: PoolPlan, layer: int, query: Tensor, new_keys: Tensor, new_values: Tensor, scaling: float, windowed: bool
) -> Tensor:
    """query [1, heads, T, head_dim], new keys and values [T, kv_heads, head_dim] -> [1, T, heads, head_dim]."""
    keys, values = plan.keys[layer], plan.values[layer]
    # Rows that are not seen have the weight 0, and 0 * nan is nan. So no value is ever nan or infinite; the key is nan
    # instead, which only those notice who see it.
    finite = new_values.isfinite().all(-1, keepdim=True)
    keys.index_copy_(0, plan.table[ROWS], torch.where(finite, new_keys, float("nan")))
    values.index_copy_(0, plan.table[ROWS], torch.where(finite, new_values, 0.0))
    all_keys, all_values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    seen = plan.window_seen if windowed and plan.window else plan.seen
    if seen is not None:
        grouped = query.unflatten(1, (keys.shape[1], -1))  # [1, kv_heads, heads that share them, T, head_dim]
        scores = torch.where(seen, scaling * (grouped @ all_keys[:, :, None].mT), float("-inf"))
        return (scores.softmax(-1) @ all_values[:, :, None]).flatten(1, 2).transpose(1, 2)
    # tiles stand in the batch dimension: each reads the blocks of its own session
    table = plan.table
    every = torch.arange(table.shape[1], device=table.device)[:, None], torch.arange(TILE, device=table.device)
    tiled = query[0].transpose(0, 1)[_row(table, *every)].transpose(1, 2).contiguous()
    mask = _block_mask(table, len(keys), plan.window if windowed else 0)
    output = flex_attention(tiled, all_keys, all_values, block_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)[table[SLOT]][None]


def _row(table: Tensor, tile: Tensor, slot: Tensor) -> Tensor:
    """The row whose query stands there; slots behind the last of a session repeat it."""
    return torch.minimum(table[FIRST][tile] + slot, table[LAST][tile])


def _block_mask(table: Tensor, rows: int, window: int) -> BlockMask:
    blocks = torch.arange(rows // BLOCK, device=table.device)
    listed = (table[BLOCK_BEGIN][:, None] + blocks).clamp(max=rows // BLOCK - 1)

    def seen(tile: Tensor, head: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        return visible(table, _row(table, tile, slot), row, window)

    return BlockMask.from_kv_blocks(
        table[BLOCK_COUNT].int()[:, None, None],
        listed.int()[:, None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(TILE, rows),
        compute_q_blocks=False,
    )
