"""What each arm brings: tokens per second by what is known of it and by the cost model. Seconds and tokens.

A round of trees commits 1 + (sum of the sent nodes' acceptance probabilities) tokens. A chain of k tokens, each right
with probability a, commits (1 - a^(k+1)) / (1 - a). A stream commits one token per step, or several by lookup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from edge_runtime.speed.cost_model import LEAST_SECONDS, OUTLIER, PRIOR, SMOOTHING, USUAL, CostModel, blend
from outrider_core.protocol.tree import TokenTree

#: what an older observation still counts after one more
FADING = 0.98
#: levels of a tree that are calibrated separately; deeper ones count as the last
DEPTHS = 6
#: weight in what is usual of a streamed token: one says less than a round
USUAL_TOKEN = 0.01
#: weight of what a tree's nodes promised in the tokens that it is taken to bring, next to those that came true
PROMISED = 0.7
#: tokens that a round of trees is taken to bring before one was seen, and drafting steps that it takes; tokens that a
#: step of a stream is taken to bring if the verifier does not know
PRIOR_TAU, PRIOR_STEPS, PRIOR_STREAM = 3.0, 4, 1.25
#: nodes that are drafted in any case, and nodes drafted per node that was worth sending in earlier trees
LEAST_NODES, SPARE = 16, 2
#: tokens of a chain at most, and of the first, by which chains are known; how likely a token is taken to be right at
#: first, and at most
MOST_TOKENS, FIRST_TOKENS = 16, 4
PRIOR_RIGHT, MOST_RIGHT = 0.7, 0.99


class Arm(StrEnum):
    """How the device uses the target."""

    TREE = "tree"  #: to verify trees of the drafter
    CHAIN = "chain"  #: to verify chains of the understudy
    STREAM = "stream"  #: to write alone


@dataclass
class TreeArm:
    """Trees of the drafter. tau: tokens of a round, in this answer; usual_tau: in the answers so far, by so many
    `trees`. nodes: of a tree. step: seconds of a drafting step.
    """

    tau: float = PRIOR_TAU
    usual_tau: float = PRIOR_TAU
    trees: int = 0
    nodes: float = LEAST_NODES
    step: float | None = None
    #: accepted nodes by depth: as the drafter predicted them, and as they came
    predicted: list[float] = field(default_factory=lambda: [1.0] * (DEPTHS + 1))
    accepted: list[float] = field(default_factory=lambda: [1.0] * (DEPTHS + 1))

    def drafted(self, seconds: float, steps: int) -> None:
        """A tree was drafted."""
        if steps:
            self.step = blend(self.step, self.usual(seconds, steps) / steps)

    def usual(self, seconds: float, steps: int) -> float:
        """Of `seconds` that drafting in `steps` steps took, those that say something of the next round."""
        return min(seconds, OUTLIER * steps * self.step) if self.step else seconds

    def learn(self, tree: TokenTree, scores: Sequence[float], path: Sequence[int]) -> None:
        """Of `tree`, `path` came true. tau is what its nodes promise, calibrated: that varies less than luck."""
        self.nodes = blend(self.nodes if self.trees else None, len(tree))
        self.trees += 1
        tokens = 1.0 + len(path)
        if scores and len(scores) == len(tree):
            for known in (self.predicted, self.accepted):
                known[:] = [1 + FADING * (each - 1) for each in known]
            for depth, score in zip(tree.depths, scores, strict=True):
                self.predicted[min(depth, DEPTHS)] += math.exp(score)
            for depth in range(1, len(path) + 1):
                self.accepted[min(depth, DEPTHS)] += 1
            tokens += PROMISED * (float(self._expected(tree, scores)[-1]) - tokens)
        self.tau = blend(self.tau, tokens, max(SMOOTHING, 1 / (1 + self.trees)))
        self.usual_tau = blend(self.usual_tau, tokens, max(USUAL, 1 / (1 + self.trees)))

    def _expected(self, tree: TokenTree, scores: Sequence[float]) -> NDArray[np.float64]:
        """Tokens that the first 1, 2, ... nodes of `tree` promise, as far as promises were kept so far."""
        ratio = np.array(self.accepted) / np.array(self.predicted)
        depths = np.minimum(np.array(tree.depths), DEPTHS)
        tokens: NDArray[np.float64] = 1 + np.cumsum(np.minimum(1.0, np.exp(scores) * ratio[depths]))
        return tokens

    def rate(self, costs: CostModel) -> float:
        return self.tau / costs.round(self.nodes)

    def gain(self, costs: CostModel) -> float | None:
        """Accepted tokens that one more drafting step must promise to be worth its time; None: nothing tells."""
        return None if self.step is None else self.rate(costs) * self.step

    def worth_drafting(self) -> int:
        """Nodes to draft of the next tree, so that there is a choice of what to send."""
        return max(LEAST_NODES, math.ceil(SPARE * self.nodes))

    def worth_sending(self, tree: TokenTree, scores: Sequence[float], costs: CostModel) -> int:
        """Return how many nodes of `tree`, best first, make most tokens per second; scores: log path probabilities."""
        if not scores:
            return len(tree)
        times = np.array([costs.round(count) for count in range(1, len(tree) + 1)])
        return 1 + int(np.argmax(self._expected(tree, scores) / times))


@dataclass
class ChainArm:
    """Chains of tokens that the understudy drafts. While one is verified the understudy continues: it guesses the
    target's next token, and drafts behind it. If all of the chain was right, and so was the guess, that is kept.

    ready: the understudy has read along, and may draft. most: tokens that the verifier takes at most. token: seconds
    that the understudy takes for one; None: it has drafted none yet.
    """

    ready: bool = False
    most: int = MOST_TOKENS
    token: float | None = None
    right: float = PRIOR * PRIOR_RIGHT
    judged: float = PRIOR

    def drafted(self, tokens: int, seconds: float) -> None:
        """`tokens` were drafted in `seconds`."""
        if tokens:
            self.token = blend(self.token, seconds / tokens)

    def verified(self, tokens: int, accepted: int) -> None:
        """Of a chain of `tokens`, the first `accepted` were right."""
        for token in range(min(tokens, accepted + 1)):
            self.judged = 1 + FADING * self.judged
            self.right = (token < accepted) + FADING * self.right

    def best(self, costs: CostModel) -> tuple[int, float]:
        """(length of the chain that brings most tokens per second, these); FIRST_TOKENS, 0 where nothing is known."""
        if self.token is None:
            return FIRST_TOKENS, 0.0
        right = min(MOST_RIGHT, self.right / self.judged)
        length, rate = 1, 0.0
        for count in range(1, min(self.most, MOST_TOKENS) + 1):
            all_right = right ** (count + 1)
            waiting, drafting = costs.between + costs.step(count), count * self.token
            hidden = min(max(0.0, waiting - self.token), drafting)
            seconds = max(LEAST_SECONDS, waiting + drafting - all_right * hidden)
            tokens = (1 - all_right) / (1 - right)
            if tokens > rate * seconds:
                length, rate = count, tokens / seconds
        return length, rate


@dataclass
class StreamArm:
    """first: share of the tokens that begin a step, the others come of lookup; usual: in the answers so far, of so many
    `tokens`; at first as WELCOME has it. rest: seconds between tokens besides the engine.
    """

    first: float = 1.0
    usual: float = 1.0
    tokens: int = 0
    rest: float = 0.0

    def told(self, tokens: float) -> None:
        """WELCOME says that a step brings so many tokens; 0: the verifier does not know."""
        if not self.tokens:
            self.first = self.usual = 1 / max(1.0, tokens or PRIOR_STREAM)

    def came(self, gap: float, engine: float, same_step: bool) -> None:
        """A token came `gap` after the one before it. engine: 0: unknown. Many follow a late one at once."""
        early = 1 / (PRIOR + self.tokens)
        self.first = blend(self.first, not same_step, max(USUAL, early))
        self.usual = blend(self.usual, not same_step, max(USUAL_TOKEN, early))
        self.tokens += 1
        rest = min(gap - engine, OUTLIER * max(engine, self.rest)) if engine else gap
        self.rest = blend(self.rest, rest, max(USUAL_TOKEN, 1 / self.tokens))

    def rate(self, costs: CostModel) -> float | None:
        """Tokens per second; None where nothing is known."""
        if costs.curve is None and costs.token_slowdown is None and not self.tokens:
            return None
        return 1 / max(LEAST_SECONDS, self.first * costs.step(0) + max(0.0, self.rest))
