"""Grow draft trees, and write single tokens when the link is down.

The tree is EAGLE-2's dynamic one (arXiv 2406.16858; docs/design.md): expand the most likely frontier nodes
level by level, then keep the nodes with the highest path probability. With sampling, candidates are ranked
by log q + g with the verifier's own noise g, so the target's draw is likely to be among them. Ranking can
only cost speed: what is emitted is the target's draw. Prompt lookup (edge_runtime.lookup) is mixed into q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engines import Engine, Floats, Ints
from edge_runtime.lookup import Lookup
from protocol.noise import gumbel_noise_at
from protocol.rows import RowShape
from protocol.sampling import Sampling
from protocol.tree import MAX_NODES, ROOT, TokenTree

#: additive mask value of what a query must not see
MASKED = np.float32(-1e9)
#: cache rows kept free for the expanded nodes of one tree
TREE_ROWS = 512
#: tokens the engine takes in one step at most: breadth of a tree, chunk of a prompt (export writes for this many)
MAX_WIDTH = 64
#: likeliest tokens behind a node that noise may bring forward; less likely ones are hardly ever drawn
CANDIDATES = 512
#: tokens of a prompt fed in one step: as fast as more, and attention's temporaries stay small
PROMPT_CHUNK = 32


@dataclass(frozen=True)
class TreeShape:
    """nodes: size of the tree sent; depth: levels drafted; breadth: nodes expanded per level."""

    nodes: int = 32
    depth: int = 10
    breadth: int = 8

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.breadth) < 1 or self.nodes > MAX_NODES:
            raise ValueError(f"a tree needs 1..{MAX_NODES} nodes and at least one level and one branch, not {self}")
        if self.breadth > MAX_WIDTH or self.depth * self.breadth > TREE_ROWS:
            raise ValueError(
                f"breadth must be at most {MAX_WIDTH} and depth x breadth at most {TREE_ROWS} tokens, not {self}"
            )


class Drafter:
    """Drafting state of one conversation: self-attention cache and feature rows.

    Not thread-safe: one thread calls it, in order.
    """

    def __init__(
        self, engine: Engine, draft_ids: NDArray[np.int64], row_shape: RowShape, sa_kv_heads: int, max_context: int,
        lookup: bool = True, null_row: Floats | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.draft_ids, self.max_context = engine, draft_ids, max_context
        capacity = max_context + TREE_ROWS
        self.keys = np.zeros((capacity, sa_kv_heads, row_shape.head_dim), np.float32)
        self.values = np.zeros_like(self.keys)
        self.cached: list[int] = []  # token ids whose keys and values stand in rows 0..len-1
        # The row of position p stands at p + 1; the slot before the first visible row takes the null row, so that
        # what cross-attention reads is one slice and nothing is copied.
        self.row_keys = np.zeros((1 + max_context, *row_shape), np.float32)
        self.row_values = np.zeros_like(self.row_keys)
        self.row_filled = np.zeros(max_context, bool)
        self.null_row = null_row  # [2 (K, V), kv_heads, head_dim], or None: the drafter has none
        self.lookup = Lookup() if lookup else None
        self._columns = np.full(int(draft_ids.max()) + 1, -1, np.int32)  # token id -> row of the LM head
        self._columns[draft_ids] = np.arange(len(draft_ids))

    def keep_rows(self, length: int) -> None:
        """Forget the rows of positions `length` and above: another text stands there now."""
        self.row_filled[length:] = False

    def add_rows(self, positions: Ints, rows: Floats) -> None:
        """Feature rows [n, 2, heads, head_dim] of the tokens at `positions` [n]."""
        self.row_keys[positions + 1], self.row_values[positions + 1] = rows[:, 0], rows[:, 1]
        self.row_filled[positions] = True

    def visible_rows(self) -> slice:
        """What cross-attention reads of row_keys and row_values: the null row and the newest rows.

        Rows count back to the first gap (the verifier sends newest first). A drafter without a null row reads
        one row of zeros until the first row is there.
        """
        filled = np.flatnonzero(self.row_filled)
        start = end = 0
        if len(filled):
            end = int(filled[-1]) + 1
            gaps = np.flatnonzero(~self.row_filled[:end])
            start = int(gaps[-1]) + 1 if len(gaps) else 0
            if self.null_row is None:
                return slice(start + 1, end + 1)
        self.row_keys[start], self.row_values[start] = (0.0, 0.0) if self.null_row is None else self.null_row
        return slice(start, end + 1)

    def _step(self, tokens: Ints, positions: Ints, wanted: Ints, mask: Floats, past: int) -> Floats:
        """Run the engine behind `past` cache rows; its keys and values land right behind them."""
        seen = self.visible_rows()
        logits, keys, values = self.engine.step(
            tokens, positions, wanted, mask, self.keys[:past], self.values[:past], self.row_keys[seen],
            self.row_values[seen],
        )  # fmt: skip
        self.keys[past : past + len(tokens)] = keys
        self.values[past : past + len(tokens)] = values
        return logits

    def _advance(self, prefix: list[int]) -> Floats:
        """Bring the cache to `prefix`; return the logits [draft_vocab] behind its last token."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.cached, prefix, strict=False)))
        kept = min(same, len(prefix) - 1)  # the last token's logits are needed in any case
        del self.cached[kept:]
        logits = np.zeros((1, 0), np.float32)
        for start in range(kept, len(prefix), PROMPT_CHUNK):
            chunk = np.array(prefix[start : start + PROMPT_CHUNK], np.int64)
            size = len(chunk)
            mask = np.zeros((size, start + size), np.float32)
            mask[:, start:] = np.triu(np.full((size, size), MASKED, np.float32), 1)
            positions = np.arange(start, start + size)
            logits = self._step(chunk, positions, np.array([size - 1]), mask, start)
            self.cached.extend(chunk.tolist())
        last: Floats = logits[0]
        return last

    def _log_q(self, logits: Floats, sampling: Sampling) -> NDArray[np.float64]:
        x = logits.astype(np.float64)
        if not sampling.greedy:
            x /= sampling.temperature
        x -= x.max(-1, keepdims=True)
        x -= np.log(np.exp(x).sum(-1, keepdims=True))
        return x

    def write(self, prefix: list[int], sampling: Sampling) -> int:
        """The drafter's own next token behind `prefix`, drawn with the noise the target would use."""
        score = self._log_q(self._advance(prefix), sampling)
        if not sampling.greedy:
            score = score + gumbel_noise_at(sampling.seed, len(prefix), self.draft_ids)
        return int(self.draft_ids[int(np.argmax(score))])

    def grow(
        self, prefix: list[int], sampling: Sampling, shape: TreeShape, stop: Callable[[], bool] = lambda: False
    ) -> TokenTree:
        """A draft tree of at most shape.nodes nodes below the last token of `prefix`.

        `stop()` is asked between levels; when true, what is there is returned.
        """
        room = self.max_context - len(prefix)
        depth = min(shape.depth, room)
        if depth < 1:
            return TokenTree()
        if self.lookup:
            self.lookup.follow(prefix)
        base = len(prefix)
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        slots: list[int] = []  # cache row of an expanded node, -1 for the others
        frontier: list[int] = [ROOT]
        logits = self._advance(prefix)[None]
        used = base
        for level in range(1, depth + 1):
            first = len(tokens)
            self._propose(frontier, logits, base + level - 1, sampling, shape.breadth, tokens, parents, scores)
            slots += [-1] * (len(tokens) - first)
            if level == depth or stop():
                break
            frontier = sorted(range(first, len(tokens)), key=lambda n: -scores[n])[: shape.breadth]
            if len(tokens) >= shape.nodes:
                worst = sorted(scores, reverse=True)[shape.nodes - 1]
                frontier = [n for n in frontier if scores[n] > worst]  # only these can still be kept
            if not frontier:
                break
            logits = self._expand(frontier, tokens, parents, slots, base, level, used)
            used += len(frontier)
        return self._best(tokens, parents, scores, shape.nodes)

    def _propose(
        self, frontier: list[int], logits: Floats, position: int, sampling: Sampling, breadth: int,
        tokens: list[int], parents: list[int], scores: list[float],
    ) -> None:  # fmt: skip
        """Append each frontier node's `breadth` best children; logits [frontier, draft_vocab]."""
        ids, ranked = self._candidates(frontier, logits, sampling, breadth, tokens, parents)
        if not sampling.greedy:
            ranked = ranked + gumbel_noise_at(sampling.seed, position, ids)
            ranked -= ranked.max(-1, keepdims=True)
            ranked -= np.log(np.exp(ranked).sum(-1, keepdims=True))
        best = np.argsort(-ranked, axis=1, kind="stable")[:, : min(breadth, len(self.draft_ids))]
        for row, parent in enumerate(frontier):
            base = scores[parent] if parent != ROOT else 0.0
            for column in best[row].tolist():
                tokens.append(int(ids[row, column]))
                parents.append(parent)
                scores.append(base + float(ranked[row, column]))

    def _candidates(
        self, frontier: list[int], logits: Floats, sampling: Sampling, breadth: int, tokens: list[int],
        parents: list[int],
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
        """Token ids and log-probabilities [frontier, candidates] of the likeliest tokens, lookup's guesses mixed in.

        A guess of hit rate w gets w, the drafter's law the rest. The last column is for guesses that are no candidates
        of the drafter, at probability 0 where there is none. Only candidates go through float64.
        """
        x = logits if sampling.greedy else logits / np.float32(sampling.temperature)
        high = x.max(-1, keepdims=True)
        total = high + np.log(np.exp(x - high).sum(-1, keepdims=True, dtype=np.float64))
        vocab = x.shape[1]
        count = min(breadth if sampling.greedy else max(breadth, CANDIDATES), vocab)
        columns = np.argpartition(x, vocab - count, axis=1)[:, vocab - count :]
        columns.sort(axis=1)  # so that equals keep the order of the vocabulary
        log_q = np.take_along_axis(x, columns, 1) - total
        ids = self.draft_ids[columns]
        if self.lookup is None:
            return ids, log_q
        ids = np.concatenate([ids, np.broadcast_to(self.draft_ids[:1], (len(frontier), 1))], 1)
        log_q = np.concatenate([log_q, np.full((len(frontier), 1), -np.inf)], 1)
        for row, node in enumerate(frontier):
            guess = self.lookup.guess(_path(node, tokens, parents))
            if guess is None:
                continue
            token, weight = guess
            log_q[row] += np.log1p(-weight)
            known = np.flatnonzero(ids[row, :-1] == token)
            if len(known):
                log_q[row, known[0]] = np.logaddexp(log_q[row, known[0]], np.log(weight))
                continue
            column = int(self._columns[token]) if token < len(self._columns) else -1
            own = np.log1p(-weight) + float(x[row, column] - total[row, 0]) if column >= 0 else -np.inf
            ids[row, -1], log_q[row, -1] = token, np.logaddexp(own, np.log(weight))
        return ids, log_q

    def _expand(
        self, frontier: list[int], tokens: list[int], parents: list[int], slots: list[int], base: int, level: int,
        used: int,
    ) -> Floats:  # fmt: skip
        """Run the engine on the frontier nodes; each sees the prefix, its ancestors and itself."""
        size = len(frontier)
        mask = np.full((size, used + size), MASKED, np.float32)
        mask[:, :base] = 0.0
        for row, node in enumerate(frontier):
            slots[node] = used + row
            while node != ROOT:
                mask[row, slots[node]] = 0.0
                node = parents[node]
        ids = np.array([tokens[n] for n in frontier], np.int64)
        positions = np.full(size, base + level - 1, np.int64)
        return self._step(ids, positions, np.arange(size), mask, used)

    @staticmethod
    def _best(tokens: list[int], parents: list[int], scores: list[float], limit: int) -> TokenTree:
        """The `limit` nodes of highest path probability, best first, so that a verifier that prunes cuts the rest.

        Scores fall along a path, so parents come along and stand before their children.
        """
        kept = sorted(range(len(tokens)), key=lambda n: (-scores[n], n))[:limit]
        place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        return TokenTree(tuple(tokens[n] for n in kept), tuple(place[parents[n]] for n in kept))


def _path(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    """The tokens from below the root down to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
