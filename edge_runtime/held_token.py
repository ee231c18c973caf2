"""Holds a token that is to be written alone until a reader can be expected to have read the one before."""

from __future__ import annotations

from edge_runtime.actions import WriteToken
from edge_runtime.session import Session


class HeldToken:
    """At most one WriteToken, held until its time has come. The first one is not held."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._action: WriteToken | None = None
        self._due = 0.0

    def hold(self, action: WriteToken) -> None:
        self._action = action

    def wake_at(self) -> float | None:
        """When the token is due; None where none is held."""
        return self._due if self._action else None

    def release(self, now: float) -> WriteToken | None:
        """The token to write now, if its time has come or nobody wants it any more; it is not held after that."""
        action, session = self._action, self._session
        if action is None:
            return None
        wanted = action.version == session.version
        if wanted and session.solo.may_be_taken_back and now < self._due:
            return None
        self._action = None
        if wanted:
            self._due = now + 1 / session.policy.offline_rate
        return action
