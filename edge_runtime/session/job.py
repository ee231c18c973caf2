"""The present job of drafter or understudy, and whether results are still wanted."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.session.states import Writer
from edge_runtime.speed.arms import Arm
from outrider_core.drafting.drafter import Draft


@dataclass
class JobSlot:
    """busy: the writer that has a job of this answer. ready: the tree or chain to send next, and which it is.

    version: of the request; the result of a job with another version is stale.
    """

    busy: Writer | None = None
    ready: tuple[Arm, Draft] | None = None
    version: int = 0

    def take(self, writer: Writer) -> int:
        """Give `writer` a job. Returns its version."""
        self.busy = writer
        return self.version

    def done(self) -> Writer | None:
        """Note that the job has ended. Returns whose it was."""
        writer, self.busy = self.busy, None
        return writer

    def cancel(self) -> None:
        """Mark the present job, if there is one, as no longer wanted."""
        self.version += 1

    def discard(self) -> None:
        """Also drop the tree to be sent next: the text has changed, or the way it is written."""
        self.version += 1
        self.ready = None
