"""Holds a token that is to be written alone until a reader can be expected to have read the one before."""

from __future__ import annotations

from edge_runtime.session.actions import WriteToken
from edge_runtime.session.session import Session

#: seconds that a writer is behind a reader, at most, and makes up for
MADE_UP = 1.0


class Reader:
    """Somebody who reads what is written alone, at `rate` tokens per second, from the first token on.

    committed, provisional: tokens of the text that are verified, and unverified ones behind them.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._committed = -1  # tokens of a text, behind which reading ...
        self._began = 0.0  # ... began then
        self._next = 0.0  # when another token would be read, wherever it stands

    def due(self, committed: int, provisional: int) -> float:
        """When the reader comes to where the next token will stand; that is over where others stood there before."""
        return self._began + provisional / self._rate if committed == self._committed else self._next

    def shown(self, committed: int, provisional: int, now: float) -> None:
        """Another token stands there."""
        came = now - provisional / self._rate  # who was there just now began then
        self._began = max(self._began, came - MADE_UP) if committed == self._committed else came
        self._committed, self._next = committed, now + 1 / self._rate


class HeldToken:
    """At most one WriteToken, held until its time has come. The first one is not held."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._action: WriteToken | None = None
        self._reader = Reader(session.policy.offline_rate)

    def hold(self, action: WriteToken) -> None:
        self._action = action

    def wake_at(self) -> float | None:
        """When the token is due; None where none is held."""
        if self._action is None:
            return None
        return self._reader.due(len(self._session.committed), len(self._session.provisional))

    def release(self, now: float) -> WriteToken | None:
        """The token to write now, if its time has come or nobody wants it any more; it is not held after that."""
        action, session, due = self._action, self._session, self.wake_at()
        if action is None or due is None:
            return None
        paced = action.version == session.version and session.solo.may_be_taken_back
        if paced and now < due:
            return None
        self._action = None
        if paced:
            self._reader.shown(len(session.committed), len(session.provisional), now)
        return action
