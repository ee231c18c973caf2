"""Messages that an answer waits for: link events and finished jobs of the drafter and the understudy."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.link.events import LinkEvent
from edge_runtime.session.session import Session
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.constraint import Rules


@dataclass(frozen=True)
class Drafted:
    """The tree of a DraftTree. asked, working: seconds since the request; seconds of these in the drafter."""

    session: Session
    draft: Draft
    version: int
    asked: float
    working: float


@dataclass(frozen=True)
class Written:
    """The token of a WriteToken and its probability. asked: seconds since the request."""

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
    """The understudy has read the text of a ReadText, or cancelled that; see there for `agreed`."""

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
    """The device's writers cannot obey the answer's constraint: `why`, in words for people."""

    session: Session
    why: str


@dataclass(frozen=True)
class Failed:
    """The answer cannot continue: the drafter's engine failed."""

    session: Session
    error: Exception


@dataclass(frozen=True)
class Woken:
    """Another call has changed the answer, and with it perhaps its deadlines."""


#: jobs carry the session that made them: it may have been cancelled since
InboxEvent = (
    LinkEvent | Drafted | Written | Compared | TextRead | UnderstudyFailed | RulesReady | Unsupported | Failed | Woken
)
