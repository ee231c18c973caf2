"""Holds a token that is to be written alone until a reader can be expected to have read the one before."""

from __future__ import annotations

from edge_runtime.session.actions import WriteToken

#: seconds that a writer is behind a reader, at most, and makes up for
MADE_UP = 1.0


class _Reader:
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


class ReadingPacer:
    """At most one WriteToken, held until its time has come. The first one is not held."""

    def __init__(self, rate: float) -> None:
        self._reader = _Reader(rate)
        self._action: WriteToken | None = None
        self._place: tuple[int, int] | None = None  # where a paced token will stand, as of `_Reader`

    def hold(self, action: WriteToken, committed: int, paced: bool) -> None:
        """Hold `action`, whose token will stand behind `committed` verified ones and what is provisional; without
        `paced` it is due at once."""
        self._action = action
        self._place = (committed, len(action.prefix) - committed) if paced else None

    def wake_at(self) -> float | None:
        """When the token is due; None where none is held."""
        if self._action is None:
            return None
        return self._reader.due(*self._place) if self._place else 0.0

    def release(self, now: float, version: int) -> WriteToken | None:
        """The token to write now, if its time has come or it is stale, as jobs carry `version` now; from then on it
        is not held."""
        action, due = self._action, self.wake_at()
        if action is None or due is None or (action.version == version and now < due):
            return None
        self._action = None
        if self._place and action.version == version:
            self._reader.shown(*self._place, now)
        return action
