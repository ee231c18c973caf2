"""An answer's constraint where trees are drafted: the target draws under it, so what it forbids need not be proposed.

Biases, penalties and the grammar's mask change the drafter's logits before it ranks. Where the grammar leaves one way
to go on, such as the name of a property, those tokens are known without a step of the engine. This is speed only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_core.drafting.lookup import Guess
from outrider_core.protocol.constraint import Rules

#: probability of a token that a grammar forces by its characters: the target may cut these into other tokens
FORCED = 0.95
#: tokens of one forced run at most
LONGEST_RUN = 32


class Way(NamedTuple):
    """Possible continuations of a text. logits: float32 [draft_vocab], -inf for what is forbidden, perhaps everything.

    guess: what the text's repetitions predict, or what must come. run: tokens that must come, the first one guessed.
    """

    logits: NDArray[np.float32]
    guess: Guess | None
    run: list[int]


class Guide:
    """For a drafter that knows the tokens `draft_ids`, in this order. columns: token id -> place among these, or -1."""

    def __init__(self, rules: Rules, draft_ids: NDArray[np.int64], columns: NDArray[np.int32]) -> None:
        self.rules, self._draft_ids, self._columns = rules, draft_ids, columns

    def way(self, text: Sequence[int], logits: NDArray[np.float32], guess: Guess | None) -> Way:
        """Return how `text` goes on, where the drafter gives `logits` and the text's own repetitions a guess."""
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
