"""Apply an answer's constraint to drafting: forbidden tokens need not be proposed, as the target never draws them.

Biases, penalties and the grammar's mask change the drafter's logits before it ranks. If the grammar leaves a single
continuation, such as the name of a property, its tokens are known without a step of the engine. This affects speed
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_core.drafting.lookup import Guess
from outrider_core.protocol.constraint import Rules

#: probability of a token whose characters a grammar forces: the target may cut them into other tokens
FORCED = 0.95
#: most tokens of one forced run
LONGEST_RUN = 32


class Way(NamedTuple):
    """Possible continuations of a text. logits: float32 [draft_vocab], -inf for forbidden tokens, perhaps all.

    guess: the prediction from the text's repetitions, or the forced token. run: forced tokens, the first one guessed.
    """

    logits: NDArray[np.float32]
    guess: Guess | None
    run: list[int]


class Guide:
    """Guides a drafter that knows the tokens `draft_ids`, in this order. columns: token id -> index in them, or -1."""

    def __init__(self, rules: Rules, draft_ids: NDArray[np.int64], columns: NDArray[np.int32]) -> None:
        self.rules, self._draft_ids, self._columns = rules, draft_ids, columns

    def way(self, text: Sequence[int], logits: NDArray[np.float32], guess: Guess | None) -> Way:
        """Return how `text` may continue, given the drafter's `logits` and a guess from the text's own repetitions."""
        self.rules.follow(text)
        change = self.rules.adjustment()
        ruled = logits.copy()
        known = change.tokens < len(self._columns)
        columns = self._columns[change.tokens[known]]
        ruled[columns[columns >= 0]] += change.amounts[known][columns >= 0]
        if change.allowed is None:
            return Way(ruled, guess, [])
        allowed = change.mask(32 * len(change.allowed))
        assert allowed is not None
        ruled[~allowed[self._draft_ids]] = -np.inf
        if run := self.rules.forced()[:LONGEST_RUN]:
            return Way(ruled, Guess(run[0], FORCED, sure=True), run)
        return Way(ruled, guess if guess and allowed[guess.token] else None, [])
