"""All that a session waits for, in one list: what, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edge_runtime.session.requests import Flight


class Deadline(StrEnum):
    """What is waited for, the most important first. `Session.tick` says what happens when its time has passed."""

    CONNECT = "connect"  #: the first link of an answer
    GIVE_UP = "give up"  #: the target's return, where nothing more can be written
    RETRY = "retry"  #: the moment that the verifier named when it refused a request
    REPLY = "reply"  #: the reply to a request
    RENEW = "renew"  #: any message at all, before another connection is made


@dataclass
class Deadlines:
    """Moments on the session's clock; None: not waited for. silence: seconds past a reply's deadline until RENEW."""

    silence: float
    connect: float | None = None
    give_up: float | None = None
    retry: float | None = None
    heard: float = 0.0  # when the link last said something

    @property
    def connecting(self) -> bool:
        """The answer waits for its first link."""
        return self.connect is not None

    def pending(self, flight: Flight | None, alone: bool) -> list[tuple[Deadline, float]]:
        """What is waited for beside `flight`. alone: its reply is overdue already."""
        moments = [(Deadline.CONNECT, self.connect), (Deadline.GIVE_UP, self.give_up), (Deadline.RETRY, self.retry)]
        if flight:
            moments.append((Deadline.REPLY, None if alone else flight.due))
            moments.append((Deadline.RENEW, max(self.heard, flight.due) + self.silence))
        return [(deadline, moment) for deadline, moment in moments if moment is not None]
