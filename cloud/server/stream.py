"""A session on one connection, and its requests."""

from __future__ import annotations

from collections.abc import Callable

from cloud.engine.request import EngineRequest


class Stream:
    """A session on this connection. session_id: the verifier's own id of it. leave(stream): disconnects it.

    opening and round: its requests to the engine, an OPEN and a VERIFY or GENERATE. held: requests that wait until the
    OPEN's constraint is ready, the OPEN first.
    """

    def __init__(self, number: int, session_id: bytes, leave: Callable[[Stream], None]) -> None:
        self.number, self.session_id, self.leave = number, session_id, leave
        self.opening: EngineRequest | None = None
        self.round: EngineRequest | None = None
        self.held: list[EngineRequest] = []

    def cancel(self) -> None:
        """Cancel its requests."""
        for request in (self.opening, self.round):
            if request is not None:
                request.cancelled = True
        self.opening = self.round = None
