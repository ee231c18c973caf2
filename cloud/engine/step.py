"""The record of one step: which sessions took part, what the target accepted, when it began and what it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloud.engine.acceptance import AcceptedPath
from cloud.engine.jobs import Job
from cloud.engine.scheduler import ScheduledSession


@dataclass(frozen=True)
class DraftCounts:
    """Trees of a step that somebody drafted, or that came of lookup in streams.

    sizes: nodes verified, per tree. sent: nodes before pruning. accepted: nodes accepted.
    """

    sizes: Sequence[int]
    sent: int
    accepted: int


@dataclass(frozen=True)
class Step:
    """A step that has run.

    paths: one per scheduled session, None for those without a tree. began: time.perf_counter() at its start.
    seconds: its duration.
    """

    scheduled: Sequence[ScheduledSession]
    paths: Sequence[AcceptedPath | None]
    began: float
    seconds: float

    def rounds(self) -> Iterator[tuple[ScheduledSession, Job, AcceptedPath]]:
        """The VERIFYs and GENERATEs that were run, each with its path. Look at them before they are answered."""
        for part, path in zip(self.scheduled, self.paths, strict=True):
            job = part.pending.round
            if path is not None and job is not None:
                yield part, job, path

    def drafts(self) -> DraftCounts:
        """How the drafted trees fared. Look at them before they are answered."""
        return self._counts(drafted=True)

    def lookups(self) -> DraftCounts:
        """The same of what streams' texts foretold."""
        return self._counts(drafted=False)

    def _counts(self, drafted: bool) -> DraftCounts:
        sizes, sent, accepted = list[int](), 0, 0
        for part, job, path in self.rounds():
            if part.drafted is drafted and part.tree is not None and (drafted or part.tree):
                sizes.append(len(part.tree))
                sent += len(job.tree) or len(part.tree)
                accepted += len(path.accepted)
        return DraftCounts(sizes, sent, accepted)

    def queue_seconds(self, job: Job) -> float:
        """How long `job` waited before the step began."""
        return max(0.0, self.began - job.waiting_since)
