"""Events that an answer yields while it grows, and its final statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from edge_runtime.session.states import Writer
from edge_runtime.session.stats import SessionStats
from edge_runtime.session.transcript import Span
from outrider_core.protocol.ending import FinishReason


@dataclass(frozen=True)
class Event:
    """The text after this event: `verified` is the target's, `provisional` was written offline."""

    verified: str
    provisional: str


@dataclass(frozen=True)
class Verified(Event):
    """`tokens` joined the verified text; `confirmed` of them had been shown as provisional."""

    tokens: list[int]
    confirmed: int


@dataclass(frozen=True)
class Provisional(Event):
    """`writer`, the drafter or the understudy, wrote `token` offline; a later event verifies it or rolls it back."""

    token: int
    writer: Writer = Writer.DRAFTER


@dataclass(frozen=True)
class RolledBack(Event):
    """The last `count` provisional tokens were rolled back: the target, or the understudy, writes something else."""

    count: int


@dataclass(frozen=True)
class Adopted(Event):
    """`tokens`, written on the device alone, stay (`keep`): they are in `verified` now, although unverified."""

    tokens: list[int]


@dataclass(frozen=True)
class HandedOver(Event):
    """From here on `writer` writes offline. detail: why the understudy failed, if it did; else ""."""

    writer: Writer
    detail: str


class LinkStatus(StrEnum):
    """The state of the link, which decides who writes."""

    CONNECTING = "connecting"
    VERIFIED = "verified"  #: the target answers
    ALONE = "alone"  #: the device writes on
    WAITING = "waiting"  #: the target is silent and nothing is written


@dataclass(frozen=True)
class LinkState(Event):
    """The link's state has changed. detail: a line for people."""

    state: LinkStatus
    detail: str


@dataclass(frozen=True)
class Finished(Event):
    """The end of the answer, always its last event; stats: `AnswerStats`.

    detail: why the verifier or an engine did not write all of it, if so; else "". spans: who wrote which tokens.
    """

    reason: FinishReason
    token_ids: list[int]
    stats: AnswerStats
    detail: str = ""
    spans: list[Span] = field(default_factory=list)


@dataclass
class AnswerStats(SessionStats):
    """Figures of one answer. Seconds and bytes as measured; bytes count WebSocket frames of this answer."""

    tokens: int = 0  # verified
    tau: float = 0.0  # accepted + bonus tokens per tree round
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    first_token_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    draft_seconds: float = 0.0  # from requests for trees or tokens to their arrival
    first_draft_seconds: float = 0.0  # of that, the first one's, which includes reading the prompt
    ahead_seconds: float = 0.0  # drafting while a verdict was awaited
    ahead_nodes: int = 0  # expanded while a verdict was awaited
    #: per stall: seconds from the moment the verdict was due to the first provisional token
    stall_seconds: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
