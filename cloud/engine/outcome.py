"""The outcome of a step: its sessions, the accepted paths, its start and its duration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloud.engine.acceptance import AcceptedPath
from cloud.engine.request import EngineRequest
from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord


@dataclass(frozen=True)
class DraftCounts:
    """Counts of a step's trees: those of drafters, or those of lookup in streams.

    sizes: nodes verified, per tree. sent: nodes before pruning. accepted: nodes accepted.
    """

    sizes: Sequence[int]
    sent: int
    accepted: int


@dataclass(frozen=True)
class StepOutcome:
    """A step that has run.

    steps: the segments with a result, each with its path, None for those without a tree. began: time.perf_counter() at
    its start. seconds: its duration. retried: nothing could be drawn after lookup's guesses, but plain decoding would
    draw the tokens before. stuck: no token obeys the constraint. unusable: their logits were not numbers.
    """

    steps: Sequence[tuple[Segment, AcceptedPath | None]]
    began: float
    seconds: float
    retried: Sequence[SessionRecord]
    stuck: Sequence[SessionRecord]
    unusable: Sequence[SessionRecord]

    @classmethod
    def of(
        cls, segments: Sequence[Segment], paths: Sequence[AcceptedPath | None], began: float, seconds: float
    ) -> StepOutcome:
        """Sort the engine's results for these segments."""
        steps = list[tuple[Segment, AcceptedPath | None]]()
        retried, stuck, unusable = list[SessionRecord](), list[SessionRecord](), list[SessionRecord]()
        for segment, path in zip(segments, paths, strict=True):
            session = segment.session
            if path is None or not path.failed:
                steps.append((segment, path))
            elif segment.tree and not session.is_drafted:
                retried.append(session)
            elif session.followed and session.followed.broken:
                stuck.append(session)
            else:
                unusable.append(session)
        return cls(steps, began, seconds, retried, stuck, unusable)

    @property
    def wasted(self) -> bool:
        """Return whether the step failed for all of its sessions, so that the device may be broken."""
        return not (self.steps or self.retried or self.stuck)

    def rounds(self) -> Iterator[tuple[Segment, EngineRequest, AcceptedPath]]:
        """Yield the VERIFYs and GENERATEs that were run, each with its path. Use them before they are answered."""
        for segment, path in self.steps:
            request = segment.session.round
            if path is not None and request is not None:
                yield segment, request, path

    def drafts(self) -> DraftCounts:
        """Return the counts of drafted trees. Use them before they are answered."""
        return self._counts(drafted=True)

    def lookups(self) -> DraftCounts:
        """Return the counts of lookup's guesses in streams."""
        return self._counts(drafted=False)

    def _counts(self, drafted: bool) -> DraftCounts:
        sizes, sent, accepted = list[int](), 0, 0
        for segment, request, path in self.rounds():
            if request.is_drafted is drafted and (drafted or segment.tree):
                sizes.append(len(segment.tree))
                sent += len(request.tree) or len(segment.tree)
                accepted += len(path.accepted)
        return DraftCounts(sizes, sent, accepted)

    def queue_seconds(self, request: EngineRequest) -> float:
        """Return how long `request` waited before the step began."""
        return max(0.0, self.began - request.waiting_since)
