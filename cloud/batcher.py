"""The engine thread: takes whatever waits, runs it in one step, hands replies back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import structlog
from msgspec.structs import replace

from cloud.acceptance import AcceptedPath
from cloud.colocated import Colocated
from cloud.engine import Engine, Segment
from cloud.jobs import Job, PendingSession
from cloud.metrics import Metrics
from cloud.scheduler import ScheduledSession, Scheduler
from cloud.sessions import SessionStore, Settled
from cloud.tree_budget import TreeBudget
from outrider_core.protocol.wire import (
    ERR_BUSY,
    ERR_INTERNAL,
    ERR_ORDER,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    FINISH_NONE,
    Close,
    Generate,
    Open,
    Opened,
    Resync,
    Verdict,
    Verify,
)

#: an idle engine that knows several sessions waits so long for a second one before it takes the first alone
IDLE_WINDOW = 0.0015
#: tokens a GENERATE may write before its session goes behind those that wait for room in the pool
QUANTUM = 32
#: how long the idle thread sleeps before it looks for sessions to forget
IDLE_SECONDS = 10.0
#: a step that takes longer is taken for hung
HUNG_SECONDS = 120.0
RETRY_AFTER_MS = 1000

log = structlog.get_logger()


class Batcher:
    """Owns the engine, the pool and the sessions; only its thread touches them once it is started."""

    def __init__(
        self,
        engine: Engine,
        store: SessionStore,
        metrics: Metrics,
        *,
        max_context: int,
        max_nodes: int,
        prefill_chunk: int,
        fixed_budget: int = 0,
        colocated: Colocated | None = None,
    ) -> None:
        self._engine, self._pool, self._store, self._metrics = engine, engine.pool, store, metrics
        self._max_context = max_context
        self.scheduler = Scheduler(engine.pool, TreeBudget(max_nodes), prefill_chunk, fixed_budget, colocated)
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lines: dict[bytes, PendingSession] = {}  # oldest claim on the pool first
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._beat = time.monotonic()
        self._busy = False
        self._evictions = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after the step under way; what still waits gets no reply."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """The thread runs and has not hung in a step."""
        return self._thread.is_alive() and not (self._busy and time.monotonic() - self._beat > HUNG_SECONDS)

    @property
    def idle(self) -> bool:
        """Nothing is asked of it."""
        return not self._lines and self._queue.empty() and not self._busy

    def submit(self, job: Job) -> None:
        """Hand a job over, from any thread. Jobs of one session are taken in order."""
        self._queue.put(job)

    def _run(self) -> None:
        while self._take():
            self._store.expire(self._lines.keys())
            if self._lines:
                self._busy, self._beat = True, time.monotonic()
                self._step()
            self._report()
            self._busy = False

    def _take(self) -> bool:
        """Take all that waits; with nothing to do, sleep. False: the thread shall end."""
        try:
            if self._lines:
                return self._admit_waiting()
            job = self._queue.get(timeout=IDLE_SECONDS)
            self._busy, self._beat = True, time.monotonic()
            if job is None:
                return False
            self._admit(job)
            until = time.monotonic() + IDLE_WINDOW if len(self._store) > 1 else 0.0
            while (left := until - time.monotonic()) > 0:
                job = self._queue.get(timeout=left)
                if job is None:
                    return False
                self._admit(job)
        except Empty:
            pass
        return self._admit_waiting()

    def _admit_waiting(self) -> bool:
        """Take what waits now."""
        with suppress(Empty):
            while (job := self._queue.get_nowait()) is not None:
                self._admit(job)
            return False
        return True

    def _admit(self, job: Job) -> None:
        job.admitted = True
        try:
            match job.request:
                case Open():
                    self._open(job, job.request)
                case Verify() | Generate():
                    self._begin(job, job.request)
                case Close():
                    self._lines.pop(job.session, None)
                    self._store.forget(job.session)
        except Exception:
            log.exception("request failed", session=short(job.session))
            job.fail(ERR_INTERNAL, "the verifier failed on this request; OPEN again")

    def _open(self, job: Job, request: Open) -> None:
        if job.cancelled:
            return
        self._lines.pop(job.session, None)  # the connection cancelled what was there
        session = self._store.open(job.session, request, job.tokens, self._lines.keys(), job.owner)
        if session is None:
            job.fail(ERR_BUSY, "all sessions of this verifier are busy", RETRY_AFTER_MS)
            return
        cached = self._pool.used(session.id)
        found = "new" if request.seq == 0 else "cached" if cached else "evicted"
        self._metrics.opened.labels(found).inc()
        log.info("session opened", session=short(session.id), committed=len(session.tokens), cached=cached)
        job.reply(Opened(request.stream, len(session.tokens), cached), False)
        self._lines[session.id] = PendingSession(session, job.owner, opening=job)

    def _begin(self, job: Job, request: Verify | Generate) -> None:
        """Answer at once what needs no step; else put the job in its session's line."""
        session = self._store.get(job.session)
        if session is None:
            job.fail(ERR_UNKNOWN, "the session was forgotten; OPEN it again")
            return
        line = self._lines.get(session.id)
        if line is not None and line.round is not None:
            self._drop(line)  # the connection lets a second one through only behind a CANCEL
        committed = len(session.tokens)
        settled = session.settled
        if isinstance(request, Verify) and settled is not None and settled.answers(request):
            if request.seq == session.seq + 1 and request.base_len == committed:
                # the device lost the reply, came back with OPEN and asks again
                session.tokens += settled.committed
                session.seq = request.seq
            if request.seq == session.seq:
                job.reply(replace(settled.verdict, stream=request.stream), True)
                return
        if request.seq != session.seq + 1:
            job.fail(ERR_ORDER, f"seq {request.seq} where {session.seq + 1} is next")
        elif request.base_len != committed:
            job.reply(Resync(request.stream, committed), True)
        elif committed >= self._max_context:
            job.fail(ERR_TOO_LONG, f"the context of {self._max_context} tokens is full")
        else:
            line = self._lines.setdefault(session.id, PendingSession(session, job.owner))
            line.round, line.generated = job, 0
            if isinstance(request, Generate):
                session.seq, session.settled = request.seq, None
            elif session.answered:
                self.scheduler.budget.observe_pause(job.waiting_since - session.answered)

    def _drop(self, line: PendingSession) -> None:
        """Forget a cancelled round. Its seq counts as used, whether or not a step came first."""
        request = line.round.request if line.round else None
        assert isinstance(request, Verify | Generate)
        line.session.seq, line.session.settled, line.round = request.seq, None, None

    def _step(self) -> None:
        planned: list[ScheduledSession] = []
        try:
            planned = self.scheduler.schedule(self._waiting())
            if not planned:
                return
            begun = time.perf_counter()
            paths = self._engine.step([self._segment(work) for work in planned])
            took = time.perf_counter() - begun
        except Exception:
            log.exception("step failed", sessions=len(planned))
            for line in [work.line for work in planned] or list(self._lines.values()):
                self._fail(line)
            return
        self._count(planned, paths, begun, took)
        for work, path in zip(planned, paths, strict=True):
            self._finish(work, path, begun, took)

    def _waiting(self) -> list[PendingSession]:
        """Lines that need a step. Cancelled requests go, and OPENs that lack nothing are answered."""
        for line in list(self._lines.values()):
            if line.round is not None and line.round.cancelled:
                self._drop(line)
            if line.opening is not None and line.opening.cancelled:
                line.opening = None
            self._answer_opening(line)
            if line.opening is None and line.round is None:
                del self._lines[line.session.id]
        return list(self._lines.values())

    def _segment(self, work: ScheduledSession) -> Segment:
        line = work.line
        wanted = line.opening is not None or line.round is None or self._rows_wanted(line.round)
        return Segment(line.session, work.chain, work.tree, wanted)

    def _rows_wanted(self, job: Job) -> bool:
        """Whether feature rows of the round's tokens are sent, or read by the drafter beside the target."""
        return self._drafted(job) or (isinstance(job.request, Generate) and job.request.rows)

    def _drafted(self, job: Job) -> bool:
        """Whether somebody drafts for the round, so that its nodes count."""
        return isinstance(job.request, Verify) or self.scheduler.colocated is not None

    def _count(
        self, planned: list[ScheduledSession], paths: Sequence[AcceptedPath | None], begun: float, took: float
    ) -> None:
        """Learn from the step and tell the metrics."""
        metrics = self._metrics
        sizes, accepted = list[int](), 0
        for work, path in zip(planned, paths, strict=True):
            job = work.line.round
            if path is None or job is None or work.tree is None:
                continue
            metrics.queue_seconds.observe(max(0.0, begun - job.waiting_since))
            metrics.generation_tokens.inc(len(path.accepted) + 1)
            if self._drafted(job):
                sizes.append(len(work.tree))
                accepted += len(path.accepted)
                metrics.draft_tokens.inc(len(job.tree) or len(work.tree))
        self.scheduler.observe(sizes, accepted)
        metrics.drafts.inc(len(sizes))
        metrics.verified_nodes.inc(sum(sizes))
        metrics.accepted_tokens.inc(accepted)
        metrics.prompt_tokens.inc(sum(work.prefill for work in planned))
        metrics.step_tokens.observe(sum(map(len, planned)))
        metrics.step_sessions.observe(len(planned))
        metrics.step_seconds.observe(took)
        metrics.running.set(len(planned))

    def _report(self) -> None:
        """Gauges, once a step or a sleep."""
        metrics = self._metrics
        metrics.waiting.set(len(self._lines))
        metrics.kv_usage.set(self._pool.rows_used / self._pool.rows)
        metrics.sessions.set(len(self._store))
        metrics.tree_budget.set(self.scheduler.tree_budget)
        metrics.evictions.inc(self._pool.evictions - self._evictions)
        self._evictions = self._pool.evictions
        if not self._lines:
            metrics.running.set(0)

    def _finish(self, work: ScheduledSession, path: AcceptedPath | None, begun: float, took: float) -> None:
        line = work.line
        if path is not None and line.round is not None:
            if isinstance(line.round.request, Verify):
                self._settle(line, line.round, line.round.request, path, begun, took)
            elif isinstance(line.round.request, Generate):
                self._written(work, line.round, line.round.request, path, begun, took)
        self._answer_opening(line)

    def _settle(
        self, line: PendingSession, job: Job, request: Verify, path: AcceptedPath, begun: float, took: float
    ) -> None:
        """Answer a VERIFY and remember the answer."""
        session = line.session
        base_len = len(session.tokens) - len(path.accepted) - 1
        rows = session.rows.block(base_len - 1, base_len + len(path.accepted))
        verdict = self._verdict(job, request, base_len, path, rows, begun, took)
        session.seq = request.seq
        session.settled = Settled(request, verdict, tuple(session.tokens[base_len:]))
        session.answered = time.perf_counter()
        line.round = None
        job.reply(verdict, True)

    def _written(
        self, work: ScheduledSession, job: Job, request: Generate, path: AcceptedPath, begun: float, took: float
    ) -> None:
        """Send what a GENERATE wrote in this step, a VERDICT for each token."""
        line, session = work.line, work.line.session
        base_len = len(session.tokens) - len(path.accepted) - 1
        last = len(session.tokens) - 1
        for at in range(base_len, last + 1):
            single = AcceptedPath([], session.tokens[at], path.finish if at == last else FINISH_NONE)
            line.generated += 1
            done = single.finish != FINISH_NONE or line.generated >= request.max_new
            if done:
                line.round = None
            rows = session.rows.block(at - 1, at) if request.rows else b""
            job.reply(self._verdict(job, request, at, single, rows, begun, took), done)
        job.waiting_since = time.perf_counter()
        if line.round is not None and line.generated // QUANTUM != (line.generated - (last - base_len + 1)) // QUANTUM:
            self._lines[session.id] = self._lines.pop(session.id)  # others' turn to claim room in the pool

    def _verdict(
        self,
        job: Job,
        request: Verify | Generate,
        base_len: int,
        path: AcceptedPath,
        rows: bytes,
        begun: float,
        took: float,
    ) -> Verdict:
        return Verdict(
            stream=request.stream,
            seq=request.seq,
            base_len=base_len,
            accepted=bytes(path.accepted),
            bonus=path.bonus,
            finish=path.finish,
            rows=rows,
            tree_budget=self.scheduler.tree_budget,
            queue_us=min(int(max(0.0, begun - job.waiting_since) * 1e6), 2**31 - 1),
            engine_us=min(int(took * 1e6), 2**31 - 1),
        )

    def _answer_opening(self, line: PendingSession) -> None:
        """Once the OPEN's rows are all there, hand over those the device lacks."""
        job, session = line.opening, line.session
        if job is None or not isinstance(job.request, Open):
            return
        stop = len(job.tokens) - 1
        if min(self._pool.used(session.id), session.rows.stop) < stop:
            return
        line.opening = None
        start = min(job.request.features_have, stop)
        job.reply(session.rows.copy(start, stop), True)

    def _fail(self, line: PendingSession) -> None:
        """A step failed: its sessions keep their text and lose their keys and values."""
        self._lines.pop(line.session.id, None)
        self._pool.release(line.session.id)
        for job in (line.opening, line.round):
            if job is not None:
                job.fail(ERR_INTERNAL, "the verifier failed in this step; OPEN again")


def short(session_id: bytes) -> str:
    """A session's name in logs: enough to tell sessions apart, too little to take one over."""
    return session_id[:4].hex()
