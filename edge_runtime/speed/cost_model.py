"""What a round takes, in seconds: the cost model behind the rate of every arm. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_core.protocol.costs import CostCurve

#: weight of the newest round in a smoothed measurement, and in what is usual
SMOOTHING, USUAL = 0.2, 0.05
#: observations that a measurement begins with, if it was told or guessed
PRIOR = 4.0
#: what takes longer than usual counts as at most so many times it: a suspended device says nothing of the next round
OUTLIER = 3.0
#: no duration is taken to be shorter, so that rates stay finite
LEAST_SECONDS = 1e-6


def blend(old: float | None, new: float, weight: float = SMOOTHING) -> float:
    return new if old is None else old + weight * (new - old)


@dataclass
class CostModel:
    """curve: as WELCOME advertised it; None: a step is taken to last a second, see `slowdown`. slowdown,
    token_slowdown: of steps for trees and for single tokens: measured time over advertised time. rtt: of a round,
    without drafting and the verifier's engine: the usual one, of so many `rounds` since the link came up, because a
    lost packet is rare and takes long. queue: in the verifier, as WELCOME has it; once measured, `rtt` has it.
    exposed: drafting between a tree's verdict and the next VERIFY.
    """

    curve: CostCurve | None = None
    slowdown: float | None = None
    token_slowdown: float | None = None
    rtt: float | None = None
    queue: float = 0.0
    exposed: float = 0.0
    rounds: int = 0

    def advertised(self, tokens: float) -> float:
        """Seconds of a step of `tokens` tokens as the verifier advertised; it really takes `slowdown` times as long."""
        return max(LEAST_SECONDS, self.curve.at(tokens)) if self.curve else 1.0

    def step(self, nodes: float) -> float:
        """Seconds of the verifier's engine for a tree of `nodes` nodes; 0: for a token of a stream."""
        own, other = (self.slowdown, self.token_slowdown) if nodes else (self.token_slowdown, self.slowdown)
        return (own or other or (1.0 if self.curve else 0.0)) * self.advertised(1 + nodes)

    @property
    def between(self) -> float:
        """A round's time without drafting and the verifier's engine."""
        return (self.rtt or 0.0) + self.queue

    def round(self, nodes: float) -> float:
        """Seconds of a round with a tree of `nodes` nodes."""
        return max(LEAST_SECONDS, self.exposed + self.between + self.step(nodes))

    def measured(self, tokens: int, wait: float, engine: float) -> None:
        """A round with a step of `tokens` tokens took `wait`, without drafting; engine: the verifier's part."""
        self.stepped(tokens, engine)
        self.waited(wait - engine)

    def waited(self, seconds: float) -> None:
        """A round, or the way to a stream's first token, took `seconds` without drafting and the verifier's engine."""
        self.rounds, seconds = self.rounds + 1, max(0.0, seconds)
        if self.queue:  # what was told is replaced by the first measurement
            self.rtt, self.queue = min(seconds, OUTLIER * self.between), 0.0
        else:
            self.rtt = blend(self.rtt, seconds, max(USUAL, 1 / (PRIOR + self.rounds)))

    def stepped(self, tokens: int, engine: float) -> None:
        """A step took `engine` seconds. The slowdowns of trees and of single tokens rise and fall together, but each
        keeps a level of its own: where the curve is wrong for one, the other must not be judged by it."""
        if engine <= 0:
            return
        own, other = (self.slowdown, self.token_slowdown) if tokens > 1 else (self.token_slowdown, self.slowdown)
        new = blend(own, engine / self.advertised(tokens))
        other = other if own is None or other is None else other * new / own
        self.slowdown, self.token_slowdown = (new, other) if tokens > 1 else (other, new)
