"""Interfaces between an engine and what runs its target."""

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
    """The logits of a step's wanted tokens, on any device."""

    def draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """Draw one token for each of `rows`, for absolute position positions[i]; a row may occur more than once.

        adjustments: applied to each row first; (): none to any. `acceptance.NO_TOKEN` if a row holds something that is
        not a number, or no token is allowed.
        """

    def chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """Return for each of `rows` tokens[i], then the `top` likeliest tokens; by the softmax of plain logits."""


class ModelRunner(Protocol):
    """Runs the target for an engine. It decides nothing: the engine says what to run and reads the logits.

    `rest` and `stop` do nothing unless a runner overrides them.
    """

    def forward(self, parts: Sequence[Part]) -> Logits:
        """Run all parts, one of each session, in one step and write their keys and values after each prefix.

        Returns logits of all wanted tokens: parts in order, in each part the root first.
        """

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pool rows over pool rows, in all layers. Sources and targets may overlap: sources are read first."""

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Any:
        """Return keys and values of pool rows, an array or tensor [rows, layers, 2 * kv_heads * head_dim].

        Per head the key, then the value.
        """

    def rest(self) -> None:
        """Note that large steps are over for now: the next small one may give back their memory."""
        return

    def stop(self) -> None:
        """End other processes that it started. Nothing is run after it."""
        return


class FeatureProducer(Protocol):
    """The drafter's server half: keys and values of the target's layers -> feature rows.

    shape: of a row. layers: the target's layers that it reads; none: it has no rows.
    """

    shape: RowShape
    layers: tuple[int, ...]

    def rows(self, kv: Any, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return rows [T, 2, heads, head_dim] of tokens at absolute `positions`; kv: `ModelRunner.gather`'s, T > 0."""
