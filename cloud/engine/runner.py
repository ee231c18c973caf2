"""What an engine runs its target on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cloud.engine.acceptance import Chances
from outrider_core.protocol.constraint import Adjustment
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.part import Part


class Logits(Protocol):
    """The logits of a step's wanted tokens, wherever they lie."""

    def draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """Draw one token for each of `rows`, for absolute position positions[i]; a row may occur more than once.

        adjustments: made to each row first; (): none to any. `acceptance.NO_TOKEN` where a row holds something
        that is not a number, or no token is allowed.
        """

    def chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """For each of `rows` tokens[i] first, then the `top` likeliest tokens; of the softmax of the plain logits."""


class ModelRunner(Protocol):
    """Runs the target for an engine. It decides nothing: the engine says what to run and reads the logits.

    `rest` and `stop` do nothing unless a runner has something to do there.
    """

    def forward(self, parts: Sequence[Part]) -> Logits:
        """Run all parts, one of each session, in one step and write their keys and values behind each prefix.

        The logits are those of all wanted tokens, parts in order, in a part the root first.
        """

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pool rows over pool rows, in all layers. Sources and targets may overlap: sources are read first."""

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Any:
        """Keys and values of pool rows, an array or tensor [rows, layers, 2 * kv_heads * head_dim].

        Per head the key, then the value.
        """

    def rest(self) -> None:
        """Large steps are over for now: the next small one may give back what memory they alone took."""
        return

    def stop(self) -> None:
        """End what it started: other processes. Nothing is run after it."""
        return


class FeatureProducer(Protocol):
    """The drafter's server half: keys and values of the target's layers -> feature rows.

    shape: of a row. layers: the target's layers that it reads; none: it has no rows.
    """

    shape: RowShape
    layers: tuple[int, ...]

    def rows(self, kv: Any, positions: Sequence[int]) -> NDArray[np.float32]:
        """Rows [T, 2, heads, head_dim] of tokens at absolute `positions`; kv: from `ModelRunner.gather`, T > 0."""
