"""Grow draft trees, and write single tokens when the link is down.

A tree grows in batches: the likeliest unexpanded nodes are run together, until no node can join the best ones any more
(docs/design.md). With sampling, candidates are ranked by log q + g with the verifier's own noise g, so the target's
draw is likely to be among them. Ranking can only cost speed: the output is the target's draw. Guesses from this text
and earlier ones (outrider_core.drafting.lookup) are mixed into q. Under an answer's constraint, q covers the allowed
tokens alone, and tokens that its grammar forces join the tree without a step of the engine
(outrider_core.drafting.guide). Spare rows of a step run likely continuations, so that many levels need no step of their
own (outrider_core.drafting.spare_rows).

A tree outlives its verdict. If the text continued along an expanded path, that path's cache rows become the text's, and
the nodes below it are the next tree already: growing on while the verdict is awaited is drafting ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider_core.drafting.bundle import Bundle
from outrider_core.drafting.candidates import Candidates
from outrider_core.drafting.engines import MASKED, Engine, Floats, Ints
from outrider_core.drafting.feature_rows import FeatureRows
from outrider_core.drafting.growth import Growth
from outrider_core.drafting.guide import FORCED, Guide
from outrider_core.drafting.lookup import Guess, Lookup
from outrider_core.drafting.row_cost import RowCost
from outrider_core.drafting.spare_rows import SEEN_RATE, SpareRow, least_score, spare_rows, with_spare_rows
from outrider_core.protocol.constraint import GRAMMAR_NONE, Rules
from outrider_core.protocol.noise import gumbel_noise_at
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree

#: cache rows kept free for the expanded nodes of one tree
TREE_ROWS = 512
#: nodes less likely than this are not expanded ahead of a verdict
AHEAD_FLOOR = float(np.log(0.0005))
#: most tokens in one step of the engine: breadth of a tree, chunk of a prompt (export writes for this many)
MAX_WIDTH = 64
#: factor on the depth of a tree if a grammar forces long runs
FORCED_DEPTH = 4
#: steps that are timed when a drafter is opened, and their width
TIMED_STEPS, TIMED_WIDTH = 4, 8
#: tokens of a prompt fed in one step: as fast as more, and attention's temporaries stay small
PROMPT_CHUNK = 32


@dataclass(frozen=True)
class TreeShape:
    """nodes: size of the tree sent; depth: levels drafted; breadth: most nodes expanded in one step.

    gain: accepted tokens that one more step must promise, and each of its nodes a share of them
    (`Growth.worth_expanding`); 0 drafts until the tree holds the likeliest nodes of all.
    """

    nodes: int = 32
    depth: int = 20
    breadth: int = 8
    gain: float = 0.05

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.breadth) < 1 or self.nodes > MAX_NODES:
            raise ValueError(f"a tree needs 1..{MAX_NODES} nodes and at least one level and one branch, not {self}")
        if self.breadth > MAX_WIDTH or self.depth * self.breadth > TREE_ROWS:
            raise ValueError(
                f"breadth must be at most {MAX_WIDTH} and depth x breadth at most {TREE_ROWS} tokens, not {self}"
            )


@dataclass(frozen=True)
class Draft:
    """A tree, the log probabilities of its nodes' paths, and its cost.

    steps: engine steps since it was requested. ahead: its root had been expanded ahead, with `kept` nodes below it.
    """

    tree: TokenTree = TokenTree()  # noqa: RUF009 - frozen
    scores: tuple[float, ...] = ()
    steps: int = 0
    ahead: bool = False
    kept: int = 0


class Drafter:
    """Drafting state of one conversation: self-attention cache and feature rows.

    row_cost: of the engine, as `RowCost.value`; None: it is learnt from the timing of the engine's steps. Not
    thread-safe: one thread calls it, in order.
    """

    def __init__(
        self,
        engine: Engine,
        draft_ids: NDArray[np.int64],
        row_shape: RowShape,
        sa_kv_heads: int,
        max_context: int,
        lookup: bool = True,
        null_row: Floats | None = None,
        confidence_temperature: float = 1.0,
        row_cost: float | None = None,
    ) -> None:
        self.engine, self.draft_ids, self.max_context = engine, draft_ids, max_context
        capacity = max_context + TREE_ROWS
        self.keys = np.zeros((capacity, sa_kv_heads, row_shape.head_dim), np.float32)
        self.values = np.zeros_like(self.keys)
        self.cached: list[int] = []  # token ids of the cache's rows
        self._growth: Growth | None = None  # below `cached`
        self._sampling = Sampling()  # its candidates were ranked for this, under the guide's rules
        self._guide: Guide | None = None
        self.steps = 0  # engine steps so far
        self.rows = FeatureRows(row_shape, max_context, null_row)
        self._candidates = Candidates(draft_ids, confidence_temperature)
        self.lookup = Lookup() if lookup else None
        self.row_cost = RowCost(row_cost)
        self._likeliest: dict[int, int] = {}  # token -> the likeliest next one when it was last expanded

    @classmethod
    def of(cls, bundle: Bundle, engine: Engine, lookup: bool = True, row_cost: float | None = None) -> Drafter:
        """Return a drafter for a bundle, on one of its engines."""
        manifest = bundle.manifest
        return cls(
            engine,
            bundle.draft_ids,
            bundle.row_shape,
            manifest.sa_kv_heads,
            manifest.max_context,
            lookup,
            bundle.null_row,
            manifest.confidence_temperature,
            row_cost,
        )

    def keep_rows(self, length: int) -> None:
        """Forget the rows of positions `length` and above, where the text differs now."""
        self.rows.keep(length)

    def remember(self, text: Sequence[int]) -> None:
        """Keep `text`, whose conversation is over, for lookup in later ones; without lookup nothing is kept."""
        if self.lookup:
            self.lookup.remember(text)
        else:
            self._likeliest = {}

    def forget(self) -> None:
        """Forget this text and earlier conversations: drafts no longer use them."""
        self._growth = None
        self._likeliest = {}
        if self.lookup:
            self.lookup.forget()

    def add_rows(self, positions: Ints, rows: Floats) -> None:
        """Add feature rows [n, 2, heads, head_dim] of the tokens at `positions` [n].

        Drafts made without any row are discarded: the verifier sends the first ones with an answer's first token.
        """
        if not self.rows.filled.any():
            self._growth = None
        self.rows.add(positions, rows)

    def _step(self, tokens: Ints, positions: Ints, wanted: Ints, mask: Floats, past: int) -> Floats:
        """Run the engine after `past` cache rows; its keys and values are stored right after them."""
        self.steps += 1
        cache = self.keys[:past], self.values[:past]
        visible, began = self.rows.visible(), time.perf_counter()
        logits, keys, values = self.engine.step(tokens, positions, wanted, mask, *cache, *visible)
        if len(wanted) == len(tokens):  # while reading a prompt, most of the LM head is skipped
            self.row_cost.took(len(tokens), time.perf_counter() - began)
        self.keys[past : past + len(tokens)] = keys
        self.values[past : past + len(tokens)] = values
        return logits

    def time_step(self) -> float:
        """Return the seconds of a step as a tree takes it: the fastest of a few, before any text was read."""
        tokens, seconds = self.draft_ids[np.arange(TIMED_WIDTH) % len(self.draft_ids)], list[float]()
        wanted, mask = np.arange(TIMED_WIDTH), np.full((TIMED_WIDTH, TIMED_WIDTH), MASKED, np.float32)
        np.fill_diagonal(mask, 0.0)  # children of one root
        for _ in range(TIMED_STEPS):
            began = time.perf_counter()
            nothing = self.keys[:0], self.values[:0], *self.rows.visible()
            self.engine.step(tokens, np.zeros_like(wanted), wanted, mask, *nothing)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def read(self, text: list[int]) -> None:
        """Read `text`, so that drafting after it begins at once."""
        self._advance(text)

    def _advance(self, prefix: list[int], spare: Sequence[SpareRow] = ()) -> Floats:
        """Bring the cache to `prefix`; return logits [1 + spare, draft_vocab] after its last token and spare rows.

        Discards the tree. The spare rows' keys and values follow the text's.
        """
        self._growth = None
        kept = self._kept(prefix)
        del self.cached[kept:]
        logits = np.zeros((1, 0), np.float32)
        for start in range(kept, len(prefix), PROMPT_CHUNK):
            chunk = np.array(prefix[start : start + PROMPT_CHUNK], np.int64)
            size = len(chunk)
            mask = np.zeros((size, start + size), np.float32)
            mask[:, start:] = np.triu(np.full((size, size), MASKED, np.float32), 1)
            last = start + size == len(prefix)
            tokens, positions, mask = with_spare_rows(
                chunk, np.arange(start, start + size), mask, 1, spare if last else ()
            )
            logits = self._step(tokens, positions, np.arange(size - 1, len(tokens)), mask, start)
            self.cached.extend(chunk.tolist())
        return logits

    def _kept(self, prefix: list[int]) -> int:
        """Return how many tokens of `prefix` need not be read again; the last one's logits are always needed."""
        return min(common_prefix(self.cached, prefix), len(prefix) - 1)

    def next_token(self, prefix: list[int], sampling: Sampling, rules: Rules | None = None) -> tuple[int, float]:
        """Draw the drafter's own next token after `prefix` with the target's noise; return it with its probability.

        rules: of its constraint. If they allow no token that the drafter knows, it is the first that they allow. Raises
        Disobeyed if they allow none.
        """
        logits: NDArray[np.floating] = self._advance(prefix)[0]
        if rules:
            known = 1 + max(int(self.draft_ids.max()), *prefix)  # written tokens may be outside its vocabulary
            changes = rules.adjusted(np.zeros(rules.vocab(known)), prefix)
            logits = logits + changes[self.draft_ids]
            if not np.isfinite(logits).any():
                return int(np.argmax(changes)), 0.0
        log_q = self._candidates.log_q(logits, sampling)
        noise = 0.0 if sampling.greedy else gumbel_noise_at(sampling.seed, len(prefix), self.draft_ids)
        best = int(np.argmax(log_q + noise))
        return int(self.draft_ids[best]), float(np.exp(log_q[best]))

    def draft(
        self,
        prefix: list[int],
        sampling: Sampling,
        shape: TreeShape,
        cancelled: Callable[[], bool] = lambda: False,
        rules: Rules | None = None,
    ) -> Draft:
        """Draft at most shape.nodes nodes below the last token of `prefix`.

        Once `cancelled`, asked between steps, the tree so far is returned. rules: constraint of the target's draws.
        """
        times = FORCED_DEPTH if rules and rules.constraint.grammar != GRAMMAR_NONE else 1
        depth = min(times * shape.depth, shape.nodes, self.max_context - len(prefix))
        if depth < 1:
            return Draft()
        if self.lookup:
            self.lookup.follow(prefix)
        steps = self.steps
        growth = self._reroot(prefix, sampling, rules)
        ahead = growth is not None
        if growth is None:
            growth = self._begin(prefix, sampling, rules, shape.breadth, depth)
        kept = sum(slot >= 0 for slot in growth.slots) if ahead else 0
        while not cancelled():
            worst = growth.worst_of_best(shape.nodes, depth)
            if not self._widen(growth, shape.breadth, depth, worst, shape.gain):
                break
        tree, scores = growth.best(shape.nodes, depth)
        return Draft(tree, tuple(scores), self.steps - steps, ahead, kept)

    def draft_ahead(self, shape: TreeShape, cancelled: Callable[[], bool]) -> int:
        """Grow the last tree below and beside the part that was sent, likeliest nodes first; return the nodes expanded.

        Path probabilities are those of the verdict, so most work goes where it is likeliest to end.
        """
        growth, done = self._growth, 0
        if growth is None:
            return 0
        depth = min(2 * shape.depth, self.max_context - growth.base)
        while not cancelled() and (expanded := self._widen(growth, shape.breadth, depth, AHEAD_FLOOR)):
            done += expanded
        return done

    def _reroot(self, prefix: list[int], sampling: Sampling, rules: Rules | None) -> Growth | None:
        """Return the existing tree below `prefix`, or None; the cache keeps what it can."""
        growth, base = self._growth, len(self.cached)
        if growth is None or sampling != self._sampling or prefix[:base] != self.cached:
            return None
        if rules is not (self._guide.rules if self._guide else None):
            return None
        path = growth.find(prefix[base:])
        path = path[: next((i for i, node in enumerate(path) if growth.slots[node] < 0), len(path))]
        if path:
            growth, rows = growth.below(path)
            self._move_rows(np.array(rows), base)
            self.cached += prefix[base : base + len(path)]
        self._growth = growth if len(self.cached) == len(prefix) else None
        return self._growth

    def _move_rows(self, rows: Ints, start: int) -> None:
        """Move cache rows `rows` to `start` and on."""
        for cache in (self.keys, self.values):
            cache[start : start + len(rows)] = cache[rows]

    def _begin(
        self, prefix: list[int], sampling: Sampling, rules: Rules | None = None, breadth: int = 1, depth: int = 1
    ) -> Growth:
        """Begin a tree of the root's children and predicted tokens: a step of `breadth` rows, down to level `depth`."""
        rows = (len(prefix) - self._kept(prefix) - 1) % PROMPT_CHUNK + 1
        spare = self._spare_rows([[]], [0.0], breadth - rows, depth, prefix)
        logits = self._advance(prefix, spare)
        self._growth, self._sampling = Growth(len(prefix)), sampling
        self._guide = Guide(rules, self.draft_ids, self._candidates.columns) if rules else None
        self._growth.used += len(spare)
        self._take(self._growth, [ROOT], spare, logits)
        return self._growth

    def _widen(self, growth: Growth, breadth: int, depth: int, floor: float, gain: float = 0.0) -> int:
        """Expand the next nodes; return how many, 0 if there is no room or they do not promise `gain`."""
        frontier = growth.frontier(min(breadth, len(self.keys) - growth.used), depth, floor)
        count = growth.worth_expanding(frontier, floor, gain)
        growth.put_back(frontier[count:])
        if not count:
            return 0
        frontier = frontier[:count]
        paths, scores = [growth.text(node) for node in frontier], [growth.scores[node] for node in frontier]
        room = min(breadth, len(self.keys) - growth.used) - count
        spare = self._spare_rows(paths, scores, room, depth, self.cached)
        return self._take(growth, frontier, spare, self._expand(growth, frontier, spare), floor)

    def _spare_rows(
        self, paths: Sequence[list[int]], scores: Sequence[float], most: int, depth: int, text: list[int]
    ) -> list[SpareRow]:
        """Return likely continuations of `text` and these paths that are worth a row of this engine."""
        return spare_rows(paths, scores, most, depth, partial(self._foretell, text), least_score(self.row_cost.value))

    def _foretell(self, text: list[int], path: list[int]) -> Guess | None:
        """Return lookup's guess after `text` and `path`, or the likeliest token after the same last token before."""
        guess = self.lookup.guess(path) if self.lookup else None
        seen = self._likeliest.get(path[-1] if path else text[-1])
        return guess if seen is None or (guess and guess.rate >= SEEN_RATE) else Guess(seen, SEEN_RATE)

    def _take(
        self, growth: Growth, frontier: list[int], spare: Sequence[SpareRow], logits: Floats, floor: float = -np.inf
    ) -> int:
        """Add a step's results: the children of the frontier's nodes, then of nodes that spare rows predicted.

        logits [frontier + spare, draft_vocab]; the spare rows' keys and values are the last ones of the cache.
        Predicted nodes of scores up to `floor` are not needed. Returns the nodes expanded.
        """
        count, row = len(frontier), growth.used - len(spare)
        self._propose(growth, frontier, logits[:count])
        nodes: list[int | None] = [*frontier]
        for place, (token, above) in enumerate(spare):
            parent = nodes[above]
            child = None if parent is None else growth.child(parent, token)
            if child is not None and (growth.slots[child] >= 0 or growth.scores[child] <= floor):
                child = None
            nodes.append(child)
            if child is not None:
                growth.slots[child] = row + place
                self._propose(growth, [child], logits[count + place : count + place + 1])
        return sum(node is not None for node in nodes)

    def _propose(self, growth: Growth, frontier: list[int], logits: Floats) -> None:
        """Add each frontier node's best children; logits [frontier, draft_vocab]."""
        guide = self._guide
        paths = [growth.text(node) for node in frontier]
        guesses = [self.lookup.guess(path) if self.lookup else None for path in paths]
        runs: list[list[int]] = [[] for _ in paths]
        if guide:
            given = zip(paths, logits, guesses, strict=True)
            ways = [guide.way(self.cached + path, row, guess) for path, row, guess in given]
            logits, runs = np.stack([way.logits for way in ways]), [way.run for way in ways]
            guesses = [way.guess for way in ways]
        positions = [growth.base + len(path) for path in paths]
        best = self._candidates.best(logits, guesses, positions, self._sampling)
        for parent, path, children, run in zip(frontier, paths, best, runs, strict=True):
            growth.add(parent, children.tokens, children.scores)
            if children.tokens:
                self._likeliest[[*self.cached[-1:], *path][-1]] = children.likeliest
            growth.hang(parent, run, float(np.log(FORCED)))

    def _expand(self, growth: Growth, frontier: list[int], spare: Sequence[SpareRow] = ()) -> Floats:
        """Run the engine on the frontier nodes and on spare rows; a node sees the text, its ancestors and itself."""
        size, base, past = len(frontier), growth.base, growth.used
        growth.used += size + len(spare)
        mask = np.full((size, past + size), MASKED, np.float32)
        mask[:, :base] = 0.0
        for row, node in enumerate(frontier):
            growth.slots[node] = past + row
            mask[row, [growth.slots[seen] for seen in growth.path(node)]] = 0.0
        ids = np.array([growth.tokens[n] for n in frontier], np.int64)
        positions = base - 1 + np.array([growth.depths[n] for n in frontier], np.int64)
        ids, positions, mask = with_spare_rows(ids, positions, mask, size, spare)
        return self._step(ids, positions, np.arange(len(ids)), mask, past)
