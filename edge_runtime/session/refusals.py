"""What a verifier's refusals do to an answer: it waits, asks anew, or goes on alone. No text is lost by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_runtime.session.actions import Action
from edge_runtime.session.states import FinishReason
from outrider_core.protocol.wire import (
    ERR_BOUNDS,
    ERR_BUSY,
    ERR_GOING_AWAY,
    ERR_MALFORMED,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    Error,
)

if TYPE_CHECKING:
    from edge_runtime.session.session import Session

#: seconds that an answer waits at its end for a verifier that accepts it, where the last one dialled did not
REFUSED_SECONDS = 10.0
#: seconds until OPEN is sent again where the verifier names no time
RETRY_SECONDS = 1.0
SHORTEST_RETRY = 0.05


def take_error(session: Session, error: Error, now: float) -> list[Action]:
    """The verifier refused what it was asked last, or says that it ends."""
    if error.code == ERR_GOING_AWAY and error.stream == -1:
        return []  # what is under way is still answered; then the link goes down and comes up elsewhere
    if error.code == ERR_UNKNOWN:
        return ask_anew(session, now)
    if error.code == ERR_TOO_LONG:
        return session.finish(no_room(session))
    session.complaint = error.text
    session.requests.flight, session.deadlines.retry = None, None
    if error.code in (ERR_MALFORMED, ERR_BOUNDS):  # so it would be refused again
        session.refused = True
        expect_return(session, 0.0, now)
    else:
        advised = error.code in (ERR_BUSY, ERR_GOING_AWAY)
        wait = max(SHORTEST_RETRY, error.retry_after_ms / 1000) if advised else RETRY_SECONDS
        session.deadlines.retry = now + wait
    return session.go_on_alone(now, now)


def ask_anew(session: Session, now: float) -> list[Action]:
    """The verifier knows another text, or none: OPEN. Not at once where that has just been of no help."""
    if session.flight is None:
        return []  # what it says so of was given up: the OPEN before it was refused
    if not session.flight.after_open:
        return session.open(now)
    session.requests.flight, session.deadlines.retry = None, now + RETRY_SECONDS
    return session.go_on_alone(now, now)


def disobeyed(session: Session, now: float) -> list[Action]:
    """This link's verifier does not know the answer's constraint, and would pass over it: it is not asked."""
    session.refused, session.requests.flight = True, None
    session.deadlines.connect = session.deadlines.retry = None
    session.complaint = "this verifier cannot obey the answer's constraint; update it, or ask without one"
    expect_return(session, 0.0, now)
    return session.go_on_alone(now, now)


def expect_return(session: Session, seconds: float, now: float) -> None:
    """Where nothing more can be written, wait no longer than `seconds` for the target."""
    session.return_wait, deadlines = seconds, session.deadlines
    if deadlines.give_up is not None and not session.solo.paused:
        deadlines.give_up = min(deadlines.give_up, now + seconds)


def no_room(session: Session) -> FinishReason:
    """The verifier's context is full: what was written alone stays as it is."""
    session.complaint = f"the verifier's context holds {session.context} tokens; this conversation needs more"
    return FinishReason.UNVERIFIED if session.provisional else FinishReason.LENGTH
