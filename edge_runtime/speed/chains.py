"""Chains of tokens that the understudy drafts instead of the drafter's trees: how much they gain, and when to use one.

A chain of k tokens, each right with probability a, commits (1 - a^(k+1)) / (1 - a) tokens. While it is verified the
understudy continues: if all of it was right, and so was its guess of the target's next token, the next chain is ready
at once. Seconds throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: tokens of a chain at most, and of the first, by which chains are known
MOST_TOKENS, FIRST_TOKENS = 16, 4
#: tokens' worth of the belief that chains begin with, and how likely a token of theirs is taken to be right
PRIOR_TOKENS, PRIOR_RIGHT = 4.0, 0.7
#: what an older token still counts after one more
FADING = 0.98
#: no token is taken to be surer than this
MOST_RIGHT = 0.99
#: weight of the newest chain in what a token takes
SMOOTHING = 0.2
#: rounds of trees until chains that were not worth it are tried again: doubled each time, at most so many times
TRY_AGAIN, DOUBLINGS = 32, 4
#: no round is taken to be shorter, so that rates stay finite
LEAST_SECONDS = 1e-4
#: chains between two trees drafted beside them, for comparison
COMPARE_EVERY = 4


@dataclass
class Chains:
    """Smoothed measurements; they outlive answers. ready: the understudy has read along, and may draft. most: tokens
    that the verifier takes at most."""

    ready: bool = False
    most: int = MOST_TOKENS
    token: float | None = None  # seconds that the understudy takes for one; None: it has drafted none yet
    right: float = PRIOR_TOKENS * PRIOR_RIGHT
    judged: float = PRIOR_TOKENS
    tried: int = 0  # times that they were tried and not worth it
    waited: int = 0  # rounds since they were
    asked: int = 0  # chains so far

    @property
    def known(self) -> bool:
        """They were tried, so that `best` tells something."""
        return self.ready and self.most > 1 and self.token is not None

    def drafted(self, tokens: int, seconds: float) -> None:
        """`tokens` were drafted in `seconds`."""
        if tokens:
            each = seconds / tokens
            self.token = each if self.token is None else self.token + SMOOTHING * (each - self.token)

    def verified(self, tokens: int, accepted: int) -> None:
        """Of a chain of `tokens`, the first `accepted` were right."""
        for token in range(min(tokens, accepted + 1)):
            self.judged = 1 + FADING * self.judged
            self.right = (token < accepted) + FADING * self.right

    def best(self, between: float, step: Callable[[float], float]) -> tuple[int, float]:
        """(length of the chain that brings most tokens per second, these), once they are known.

        between: a round's time without drafting and the verifier's engine. step: that of a tree of so many nodes.
        """
        assert self.token is not None
        right = min(MOST_RIGHT, self.right / self.judged)
        length, rate = 1, 0.0
        for count in range(1, min(self.most, MOST_TOKENS) + 1):
            all_right = right ** (count + 1)
            waiting, drafting = between + step(count), count * self.token
            seconds = max(LEAST_SECONDS, waiting + drafting - all_right * min(waiting, drafting))
            tokens = (1 - all_right) / (1 - right)
            if tokens > rate * seconds:
                length, rate = count, tokens / seconds
        return length, rate

    def try_now(self) -> bool:
        """Return whether to try one in place of the next tree, as nothing is known of them, or not of late."""
        if not self.ready:
            return False
        self.waited += 1
        if self.token is not None and self.waited < TRY_AGAIN * 2 ** min(self.tried, DOUBLINGS):
            return False
        self.tried, self.waited = self.tried + (self.token is not None), 0
        return True

    def chosen(self) -> None:
        """They are worth it at present."""
        self.tried = self.waited = 0

    def compares(self) -> bool:
        """Return whether to draft a tree beside the chain that is asked for now."""
        self.asked += 1
        return self.asked % COMPARE_EVERY == 1
