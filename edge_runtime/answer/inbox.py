"""What an answer waits for: link events and finished jobs of the drafter and the understudy."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.link.websocket import LinkEvent
from edge_runtime.session.session import Session
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.constraint import Rules


@dataclass(frozen=True)
class Drafted:
    """The tree of a DraftTree. asked, working: seconds since it was asked for; of these, in the drafter."""

    session: Session
    draft: Draft
    version: int
    asked: float
    working: float


@dataclass(frozen=True)
class Written:
    """The token of a WriteToken and its probability. asked: seconds since it was asked for."""

    session: Session
    token: int
    probability: float
    version: int
    asked: float


@dataclass(frozen=True)
class Compared:
    """The tree of a Compare, below the first `base` tokens. working: seconds in the drafter."""

    session: Session
    draft: Draft
    base: int
    working: float


@dataclass(frozen=True)
class TextRead:
    """The understudy has read, or given up, the text of a ReadText; `agreed` as of that."""

    session: Session
    agreed: int | None


@dataclass(frozen=True)
class UnderstudyFailed:
    """The understudy cannot be used: `why`, in words for people."""

    session: Session
    why: str


@dataclass(frozen=True)
class RulesReady:
    """The rules for the answer's constraint are ready: for the drafter, for the understudy."""

    session: Session
    rules: tuple[Rules, Rules]


@dataclass(frozen=True)
class Unsupported:
    """The device's writers cannot be held to the answer's constraint: `why`, in words for people."""

    session: Session
    why: str


@dataclass(frozen=True)
class Failed:
    """The answer cannot go on: the drafter's engine failed."""

    session: Session
    error: Exception


@dataclass(frozen=True)
class Woken:
    """Somebody has asked something of the answer: what it waits for may be due otherwise."""


#: jobs carry the session that asked: it may have been cancelled since
InboxEvent = (
    LinkEvent | Drafted | Written | Compared | TextRead | UnderstudyFailed | RulesReady | Unsupported | Failed | Woken
)
