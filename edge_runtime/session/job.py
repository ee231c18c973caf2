"""The one job under way, to draft or to write, and which results of jobs are still wanted."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.session.states import Writer
from outrider_core.drafting.drafter import Draft


@dataclass
class JobSlot:
    """busy: who has a job of this answer. ready: the tree to send next. version: of what is asked for; the result of a
    job of another version is stale."""

    busy: Writer | None = None
    ready: Draft | None = None
    version: int = 0

    def take(self, writer: Writer) -> int:
        """`writer` gets a job. Returns the version that it carries."""
        self.busy = writer
        return self.version

    def done(self) -> Writer | None:
        """The job has ended. Returns whose it was."""
        writer, self.busy = self.busy, None
        return writer

    def cancel(self) -> None:
        """The job under way, if there is one, is no longer wanted."""
        self.version += 1

    def discard(self) -> None:
        """Neither is the tree that was to be sent next: the text has changed, or the way it is written."""
        self.version += 1
        self.ready = None
