"""The engine: one ragged forward of the target for all scheduled sessions, then acceptance and feature rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from cloud.engine.acceptance import AcceptedPath, RootedTree, accept_paths
from cloud.engine.kvpool import KVPool
from cloud.engine.masks import STEP_SECONDS, FollowedRules, Masks
from cloud.engine.runner import FeatureProducer, Logits, ModelRunner
from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord
from outrider_core.protocol.rows import pack_rows


class TargetEngine:
    """Runs steps on a target; one thread at a time. A session's result does not depend on its neighbours."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: KVPool,
        producer: FeatureProducer,
        eos_ids: Iterable[int],
        max_context: int,
    ) -> None:
        self.runner, self.pool, self.producer = runner, pool, producer
        self.eos_ids, self._max_context = frozenset(eos_ids), max_context
        self.masks, self.mask_seconds = Masks(), STEP_SECONDS

    def step(self, segments: Sequence[Segment]) -> list[AcceptedPath | None]:
        """Run all segments, for which the pool must hold rows. Returns a path per segment, None for a prefill chunk.

        Sessions change only if everything succeeded: their tokens, feature rows and used pool rows grow. A session
        whose path has `failed` does not change. A segment whose constraint came too late counts as the prefill chunk in
        it.
        """
        for segment in segments:
            if segment.wanted and (rules := self.followed(segment.session)):
                rules.begin(segment.session.tokens)  # while the target runs
        logits = self.forward(segments)
        paths = self.accept(segments, logits, time.monotonic() + self.mask_seconds)
        self._compact(segments, paths)
        used = [
            each.past + len(each.chain) - each.wanted
            if path is None
            else each.past
            if path.failed
            else each.past + len(each.chain) + len(path.accepted)
            for each, path in zip(segments, paths, strict=True)
        ]
        features = self._features(segments, used)
        for segment, path, rows_used, packed in zip(segments, paths, used, features, strict=True):
            session = segment.session
            if path is not None and path.failed:
                continue
            self.pool.extent(session.id).used = rows_used
            session.rows.append(packed)
            if path is not None:
                session.tokens += [segment.tree.tokens[node] for node in path.accepted]
                session.tokens.append(path.bonus)
        return paths

    def forward(self, segments: Sequence[Segment]) -> Logits | None:
        """Return logits of all wanted tokens; no session changes. Segments without tokens only lack feature rows."""
        busy = [segment for segment in segments if len(segment)]
        return self.runner.forward(busy) if busy else None

    def followed(self, session: SessionRecord) -> FollowedRules | None:
        """Return the session's rules, which other threads follow."""
        if session.rules is None:
            return None
        if session.followed is None or session.followed.rules is not session.rules:
            session.followed = FollowedRules(session.rules, session.account, self.masks)
        return session.followed

    def accept(
        self, segments: Sequence[Segment], logits: Logits | None, until: float = math.inf
    ) -> list[AcceptedPath | None]:
        """Return the accepted path of each tree, None for a prefill chunk. until: see `accept_paths`."""
        if logits is None:
            return [None] * len(segments)
        drafts, tops, row = list[RootedTree](), list[int | None](), 0
        for segment in segments:
            if segment.wanted:
                session, rules = segment.session, self.followed(segment.session)
                text = session.tokens if rules else ()
                drafts.append(RootedTree(segment.tree, session.sampling, len(session.tokens), row, rules, text))
                tops.append(session.round.top if session.round else None)
                row += 1 + len(segment.tree)
        accepted = accept_paths(logits.draw, drafts, self.eos_ids, self._max_context, until)
        paths = iter([_with_chances(logits, *each) for each in zip(drafts, accepted, tops, strict=True)])
        return [next(paths) if segment.wanted else None for segment in segments]

    def _compact(self, segments: Sequence[Segment], paths: Sequence[AcceptedPath | None]) -> None:
        """Move accepted nodes' rows right after the prefix, for all sessions at once."""
        sources, targets = list[int](), list[int]()
        for segment, path in zip(segments, paths, strict=True):
            if path is None or path.failed:
                continue
            first = segment.base + segment.past + len(segment.chain)
            for index, node in enumerate(path.accepted):
                if node != index:
                    sources.append(first + node)
                    targets.append(first + index)
        self.pool.move(sources, targets)

    def _features(self, segments: Sequence[Segment], used: Sequence[int]) -> list[bytes]:
        """Return the packed feature rows that each segment's session lacks, computed for all sessions in one pass."""
        lacking = [
            range(segment.session.rows.stop, rows_used if segment.features else 0)
            for segment, rows_used in zip(segments, used, strict=True)
        ]
        pool_rows, positions = list[int](), list[int]()
        for segment, span in zip(segments, lacking, strict=True):
            pool_rows += [segment.base + position for position in span]
            positions += span
        if not positions:
            return [b""] * len(segments)
        rows = self.producer.rows(self.runner.gather(self.producer.layers, pool_rows), positions)
        packed, begin = list[bytes](), 0
        for span in lacking:
            packed.append(pack_rows(rows[begin : begin + len(span)]) if len(span) else b"")
            begin += len(span)
        return packed


def _with_chances(logits: Logits, draft: RootedTree, path: AcceptedPath | None, top: int | None) -> AcceptedPath | None:
    """Return the path with the chances of its tokens, if requested."""
    if top is None or path is None or path.failed:
        return path
    rows = [draft.row, *(draft.row + 1 + node for node in path.accepted)]
    tokens = [*(draft.tree.tokens[node] for node in path.accepted), path.bonus]
    return path._replace(chances=logits.chances(rows, tokens, top))
