"""Hold an offline token until a reader has probably read the one before."""

from __future__ import annotations

from edge_runtime.session.actions import WriteToken

#: most seconds that a writer may lag behind a reader and then catch up
MADE_UP = 1.0


class _Reader:
    """Models a reader of offline text, at `rate` tokens per second, from the first token on.

    committed, provisional: verified tokens of the text, and unverified ones after them.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._committed = -1  # tokens of the text after which reading began ...
        self._began = 0.0  # ... at this time
        self._next = 0.0  # when another token would be read, anywhere

    def due(self, committed: int, provisional: int) -> float:
        """Return when the reader reaches the next token; that is past if other tokens stood there before."""
        return self._began + provisional / self._rate if committed == self._committed else self._next

    def shown(self, committed: int, provisional: int, now: float) -> None:
        """Note that another token is shown there."""
        came = now - provisional / self._rate  # a reader who is there now began then
        self._began = max(self._began, came - MADE_UP) if committed == self._committed else came
        self._committed, self._next = committed, now + 1 / self._rate


class ReadingPacer:
    """Holds at most one WriteToken until its time has come. The first one is not held."""

    def __init__(self, rate: float) -> None:
        self._reader = _Reader(rate)
        self._action: WriteToken | None = None
        self._place: tuple[int, int] | None = None  # where a paced token will stand, as in `_Reader`

    def hold(self, action: WriteToken, committed: int, paced: bool) -> None:
        """Hold `action`, whose token will follow `committed` verified ones and the provisional ones.

        Without `paced` it is due at once.
        """
        self._action = action
        self._place = (committed, len(action.prefix) - committed) if paced else None

    def wake_at(self) -> float | None:
        """Return when the token is due; None if none is held."""
        if self._action is None:
            return None
        return self._reader.due(*self._place) if self._place else 0.0

    def release(self, now: float, version: int) -> WriteToken | None:
        """Release the token to write now, if its time has come or `version` shows that it is stale."""
        action, due = self._action, self.wake_at()
        if action is None or due is None or (action.version == version and now < due):
            return None
        self._action = None
        if self._place and action.version == version:
            self._reader.shown(*self._place, now)
        return action
