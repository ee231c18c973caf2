"""`cloud.engine.runner.ModelRunner` over a server's likeliest tokens: a pool row holds only a token id."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloud.engine.acceptance import Chances
from cloud.engine.drawing import HostLogits
from cloud.engine.runner import ModelRunner
from cloud.upstream_engine.client import Scored, TopRow, Upstream
from outrider_core.protocol.constraint import Adjustment
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.part import Part

#: requests to the server at a time
CONNECTIONS = 32
#: tokens that the server may write beyond the one that a stream needs next
MOST_AHEAD = 16


class TopLogits:
    """`cloud.engine.runner.Logits` of which only the likeliest tokens are known, by their log probabilities.

    Draws are exact for greedy decoding, and if top_k cuts off the unknown tokens.
    """

    def __init__(self, rows: Sequence[TopRow], vocab_size: int) -> None:
        self._rows, self._vocab_size = rows, vocab_size

    def draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """See Logits.draw."""
        values = np.full((len(rows), self._vocab_size), -np.inf)
        for index, row in enumerate(rows):
            values[index, list(self._rows[row])] = list(self._rows[row].values())
        return HostLogits(values).draw(range(len(rows)), samplings, positions, adjustments)

    def chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """See Logits.chances; at most as many tokens as are known."""
        ordered = [sorted(self._rows[row].items(), key=lambda each: (-each[1], each[0])) for row in rows]
        first = [(token, self._rows[row][token]) for row, token in zip(rows, tokens, strict=True)]
        return [[told, *best[:top]] for told, best in zip(first, ordered, strict=True)]


class _Ahead(NamedTuple):
    """The server's continuation of `text`."""

    text: list[int]
    scored: Scored


class UpstreamRunner(ModelRunner):
    """Scores each root-to-leaf path of a step's trees, all at once, and lets streams be written a few tokens ahead."""

    def __init__(self, server: Upstream, rows: int) -> None:
        self._server = server
        self._tokens = np.zeros(rows, np.int32)
        self._threads = ThreadPoolExecutor(CONNECTIONS, "upstream")
        self._ahead: dict[int, _Ahead] = {}  # by first pool row of a session

    def forward(self, parts: Sequence[Part]) -> TopLogits:
        """See ModelRunner.forward. Raises UpstreamError."""
        asked = list[tuple[list[int], Future[Scored]]]()  # the rows of the step that each request returns
        known, count = dict[int, TopRow](), 0
        streams = list[tuple[int, list[int], Future[Scored]]]()
        for part in parts:
            begin = part.base + part.past
            self._tokens[begin : begin + len(part)] = (*part.chain, *part.tree.tokens)
            if not part.wanted:
                continue
            text: list[int] = self._tokens[part.base : begin + len(part.chain)].tolist()
            root, count = count, count + 1 + len(part.tree)
            if part.tree:
                asked += self._scored(part, text, root)
            elif row := self._written(part.base, text):
                known[root] = row
            else:
                streams.append(
                    (part.base, text, self._threads.submit(self._server.score, text, 1, self._next(part.base, text)))
                )
                asked.append(([root], streams[-1][2]))
        for rows, future in asked:
            known |= zip(rows, future.result().rows, strict=False)  # a stream's first row alone
        for base, text, future in streams:
            self._ahead[base] = _Ahead(text, future.result())
        return TopLogits([known.get(row, {}) for row in range(count)], self._server.vocab_size)

    def _scored(self, part: Part, text: list[int], root: int) -> list[tuple[list[int], Future[Scored]]]:
        """Request a tree's rows, each once. Nodes past the server's longest text are never drawn from."""
        asked, seen, room = list[tuple[list[int], Future[Scored]]](), set[int](), self._server.positions - 1 - len(text)
        for leaf in range(len(part.tree)):
            if part.tree.children[leaf + 1]:
                continue
            path = part.tree.path(leaf)[: max(0, room)]
            rows = [root + 1 + node for node in path if node not in seen]
            if not seen and not asked:
                rows.insert(0, root)
            seen.update(path)
            if rows:
                tokens = [*text, *(part.tree.tokens[node] for node in path)]
                asked.append((rows, self._threads.submit(self._server.score, tokens, len(rows), 1)))
        return asked

    def _written(self, base: int, text: list[int]) -> TopRow | None:
        """Return the row after a text that continues as the server wrote it ahead."""
        held = self._ahead.get(base)
        more = len(text) - len(held.text) if held else 0
        if held and 0 < more < len(held.scored.rows) and text == [*held.text, *held.scored.written[:more]]:
            return held.scored.rows[more]
        return None

    def _next(self, base: int, text: list[int]) -> int:
        """Return how many tokens to request: twice as many as before, if those were right."""
        held, room = self._ahead.get(base), self._server.positions - len(text)
        follows = held is not None and text == [*held.text, *held.scored.written]
        return max(1, min(2 * len(held.scored.written), MOST_AHEAD, room)) if held and follows else 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        self._tokens[list(targets)] = self._tokens[list(sources)]

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> NDArray[np.float32]:
        """See ModelRunner.gather; no layer has keys and values here."""
        return np.empty((len(rows), 0, 0), np.float32)

    def stop(self) -> None:
        """See ModelRunner.stop."""
        self._threads.shutdown(wait=False, cancel_futures=True)
