"""Rank possible children of a tree's nodes: the drafter's distribution, lookup's guess and the noise of the draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_core.drafting.engines import Floats
from outrider_core.drafting.lookup import SUREST, Guess
from outrider_core.protocol.noise import gumbel_noise_at
from outrider_core.protocol.sampling import Sampling

#: children kept of an expanded node: at least the first number, up to the second if a verdict is likely to end there
LEAST_CHILDREN, CHILDREN = 16, 64
LIKELY_CHILD = float(np.log(0.002))
#: likeliest tokens of a node that noise may reorder; less likely ones are left out
CANDIDATES = 512


class Children(NamedTuple):
    """The best children of a node, best first, and their log-probabilities among its candidates, given the noise.

    likeliest: the first token before noise is added.
    """

    tokens: list[int]
    scores: list[float]
    likeliest: int


class Candidates:
    """Ranks for a drafter that knows the tokens `draft_ids` [draft_vocab].

    confidence_temperature: divisor of its logits in greedy decoding.
    """

    def __init__(self, draft_ids: NDArray[np.int64], confidence_temperature: float) -> None:
        self._draft_ids, self._confidence_temperature = draft_ids, confidence_temperature
        #: token id -> row of the LM head, or -1
        self.columns = np.full(int(draft_ids.max()) + 1, -1, np.int32)
        self.columns[draft_ids] = np.arange(len(draft_ids))

    def temperature(self, sampling: Sampling) -> float:
        """Return the divisor of logits; for greedy decoding, probabilities then tell how often a token is chosen."""
        return self._confidence_temperature if sampling.greedy else sampling.temperature

    def log_q(self, logits: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float64]:
        """Return log-probabilities [..., draft_vocab] of logits of that shape."""
        x = logits.astype(np.float64) / self.temperature(sampling)
        x -= x.max(-1, keepdims=True)
        x -= np.log(np.exp(x).sum(-1, keepdims=True))
        return x

    def best(
        self, logits: Floats, guesses: Sequence[Guess | None], positions: Sequence[int], sampling: Sampling
    ) -> list[Children]:
        """Return the best children of each node, from logits [nodes, draft_vocab], lookup's guesses and positions.

        Tokens of logit -inf are left out.
        """
        ids, scores = self._ranked(guesses, logits, sampling)
        likeliest = ids[np.arange(len(ids)), scores.argmax(1)]
        if not sampling.greedy:
            for row, position in enumerate(positions):
                scores[row] += gumbel_noise_at(sampling.seed, position, ids[row])
            scores -= _log_sum_exp(scores)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : min(CHILDREN, len(self._draft_ids))]
        ids, scores = np.take_along_axis(ids, best, 1), np.take_along_axis(scores, best, 1)
        scores = np.minimum(scores, 0.0)  # rounding may raise a certain token above that
        counts = np.maximum(LEAST_CHILDREN, np.count_nonzero(scores > LIKELY_CHILD, axis=1))
        counts = np.minimum(counts, np.count_nonzero(scores > -np.inf, axis=1))
        return [
            Children(ids[row, :count].tolist(), scores[row, :count].tolist(), int(likeliest[row]))
            for row, count in enumerate(counts.tolist())
        ]

    def _ranked(
        self, guesses: Sequence[Guess | None], logits: Floats, sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return token ids and log-probabilities [nodes, candidates] of the likeliest tokens, guesses included.

        A guess gets the probability of `Guess.probability`, the drafter's other tokens share the rest. The last column
        is for guesses that are not candidates of the drafter, at probability 0 if there is none. Only candidates are
        converted to float64.
        """
        x = logits / np.float32(self.temperature(sampling))
        total = _log_sum_exp(x)
        vocab = x.shape[1]
        count = min(CHILDREN if sampling.greedy else CANDIDATES, vocab)
        columns = np.argpartition(x, vocab - count, axis=1)[:, vocab - count :]
        columns.sort(axis=1)  # ties keep the order of the vocabulary
        log_q = np.take_along_axis(x, columns, 1) - total
        ids = self._draft_ids[columns]
        if not any(guesses):
            return ids, log_q
        ids = np.concatenate([ids, np.broadcast_to(self._draft_ids[:1], (len(guesses), 1))], 1)
        log_q = np.concatenate([log_q, np.full((len(guesses), 1), -np.inf)], 1)
        for row, guess in enumerate(guesses):
            if guess is None:
                continue
            column = int(self.columns[guess.token]) if guess.token < len(self.columns) else -1
            q = float(np.exp(x[row, column] - total[row, 0])) if column >= 0 else None
            p = guess.probability(q)
            known = np.flatnonzero(ids[row, :-1] == guess.token)
            at = int(known[0]) if len(known) else count
            log_q[row] += np.log1p(-p) - np.log1p(-min(SUREST, q or 0.0))
            ids[row, at], log_q[row, at] = guess.token, np.log(p)
        return ids, log_q


def _log_sum_exp(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return [rows, 1] of x [rows, n]; 0 for a row of -inf alone."""
    high = x.max(-1, keepdims=True)
    high = np.where(high > -np.inf, high, x.dtype.type(0))
    sums: NDArray[np.float64] = np.exp(x - high).sum(-1, keepdims=True, dtype=np.float64)
    total: NDArray[np.float64] = high + np.log(np.where(sums > 0, sums, 1.0))
    return total
