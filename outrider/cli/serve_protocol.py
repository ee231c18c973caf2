"""uvicorn's protocol with bounds that it lacks, so that strangers who say nothing lock nobody out."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

#: sockets that may be open; where there are more, the one that has asked nothing for longest is cut
MOST_SOCKETS = 64
#: seconds that a socket may take to the end of its next request's headers
HEAD_SECONDS = 30.0


class DeviceProtocol(H11Protocol):
    """Cuts sockets that ask nothing: after a while, and the oldest of them where there are too many."""

    _waits: asyncio.TimerHandle | None = None
    _since = 0.0

    @property
    def idle(self) -> bool:
        """Nobody waits for a reply on it."""
        return self.cycle is None or self.cycle.response_complete or self.transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()
        sockets = [cast(DeviceProtocol, one) for one in self.connections]
        there = [one for one in sockets if not one.transport.is_closing()]  # one that is cut stays listed for a while
        if len(there) > MOST_SOCKETS:
            oldest = min((one for one in there if one.idle), key=lambda one: one._since)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._stop_waiting()
        self._since = self.loop.time()
        self._waits = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _expire(self) -> None:
        if self.idle:
            self.transport.abort()
