"""A session's jobs for drafter and understudy, run in their threads; results come to the answer's inbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from edge_runtime.answer.inbox import (
    Compared,
    Drafted,
    Failed,
    InboxEvent,
    TextRead,
    UnderstudyFailed,
    Unsupported,
    Written,
)
from edge_runtime.answer.stats import StatsRecorder
from edge_runtime.answer.threads import DrafterFailed, DrafterThread, UnderstudyThread
from edge_runtime.session.actions import AddRows, Compare, DraftChain, DraftTree, ReadText, WriteToken
from edge_runtime.session.session import Session
from edge_runtime.session.states import Writer
from edge_runtime.speed.arms import MOST_TOKENS
from outrider_core.drafting.drafter import Draft, TreeShape
from outrider_core.protocol.constraint import Disobeyed, Rules
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.understudy import Decoding


class DrafterJobs:
    """One answer's jobs for the drafter. Create it in the event loop that reads `inbox`."""

    def __init__(
        self, session: Session, worker: DrafterThread, inbox: asyncio.Queue[InboxEvent], stats: StatsRecorder
    ) -> None:
        self._session, self._worker, self._inbox, self._stats = session, worker, inbox, stats
        self._loop = asyncio.get_running_loop()
        self.rules: Rules | None = None  # of the answer's constraint
        worker.failed = self._failed

    def draft(self, action: DraftTree) -> None:
        session, drafter, shape, asked = self._session, self._worker.drafter, self._shape(action), time.monotonic()
        rules = self.rules

        def work() -> None:
            began, draft = time.monotonic(), Draft()
            if shape:
                cancelled = partial(session.cancelled, action.version)
                draft = drafter.draft(action.prefix, session.sampling, shape, cancelled, rules)
            now = time.monotonic()
            self._report(Drafted(session, draft, action.version, now - asked, now - began))

        self._worker.submit(work)

    def write(self, action: WriteToken) -> None:
        session, drafter, asked = self._session, self._worker.drafter, time.monotonic()
        rules = self.rules

        def work() -> None:
            try:
                token, probability = drafter.next_token(action.prefix, session.sampling, rules)
            except Disobeyed as error:
                self._report(Unsupported(session, str(error)))
                token, probability = 0, 0.0  # the session ignores it by then
            self._report(Written(session, token, probability, action.version, time.monotonic() - asked))

        self._worker.submit(work)

    def compare(self, action: Compare) -> None:
        """Draft a tree for comparison, unless the target falls silent: then the drafter may have to write."""
        session, drafter, shape = self._session, self._worker.drafter, self._shape(action)
        rules, silent = self.rules, False

        def cancelled() -> bool:
            nonlocal silent
            silent = silent or session.offline.active
            return silent

        def work() -> None:
            began, draft = time.monotonic(), Draft()
            if shape:
                draft = drafter.draft(action.prefix, session.sampling, shape, cancelled, rules)
            if cancelled():
                draft = Draft()  # an unfinished tree teaches nothing
            self._report(Compared(session, draft, len(action.prefix), time.monotonic() - began))

        self._worker.submit(work)

    def draft_ahead(self) -> None:
        """Draft below the present tree, if the session wants it; any other job ends that."""
        session = self._session
        if session.drafts_ahead is Writer.DRAFTER:
            cancelled = partial(session.cancelled, session.job.version)
            self._worker.draft_ahead(session.tuning.largest, cancelled, self._stats.drafted_ahead)

    def add_rows(self, action: AddRows) -> None:
        self._worker.submit(partial(self._worker.drafter.add_rows, action.positions, action.rows))

    def _shape(self, action: DraftTree | Compare) -> TreeShape | None:
        """Return the shape of a requested tree; None if there is no room."""
        if action.depth < 1:
            return None
        largest = self._session.tuning.largest
        gain = largest.gain if action.gain is None else action.gain
        return replace(largest, nodes=max(1, action.nodes), depth=action.depth, gain=gain)

    def _report(self, event: InboxEvent) -> None:
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, event)

    def _failed(self, error: Exception) -> None:
        failure = DrafterFailed(f"the drafter's engine failed: {error}")
        failure.__cause__ = error
        self._report(Failed(self._session, failure))


class UnderstudyJobs:
    """One answer's jobs for the understudy. Create it in the event loop that reads `inbox`."""

    def __init__(self, session: Session, worker: UnderstudyThread, inbox: asyncio.Queue[InboxEvent]) -> None:
        self._session, self._worker, self._inbox = session, worker, inbox
        self._loop = asyncio.get_running_loop()
        self.rules: Rules | None = None  # of the answer's constraint

    def read(self, action: ReadText) -> None:
        session, worker, understudy = self._session, self._worker, self._worker.understudy
        decoding = self._decoding()

        def cancelled() -> bool:
            return not session.still_reads(action) or worker.closed

        def work() -> InboxEvent:
            return TextRead(session, understudy.agreed(action.prefix, action.base, decoding, cancelled))

        self._submit(work)

    def write(self, action: WriteToken) -> None:
        session, worker, understudy = self._session, self._worker, self._worker.understudy
        asked, decoding = time.monotonic(), self._decoding()

        def cancelled() -> bool:
            return session.cancelled(action.version) or worker.closed

        def work() -> InboxEvent:
            token, probability = 0, 0.0  # the session ignores it once it is cancelled
            if understudy.read_to_write(action.prefix, decoding, cancelled):
                token, probability = understudy.next_token(action.prefix, decoding)
            return Written(session, token, probability, action.version, time.monotonic() - asked)

        self._submit(work)

    def draft(self, action: DraftChain) -> None:
        session, asked, decoding = self._session, time.monotonic(), self._decoding()

        def work() -> InboxEvent:
            cancelled = partial(session.cancelled, action.version)
            draft, seconds = self._chain(action.prefix, action.tokens, cancelled, decoding)
            return Drafted(session, draft, action.version, time.monotonic() - asked, seconds)

        self._submit(work)

    def compare(self, action: Compare) -> None:
        """Draft a chain for comparison, unless the target falls silent: then the understudy has to write."""
        session, decoding = self._session, self._decoding()

        def work() -> InboxEvent:
            cancelled = lambda: session.offline.active or session.finished is not None  # noqa: E731
            draft, seconds = self._chain(action.prefix, action.nodes, cancelled, decoding)
            return Compared(session, draft, len(action.prefix), seconds)

        self._submit(work)

    def draft_ahead(self) -> None:
        """Draft after the present chain, if the session wants it, until its version changes."""
        session, worker, version = self._session, self._worker, self._session.job.version
        if session.drafts_ahead is not Writer.UNDERSTUDY:
            return

        def cancelled() -> bool:
            return session.cancelled(version) or worker.waits or worker.closed

        def job() -> None:
            with suppress(Exception):  # the next chain reports it
                worker.understudy.draft_ahead(MOST_TOKENS, cancelled)

        worker.submit(job)

    def _chain(
        self, prefix: list[int], count: int, cancelled: Callable[[], bool], decoding: Decoding
    ) -> tuple[Draft, float]:
        """Return a chain of at most `count` tokens after `prefix`, and the seconds of its steps.

        Reading ends with the first token; known tokens take no time.
        """
        worker, understudy = self._worker, self._worker.understudy

        def gone() -> bool:
            return cancelled() or worker.closed

        understudy.draft(prefix, min(1, count), decoding, gone)
        began, before = time.monotonic(), understudy.drafted
        tokens, scores = understudy.draft(prefix, count, decoding, gone)
        steps, seconds = understudy.drafted - before, time.monotonic() - began
        return Draft(TokenTree.chain(tokens), tuple(scores), steps), seconds

    def _decoding(self) -> Decoding:
        return Decoding(len(self._session.prompt), self._session.sampling, self.rules)

    def _submit(self, work: Callable[[], InboxEvent]) -> None:
        def job() -> None:
            try:
                event = work()
            except BaseException as error:  # a panic in Rust is not an Exception
                event = UnderstudyFailed(self._session, " ".join(str(error).split()) or type(error).__name__)
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, event)

        self._worker.submit(job)
