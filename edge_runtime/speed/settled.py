"""A request to the verifier after its verdict: the request, its outcome and its duration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider_core.protocol.tree import TokenTree


class RequestKind(StrEnum):
    """What the device asks the target for."""

    TREE = "tree"  #: to verify a tree of the drafter
    CHAIN = "chain"  #: to verify a chain of the understudy
    CATCH_UP = "catch up"  #: to verify provisional text
    STREAM = "stream"  #: to write alone


class StreamClock(StrEnum):
    """What is known so far of a stream's time per token, from its verdicts."""

    SILENT = "silent"  #: no token has come
    UNTIMED = "untimed"  #: tokens have come, without a time
    FIRST = "first"  #: the first token told its step's time
    RUNNING = "running"  #: a later one did too


@dataclass(frozen=True)
class Settled:
    """Seconds throughout. tree: what was sent; empty for a stream. scores: log path probabilities of its nodes.
    accepted: node numbers of the accepted path. tokens: those of the path and the one that the target drew behind it.
    wait: since the request was sent, or since a stream's last token. engine, queue: the verifier's own part of it.
    ended: behind the tokens the answer has ended. after_open: the verifier may have had to read the whole text first.
    late: it came when it was overdue, so that an outage or a suspended device made it wait, not the verifier.
    clock: a stream's, before this token. same_step: a stream's token came of one step with the token before.
    """

    kind: RequestKind
    tree: TokenTree
    scores: tuple[float, ...]
    accepted: tuple[int, ...]
    tokens: list[int]
    wait: float
    engine: float
    queue: float
    ended: bool
    after_open: bool
    late: bool
    clock: StreamClock
    same_step: bool

    @property
    def drafted(self) -> bool:
        """The device drafted what was verified, so that its wait is a round's."""
        return self.kind in (RequestKind.TREE, RequestKind.CHAIN) and not self.after_open
