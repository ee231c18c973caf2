"""Counts that a session keeps of its answer."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.session.settled import Settled
from edge_runtime.speed.arms import Arm
from outrider_core.drafting.drafter import Draft


@dataclass
class SessionStats:
    """Counts of one answer; seconds are as the driver measured them."""

    rounds: int = 0  # tree rounds with a verdict, catch-up rounds not counted
    accepted: int = 0  # draft tokens accepted in these rounds
    nodes: int = 0  # nodes sent in these rounds
    chains: int = 0  # of these rounds, those with a chain that the understudy drafted
    chained: int = 0  # tokens accepted in them
    catch_up_rounds: int = 0
    calls: int = 0  # VERIFY and GENERATE sent
    streamed: int = 0  # tokens that the target wrote by itself (GENERATE)
    wait_seconds: float = 0.0  # between VERIFY and its verdict, rounds of drafted trees only
    engine_seconds: float = 0.0  # of that, the verifier's engine
    ahead_rounds: int = 0  # trees whose root could have been expanded ahead
    ahead_hits: int = 0  # trees whose root had been
    ahead_used: int = 0  # nodes that had been expanded ahead below such a root
    provisional: int = 0  # tokens written offline
    understudy: int = 0  # of these, by the understudy
    kept: int = 0  # of these, verified later
    rolled_back: int = 0
    adopted: int = 0  # of these, kept unverified (`keep`)
    stalls: int = 0
    pauses: int = 0
    opens: int = 0

    def drafted(self, arm: Arm, draft: Draft) -> None:
        """Count a drafted tree. The first one of an answer could not be drafted ahead."""
        if self.rounds and arm is Arm.TREE:
            self.ahead_rounds += 1
            self.ahead_hits += draft.ahead
            self.ahead_used += draft.kept

    def settled(self, settled: Settled, fresh: int, catching_up: bool) -> None:
        """Count a verdict with `fresh` tokens. catching_up: provisional text followed it."""
        if settled.arm is Arm.STREAM:
            self.streamed += fresh
            return
        if settled.drafted:
            self.wait_seconds += settled.wait
            self.engine_seconds += settled.engine
        if catching_up:
            self.catch_up_rounds += 1
        else:
            self.rounds += 1
            self.chains += settled.arm is Arm.CHAIN
            self.chained += fresh - 1 if settled.arm is Arm.CHAIN else 0
            self.accepted += fresh - 1
            self.nodes += len(settled.tree)
