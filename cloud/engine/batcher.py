"""The engine thread: takes all waiting requests, runs them in one step, sends the replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from enum import Enum
from queue import Empty, Queue

from cloud.engine.engine import TargetEngine
from cloud.engine.engine_metrics import EngineMetrics
from cloud.engine.outcome import StepOutcome
from cloud.engine.recent_rounds import RecentRounds
from cloud.engine.replies import RoundReplies, answer_open
from cloud.engine.request import EngineRequest
from cloud.engine.request_queue import RequestQueue
from cloud.engine.retiming import Retiming
from cloud.engine.scheduler import Scheduler
from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord, SessionStore
from cloud.engine.watchdog import Watchdog
from cloud.telemetry import log
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.wire import ERR_BOUNDS

#: an idle engine with several sessions waits this long for a second request before it runs the first alone
IDLE_WINDOW = 0.0015
#: after this many tokens of a GENERATE, sessions that wait for space in the pool go first
QUANTUM = 32
#: how long the idle thread sleeps before it looks for expired sessions
IDLE_SECONDS = 10.0
#: after this many failed steps in a row the verifier counts as broken
MAX_STEP_FAILURES = 10
#: seconds after which a step counts as hung and the verifier as broken; more if steps were slow lately
MAX_STEP_SECONDS = 120.0


class Made(Enum):
    """Queued when a mask is ready that a session has awaited outside of steps."""

    MADE = "made"


MADE = Made.MADE


class Batcher:
    """Owns the engine, the pool and the sessions: once started, only its thread uses them."""

    def __init__(
        self,
        engine: TargetEngine,
        store: SessionStore,
        scheduler: Scheduler,
        metrics: Metrics,
        *,
        max_context: int,
    ) -> None:
        self.scheduler, self._engine, self._pool, self._store = scheduler, engine, engine.pool, store
        self.requests = RequestQueue(store, engine.pool, metrics, scheduler.budget, max_context)
        self._metrics, self._engine_metrics = metrics, EngineMetrics(metrics, engine.pool)
        self.recent, self.watchdog = RecentRounds(), Watchdog(MAX_STEP_SECONDS)
        self._failures = 0
        self._broken: str | None = None
        self._retiming = Retiming(engine.runner, engine.pool, scheduler.budget)
        # not a SimpleQueue, whose get(timeout=...) may never return before Python 3.13, if the thread is slow to run
        self._queue: Queue[EngineRequest | Made | None] = Queue()
        self._held = False  # whether nothing can run before a mask is ready
        engine.masks.woken = self._woken
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 3.0) -> None:
        """End the thread after the running step, waiting at most `timeout` seconds; pending requests get no reply."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def broken(self) -> str | None:
        """Return why no request can be answered any more, or None. This never recovers."""
        if self.watchdog.hung:
            return "the engine hangs in a step"
        return self._broken or (None if self._thread.is_alive() else "the engine thread does not run")

    @property
    def alive(self) -> bool:
        """Return whether the thread runs, does not hang in a step, and not every step fails."""
        return self.broken is None

    @property
    def idle(self) -> bool:
        """Return whether no request waits or runs."""
        return not self.requests and self._queue.empty() and not self.watchdog.busy

    def submit(self, request: EngineRequest) -> None:
        """Hand a request over, from any thread. Requests of one session are taken in order."""
        self._queue.put(request)

    def _woken(self) -> None:
        """Wake the thread, which may wait for a mask that is ready now."""
        if self._held:
            self._queue.put(MADE)

    def _run(self) -> None:
        try:
            self._turns()
        except BaseException as error:
            self._broken = f"the engine thread ended: {type(error).__name__}"
            log.exception("engine thread ended")

    def _turns(self) -> None:
        worked = time.monotonic()
        while self._take():
            self._store.expire(self.requests.session_ids)
            if self.requests:
                self.watchdog.start()
                self.step()
                worked = time.monotonic()
            elif time.monotonic() - worked > IDLE_SECONDS:
                self.watchdog.start()
                self._retiming.tick()
            self._engine_metrics.report(len(self.requests), len(self._store), self.scheduler.tree_budget)
            self.watchdog.end()

    def _take(self) -> bool:
        """Admit every pending request; with nothing to do, sleep. Returns False when the thread must end."""
        try:
            if self.requests and not self._held:
                return self._admit_queued()
            request = self._queue.get(timeout=IDLE_SECONDS)
            self.watchdog.start()
            if request is None:
                return False
            if request is MADE:
                return self._admit_queued()
            self.requests.admit(request)
            until = time.monotonic() + IDLE_WINDOW if len(self._store) > 1 else 0.0
            while (left := until - time.monotonic()) > 0:
                request = self._queue.get(timeout=left)
                if request is None:
                    return False
                if request is not MADE:
                    self.requests.admit(request)
        except Empty:
            pass
        return self._admit_queued()

    def _admit_queued(self) -> bool:
        """Admit the requests queued now, without waiting. Returns False when the thread must end."""
        try:
            while (request := self._queue.get_nowait()) is not None:
                if request is not MADE:
                    self.requests.admit(request)
        except Empty:
            return True
        return False

    def step(self) -> None:
        """Schedule, run and settle a step. Only for the engine thread, or in its place if it was never started."""
        segments: list[Segment] = []
        try:
            waiting = self.requests.waiting()
            self._held = True  # from here on a finished mask wakes the thread
            maskless = {session for session in waiting if session.followed is not None and session.followed.held}
            segments = self.scheduler.schedule(waiting, maskless)
            self._held = bool(maskless) and not segments
            if not segments:
                return
            self.watchdog.start(self.scheduler.pace.longest(sum(map(len, segments))))
            began = time.perf_counter()
            paths = self._engine.step(segments)
            seconds = time.perf_counter() - began
        except Exception:
            sessions = [segment.session for segment in segments]
            log.exception("step failed", sessions=len(sessions), requests=_request_ids(sessions))
            self._count_failure()
            if sessions:
                self.requests.fail(sessions)
            else:
                self.requests.fail_all()
            return
        self._settle(segments, StepOutcome.of(segments, paths, began, seconds))

    def _settle(self, segments: Sequence[Segment], outcome: StepOutcome) -> None:
        """Handle failures, learn from the step, and send the replies."""
        for session in outcome.retried:
            assert session.round is not None
            session.round.token_by_token = True
        for session in outcome.stuck:
            assert session.followed is not None
            self.requests.fail([session], session.followed.broken, ERR_BOUNDS)
        if outcome.unusable:
            self._fail_numbers(outcome.unusable)
        if outcome.wasted:
            self._count_failure()
        else:
            self._failures = 0
        drafts = outcome.drafts()
        self.scheduler.observe_seconds(segments, outcome.seconds)
        self.scheduler.observe(drafts.sizes, drafts.accepted)
        self._engine_metrics.observe(outcome, drafts)
        self.recent.observe(outcome)
        self._reply(outcome)

    def _count_failure(self) -> None:
        """Count a step without any result. Too many in a row mean that the device is broken."""
        self._failures += 1
        self._metrics.step_failures.inc()
        if self._failures >= MAX_STEP_FAILURES:
            self._broken = f"{self._failures} steps in a row failed"

    def _fail_numbers(self, sessions: Sequence[SessionRecord]) -> None:
        """Fail sessions whose logits were not numbers, so that nothing can be drawn from them."""
        log.error("logits are not numbers", requests=_request_ids(sessions), hint="a wider --dtype may help")
        self._metrics.unusable_logits.inc(len(sessions))
        for session in sessions:
            self._store.quarantine(session)
        self.requests.fail(
            sessions, "the target's logits for this text are not numbers; the operator can try a wider --dtype"
        )

    def _reply(self, outcome: StepOutcome) -> None:
        replies = RoundReplies(outcome, self.scheduler.tree_budget)
        for segment, request, path in outcome.rounds():
            before = request.generated
            request.drafted += len(segment.tree)
            request.accepted += len(path.accepted)
            if request.lookup is not None and not request.is_drafted:
                request.lookup.observe(len(segment.tree), len(path.accepted))
            replies.answer(segment.session, request, path)
            if segment.session.round is not None and request.generated // QUANTUM != before // QUANTUM:
                self.requests.move_to_back(segment.session)
        for segment, _ in outcome.steps:
            answer_open(segment.session, self._pool)


def _request_ids(sessions: Sequence[SessionRecord]) -> list[str]:
    return sorted({(session.round or session.requests[0]).request_id for session in sessions if session.requests})
