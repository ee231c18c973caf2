"""What a round takes, in seconds: the cost model behind the rate of every arm. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_core.protocol.costs import CostCurve

#: weight of the newest round in a smoothed measurement
SMOOTHING = 0.2
#: no duration is taken to be shorter, so that rates stay finite
LEAST_SECONDS = 1e-6


def blend(old: float | None, new: float, weight: float = SMOOTHING) -> float:
    return new if old is None else old + weight * (new - old)


@dataclass
class CostModel:
    """curve: as WELCOME advertised it; None: a step is taken to last a second, see `slowdown`. slowdown,
    token_slowdown: of steps for trees and for single tokens: measured time over advertised time. rtt: of a round,
    without the verifier's engine and queue. queue: of a round; as WELCOME has it until `queued` waits were measured.
    exposed: drafting between a tree's verdict and the next VERIFY.
    """

    curve: CostCurve | None = None
    slowdown: float | None = None
    token_slowdown: float | None = None
    rtt: float | None = None
    queue: float = 0.0
    queued: int = 0
    exposed: float = 0.0

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

    def measured(self, tokens: int, wait: float, engine: float, queue: float) -> None:
        """A round with a step of `tokens` tokens took `wait`, without drafting; engine, queue: the verifier's part."""
        self.stepped(tokens, engine)
        self.rtt = blend(self.rtt, max(0.0, wait - engine - queue))
        self.waited(queue)

    def waited(self, queue: float) -> None:
        """A request waited `queue` seconds in the verifier's queue."""
        self.queued += 1
        self.queue = blend(self.queue, queue, max(SMOOTHING, 1 / self.queued))

    def stepped(self, tokens: int, engine: float) -> None:
        """A step took `engine` seconds. The slowdowns of trees and of single tokens rise and fall together, but each
        keeps a level of its own: where the curve is wrong for one, the other must not be judged by it."""
        if engine <= 0:
            return
        own, other = (self.slowdown, self.token_slowdown) if tokens > 1 else (self.token_slowdown, self.slowdown)
        new = blend(own, engine / self.advertised(tokens))
        other = other if own is None or other is None else other * new / own
        self.slowdown, self.token_slowdown = (new, other) if tokens > 1 else (other, new)
