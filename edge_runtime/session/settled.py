"""A request to the verifier after its verdict: its outcome and its duration."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.speed.arms import Arm
from outrider_core.protocol.tree import TokenTree


@dataclass(frozen=True)
class Settled:
    """Seconds throughout. arm: None: provisional text was verified. tree: what was sent; empty for a stream. scores:
    log path probabilities of its nodes. accepted: node numbers of the accepted path. tokens: those of the path and the
    one that the target drew behind it. wait: since the request was sent, or since a stream's last token. engine: the
    verifier's own part of it. ended: behind the tokens the answer has ended. after_open: the verifier may have had
    to read the whole text first. late: it came when it was overdue, so that an outage or a suspended device made it
    wait, not the verifier. same_step: a stream's token came of one step with the token before. asked_for: a stream's
    token came of its first step, which had to be asked for.
    """

    arm: Arm | None
    tree: TokenTree
    scores: tuple[float, ...]
    accepted: tuple[int, ...]
    tokens: list[int]
    wait: float
    engine: float
    ended: bool
    after_open: bool
    late: bool
    same_step: bool
    asked_for: bool

    @property
    def drafted(self) -> bool:
        """The device drafted what was verified, so that its wait is a round's."""
        return self.arm in (Arm.TREE, Arm.CHAIN) and not self.after_open
