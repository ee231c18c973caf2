"""A session on one connection, and its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloud.engine.jobs import Job

if TYPE_CHECKING:
    from cloud.server.connection import Connection


class Stream:
    """A session on this connection. session: the verifier's own id of it.

    opening and round: its jobs in the engine, an OPEN and a VERIFY or GENERATE. held: jobs that wait until the OPEN's
    constraint is ready, the OPEN first.
    """

    def __init__(self, connection: Connection, number: int, session: bytes) -> None:
        self.connection, self.number, self.session = connection, number, session
        self.opening: Job | None = None
        self.round: Job | None = None
        self.held: list[Job] = []

    def cancel(self) -> None:
        """Give up its jobs."""
        for job in (self.opening, self.round):
            if job is not None:
                job.cancelled = True
        self.opening = self.round = None
