"""The engine thread: takes all waiting requests, runs them in one step, sends the replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from cloud.engine.colocated import Colocated
from cloud.engine.engine import Engine, Segment
from cloud.engine.engine_metrics import EngineMetrics
from cloud.engine.jobs import Job, PendingSession
from cloud.engine.prefixes import Prefixes
from cloud.engine.replies import RoundReplies, answer_open
from cloud.engine.request_queue import RequestQueue
from cloud.engine.scheduler import ScheduledSession, Scheduler
from cloud.engine.sessions import SessionStore
from cloud.engine.step import Step
from cloud.engine.stream_lookup import StreamLookup
from cloud.engine.tree_budget import TreeBudget
from cloud.engine.watchdog import Watchdog
from cloud.telemetry import log
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.wire import ERR_BOUNDS

#: an idle engine that knows several sessions waits this long for a second request before it runs the first alone
IDLE_WINDOW = 0.0015
#: after this many tokens of a GENERATE its session goes behind those that wait for space in the pool
QUANTUM = 32
#: how long the idle thread sleeps before it looks for expired sessions
IDLE_SECONDS = 10.0


class Batcher:
    """Owns the engine, the pool and the sessions: once it is started, only its thread touches them."""

    def __init__(
        self,
        engine: Engine,
        store: SessionStore,
        metrics: Metrics,
        *,
        max_context: int,
        max_nodes: int,
        prefill_chunk: int,
        max_step_failures: int,
        max_step_seconds: float,
        fixed_budget: int = 0,
        colocated: Colocated | None = None,
        prefixes: Prefixes | None = None,
        lookup: Callable[[], StreamLookup] | None = None,
    ) -> None:
        self._engine, self._pool, self._store = engine, engine.pool, store
        self.scheduler = Scheduler(
            engine.pool,
            TreeBudget(max_nodes),
            prefill_chunk,
            fixed_budget,
            colocated,
            prefixes,
            max_context=max_context,
            lookup=lookup,
        )
        self._requests = RequestQueue(store, engine.pool, metrics, self.scheduler.budget, max_context)
        self._metrics = EngineMetrics(metrics, engine.pool, prefixes)
        self._watchdog = Watchdog(max_step_seconds)
        self._max_failures, self._failures = max_step_failures, 0
        self._broken: str | None = None
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 3.0) -> None:
        """End the thread after the running step, waiting at most `timeout` seconds; what still waits gets no reply."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def broken(self) -> str | None:
        """Why no request can be answered any more, or None. It stays broken."""
        if self._watchdog.hung:
            return "the engine hangs in a step"
        return self._broken or (None if self._thread.is_alive() else "the engine thread does not run")

    @property
    def alive(self) -> bool:
        """The thread runs, does not hang in a step, and not every step fails."""
        return self.broken is None

    @property
    def idle(self) -> bool:
        """No request waits or runs."""
        return not self._requests and self._queue.empty() and not self._watchdog.busy

    def submit(self, job: Job) -> None:
        """Hand a job over, from any thread. Jobs of one session are taken in order."""
        self._queue.put(job)

    def _run(self) -> None:
        try:
            self._turns()
        except BaseException as error:
            self._broken = f"the engine thread ended: {type(error).__name__}"
            log.exception("engine thread ended")

    def _turns(self) -> None:
        while self._take():
            self._store.expire(self._requests.session_ids)
            if self._requests:
                self._watchdog.begin()
                self._step()
            self._metrics.report(len(self._requests), len(self._store), self.scheduler.tree_budget)
            self._watchdog.end()

    def _take(self) -> bool:
        """Admit every job that waits; with nothing to do, sleep. Returns False when the thread is to end."""
        try:
            if self._requests:
                return self._admit_queued()
            job = self._queue.get(timeout=IDLE_SECONDS)
            self._watchdog.begin()
            if job is None:
                return False
            self._requests.admit(job)
            until = time.monotonic() + IDLE_WINDOW if len(self._store) > 1 else 0.0
            while (left := until - time.monotonic()) > 0:
                job = self._queue.get(timeout=left)
                if job is None:
                    return False
                self._requests.admit(job)
        except Empty:
            pass
        return self._admit_queued()

    def _admit_queued(self) -> bool:
        """Admit what is queued now, without waiting. Returns False when the thread is to end."""
        try:
            while (job := self._queue.get_nowait()) is not None:
                self._requests.admit(job)
        except Empty:
            return True
        return False

    def _step(self) -> None:
        """Schedule, run, learn, reply."""
        scheduled: list[ScheduledSession] = []
        try:
            scheduled = self.scheduler.schedule(self._requests.waiting())
            if not scheduled:
                return
            began = time.perf_counter()
            paths = self._engine.step(
                [
                    Segment(part.pending.session, part.chain, part.tree, part.rows_wanted, part.pending.top)
                    for part in scheduled
                ]
            )
            seconds = time.perf_counter() - began
        except Exception:
            log.exception("step failed", sessions=len(scheduled), requests=_request_ids([p.pending for p in scheduled]))
            self._count_failure()
            if scheduled:
                self._requests.fail([part.pending for part in scheduled])
            else:
                self._requests.fail_all()
            return
        good = [(part, path) for part, path in zip(scheduled, paths, strict=True) if path is None or not path.failed]
        failed = list[PendingSession]()
        for part, path in zip(scheduled, paths, strict=True):
            if path is not None and path.failed:
                if part.tree and not part.drafted:  # plain decoding would bring the tokens before
                    part.pending.token_by_token = True
                else:
                    failed.append(part.pending)
        stuck = [pending for pending in failed if pending.session.rules and pending.session.rules.broken]
        for pending in stuck:
            assert pending.session.rules is not None
            self._requests.fail([pending], pending.session.rules.broken, ERR_BOUNDS)
        if unusable := [pending for pending in failed if pending not in stuck]:
            self._fail_numbers(unusable)
        if stuck or len(failed) < len(scheduled):
            self._failures = 0
        else:
            self._count_failure()
        step = Step([part for part, _ in good], [path for _, path in good], began, seconds)
        drafts = step.drafts()
        self.scheduler.observe(drafts.sizes, drafts.accepted)
        self._metrics.observe(step, drafts)
        self._reply(step)

    def _count_failure(self) -> None:
        """Count a step that nothing came of. Too many in a row mean that the device is broken for good."""
        self._failures += 1
        self._metrics.count_failed_step()
        if self._failures >= self._max_failures:
            self._broken = f"{self._failures} steps in a row failed"

    def _fail_numbers(self, sessions: list[PendingSession]) -> None:
        """The target's logits for these sessions were not numbers, so nothing can be drawn from them."""
        log.error("logits are not numbers", requests=_request_ids(sessions), hint="a wider --dtype may help")
        self._metrics.count_unusable(len(sessions))
        for pending in sessions:
            self._store.doubt(pending.session)
        self._requests.fail(
            sessions, "the target's logits for this text are not numbers; the operator can try a wider --dtype"
        )

    def _reply(self, step: Step) -> None:
        replies = RoundReplies(step, self.scheduler.tree_budget)
        for part, job, path in step.rounds():
            pending = part.pending
            before = pending.generated
            if part.tree is not None:
                job.drafted, job.accepted = job.drafted + len(part.tree), job.accepted + len(path.accepted)
                if pending.lookup is not None and not part.drafted:
                    pending.lookup.observe(len(part.tree), len(path.accepted))
            replies.answer(pending, job, path)
            if pending.round is not None and pending.generated // QUANTUM != before // QUANTUM:
                self._requests.move_to_back(pending)
        for part in step.scheduled:
            answer_open(part.pending, self._pool)


def _request_ids(sessions: Sequence[PendingSession]) -> list[str]:
    jobs = [pending.round or pending.opening for pending in sessions]
    return sorted({job.request_id for job in jobs if job is not None})
