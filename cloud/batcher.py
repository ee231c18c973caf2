"""The engine thread: takes whatever waits, runs it in one step, hands replies back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import structlog
from msgspec.structs import replace

from cloud.acceptance import Walk
from cloud.colocated import Colocated
from cloud.engine import Engine, Segment
from cloud.features import FeatureRows
from cloud.metrics import Metrics
from cloud.scheduling import Budget, fair_shares
from cloud.sessions import Session, SessionStore, Settled
from protocol.tree import MAX_NODES, TokenTree
from protocol.wire import (
    ERR_BUSY,
    ERR_INTERNAL,
    ERR_ORDER,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    FINISH_NONE,
    Close,
    Error,
    Generate,
    Open,
    Opened,
    Resync,
    ServerMessage,
    Verdict,
    Verify,
)

#: tokens of one step, all sessions together; more wait for the next, so that logits stay bounded
STEP_TOKENS = 1024
#: an idle engine that knows several sessions waits so long for a second one before it takes the first alone
IDLE_WINDOW = 0.0015
#: tokens a GENERATE may write before its session goes behind those that wait for room in the pool
QUANTUM = 32
#: how long the idle thread sleeps before it looks for sessions to forget
IDLE_SECONDS = 10.0
#: sessions that got a verdict so lately are about to send the next tree
RECENT_SECONDS = 1.0
#: a step that takes longer is taken for hung
HUNG_SECONDS = 120.0
RETRY_AFTER_MS = 1000

log = structlog.get_logger()

#: what a job answers: a message, or feature rows for the connection to cut into FEATURES
Reply = ServerMessage | FeatureRows


@dataclass(eq=False)
class Job:
    """One request to the engine thread.

    tokens: OPEN's ids. tree: VERIFY's. owner: who asks; owners share the engine evenly. reply(message, done) is
    called in the engine thread, `done` with the last message. `cancelled` may be set by any thread; a step under
    way still ends and is answered. `admitted`: the engine thread has it.
    """

    session: bytes
    request: Open | Verify | Generate | Close
    reply: Callable[[Reply, bool], None]
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree = field(default_factory=TokenTree)
    owner: str = ""
    cancelled: bool = False
    admitted: bool = False
    waiting_since: float = field(default_factory=time.perf_counter)

    def fail(self, code: int, text: str, retry_after_ms: int = 0) -> None:
        self.reply(Error(code, text, self.request.stream, retry_after_ms), True)


@dataclass(eq=False)
class Line:
    """What waits for one session: rows an OPEN asked for, and one VERIFY or GENERATE."""

    session: Session
    owner: str
    opening: Job | None = None
    round: Job | None = None
    generated: int = 0  # tokens of the GENERATE so far

    @property
    def waiting_since(self) -> float:
        """When the older of its requests came."""
        return min(job.waiting_since for job in (self.opening, self.round) if job is not None)


@dataclass(frozen=True)
class Work:
    """A line's part of the next step: `chain` committed tokens, then `tree` (None: no round takes part)."""

    line: Line
    chain: int
    prefill: int  # tokens of the chain that are prefill
    tree: TokenTree | None

    def __len__(self) -> int:
        return self.chain + (len(self.tree) if self.tree is not None else 0)


class Batcher:
    """Owns the engine, the pool and the sessions; only its thread touches them once it is started.

    colocated: drafts for GENERATE on the server; None: the target decodes token by token.
    """

    def __init__(
        self,
        engine: Engine,
        store: SessionStore,
        metrics: Metrics,
        *,
        max_context: int,
        max_nodes: int,
        prefill_chunk: int,
        colocated: Colocated | None = None,
    ) -> None:
        self._engine, self._pool, self._store, self._metrics = engine, engine.pool, store, metrics
        self._max_context, self._prefill_chunk, self._colocated = max_context, prefill_chunk, colocated
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lines: dict[bytes, Line] = {}  # oldest claim on the pool first
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._beat = time.monotonic()
        self._busy = False
        self._evictions, self._last_round = 0, 0.0
        self.budget = Budget(max_nodes)
        self.fixed_budget = 0

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

    @property
    def tree_budget(self) -> int:
        """Nodes per tree that devices are asked to stay within."""
        return self.fixed_budget or self.budget.nodes

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
        self._lines[session.id] = Line(session, job.owner, opening=job)

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
            line = self._lines.setdefault(session.id, Line(session, job.owner))
            line.round, line.generated = job, 0
            if isinstance(request, Generate):
                session.seq, session.settled = request.seq, None
            elif session.answered:
                self.budget.observe_pause(job.waiting_since - session.answered)

    def _drop(self, line: Line) -> None:
        """Forget a cancelled round. Its seq counts as used, whether or not a step came first."""
        request = line.round.request if line.round else None
        assert isinstance(request, Verify | Generate)
        line.session.seq, line.session.settled, line.round = request.seq, None, None

    def _step(self) -> None:
        planned: list[Work] = []
        try:
            planned = self._plan()
            if not planned:
                return
            begun = time.perf_counter()
            walks = self._engine.step([self._segment(work) for work in planned])
            took = time.perf_counter() - begun
        except Exception:
            log.exception("step failed", sessions=len(planned))
            for line in [work.line for work in planned] or list(self._lines.values()):
                self._fail(line)
            return
        self._count(planned, walks, begun, took)
        for work, walked in zip(planned, walks, strict=True):
            self._finish(work, walked, begun, took)

    def _plan(self) -> list[Work]:
        """The next step: verifies first, the longest waiting first; prefill shares `prefill_chunk` of what is left.

        A line never loses its rows to one with a younger claim on the pool.
        """
        for line in list(self._lines.values()):
            self._drop_cancelled(line)
            if line.opening is None and line.round is None:
                del self._lines[line.session.id]
        missing = {id(line): self._missing(line) for line in self._lines.values()}
        waiting = sorted(self._lines.values(), key=lambda line: line.waiting_since)
        ready = [line for line in waiting if line.round is not None and not missing[id(line)]]
        behind = [line for line in waiting if missing[id(line)]]
        kept = min(self._prefill_chunk, STEP_TOKENS // 4) if behind else 0  # even trees without end leave this much
        works = {id(work.line): work for work in self._verifies(ready[: STEP_TOKENS - kept], STEP_TOKENS - kept)}
        room = STEP_TOKENS - sum(map(len, works.values()))
        chunk = min(self._prefill_chunk, room, self.budget.prefill_room(self._company(works.values()), room))
        shares = fair_shares([line.owner for line in behind], [missing[id(line)] for line in behind], chunk)
        room -= sum(shares)
        for line, share in zip(behind, shares, strict=True):
            work = Work(line, share, share, None)
            if line.round is not None and share == missing[id(line)] and room > 0:
                tree = self._tree(line).pruned(min(room - 1, self.tree_budget), MAX_NODES)
                work = Work(line, share + 1, share, tree)
                room -= 1 + len(tree)
            works[id(line)] = work
        planned, held = list[Work](), set[bytes]()
        for line in list(self._lines.values()):
            held.add(line.session.id)
            work = works.get(id(line)) or Work(line, 0, 0, None)
            if self._admissible(work, held):
                planned.append(work)
        return planned

    def _company(self, verifies: Iterable[Work]) -> int:
        """Verified tokens that a prefill chunk delays: this step's, or those that will come while it runs."""
        tokens = sum(map(len, verifies))
        lately = time.perf_counter() - self._last_round < RECENT_SECONDS
        return tokens or (round(self.budget.sessions * (1 + self.budget.nodes)) if lately else 0)

    def _missing(self, line: Line) -> int:
        """Committed tokens that must run before the root can."""
        return len(line.session.tokens) - 1 - self._pool.used(line.session.id)

    def _verifies(self, ready: list[Line], room: int) -> list[Work]:
        """Rounds whose rows are all there, their trees pruned to fair shares of the budget. Pruning is lossless."""
        trees = [self._tree(line) for line in ready]
        capacity = min(self.tree_budget * len(ready), room - len(ready))
        shares = fair_shares([line.owner for line in ready], [len(tree) for tree in trees], capacity)
        return [
            Work(line, 1, 0, tree.pruned(share, MAX_NODES))
            for line, tree, share in zip(ready, trees, shares, strict=True)
        ]

    def _tree(self, line: Line) -> TokenTree:
        """The round's tree: the device's, or for GENERATE the co-located drafter's."""
        job = line.round
        assert job is not None
        if self._colocated is None or not isinstance(job.request, Generate):
            return job.tree
        left = job.request.max_new - line.generated
        return self._colocated.draft(line.session, self.tree_budget).pruned(MAX_NODES, left - 1)

    def _admissible(self, work: Work, held: Set[bytes]) -> bool:
        """Whether the line has something to do in this step and the pool room for it, without what others hold."""
        line, session = work.line, work.line.session
        used, missing = self._pool.used(session.id), self._missing(line)
        if work.tree is not None and work.chain != missing + 1:
            return False  # an older line has just taken its rows
        if not len(work):
            if missing:
                return False  # its turn at the prefill comes
            if line.opening is None:
                return False  # more sessions than a step takes
            if session.rows.stop >= used:
                self._send_features(line)
                return False
        return self._pool.reserve(session.id, used + len(work), held, line.owner)

    def _segment(self, work: Work) -> Segment:
        line = work.line
        rounds = line.round is None or isinstance(line.round.request, Verify) or self._colocated is not None
        return Segment(line.session, work.chain, work.tree, line.opening is not None or rounds)

    def _drop_cancelled(self, line: Line) -> None:
        if line.round is not None and line.round.cancelled:
            self._drop(line)
        if line.opening is not None and line.opening.cancelled:
            line.opening = None

    def _count(self, planned: list[Work], walks: Sequence[Walk | None], begun: float, took: float) -> None:
        """Learn from the step and tell the metrics."""
        metrics = self._metrics
        sizes, accepted = list[int](), 0
        for work, walked in zip(planned, walks, strict=True):
            job = work.line.round
            if walked is None or job is None or work.tree is None:
                continue
            metrics.queue_seconds.observe(max(0.0, begun - job.waiting_since))
            metrics.generation_tokens.inc(len(walked.accepted) + 1)
            if isinstance(job.request, Verify) or self._colocated is not None:
                sizes.append(len(work.tree))
                accepted += len(walked.accepted)
                metrics.draft_tokens.inc(len(job.tree) or len(work.tree))
        if sizes:
            self._last_round = time.perf_counter()
        self.budget.observe_step(sizes, accepted)
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
        metrics.tree_budget.set(self.tree_budget)
        metrics.evictions.inc(self._pool.evictions - self._evictions)
        self._evictions = self._pool.evictions
        if not self._lines:
            metrics.running.set(0)

    def _finish(self, work: Work, walked: Walk | None, begun: float, took: float) -> None:
        line = work.line
        if walked is not None and line.round is not None:
            if isinstance(line.round.request, Verify):
                self._settle(line, line.round, line.round.request, walked, begun, took)
            elif isinstance(line.round.request, Generate):
                self._written(work, line.round, line.round.request, walked, begun, took)
        if line.opening is not None and len(line.opening.tokens) - 1 <= self._pool.used(line.session.id):
            self._send_features(line)

    def _settle(self, line: Line, job: Job, request: Verify, walked: Walk, begun: float, took: float) -> None:
        """Answer a VERIFY and remember the answer."""
        session = line.session
        base_len = len(session.tokens) - len(walked.accepted) - 1
        rows = session.rows.block(base_len - 1, base_len + len(walked.accepted))
        verdict = self._verdict(job, request, base_len, walked, rows, begun, took)
        session.seq = request.seq
        session.settled = Settled(request, verdict, tuple(session.tokens[base_len:]))
        session.answered = time.perf_counter()
        line.round = None
        job.reply(verdict, True)

    def _written(self, work: Work, job: Job, request: Generate, walked: Walk, begun: float, took: float) -> None:
        """Send what a GENERATE wrote in this step, a VERDICT for each token."""
        line, session = work.line, work.line.session
        base_len = len(session.tokens) - len(walked.accepted) - 1
        last = len(session.tokens) - 1
        for at in range(base_len, last + 1):
            single = Walk([], session.tokens[at], walked.finish if at == last else FINISH_NONE)
            line.generated += 1
            done = single.finish != FINISH_NONE or line.generated >= request.max_new
            if done:
                line.round = None
            job.reply(self._verdict(job, request, at, single, b"", begun, took), done)
        job.waiting_since = time.perf_counter()
        if line.round is not None and line.generated // QUANTUM != (line.generated - (last - base_len + 1)) // QUANTUM:
            self._lines[session.id] = self._lines.pop(session.id)  # others' turn to claim room in the pool

    def _verdict(
        self, job: Job, request: Verify | Generate, base_len: int, walked: Walk, rows: bytes, begun: float, took: float
    ) -> Verdict:
        return Verdict(
            stream=request.stream,
            seq=request.seq,
            base_len=base_len,
            accepted=bytes(walked.accepted),
            bonus=walked.bonus,
            finish=walked.finish,
            rows=rows,
            tree_budget=self.tree_budget,
            queue_us=min(int(max(0.0, begun - job.waiting_since) * 1e6), 2**31 - 1),
            engine_us=min(int(took * 1e6), 2**31 - 1),
        )

    def _send_features(self, line: Line) -> None:
        """The OPEN's rows are all there: hand over those the device lacks."""
        job, session = line.opening, line.session
        line.opening = None
        if job is None or not isinstance(job.request, Open):
            return
        stop = len(job.tokens) - 1
        start = min(job.request.features_have, stop)
        job.reply(session.rows.copy(start, stop), True)

    def _fail(self, line: Line) -> None:
        """A step failed: its sessions keep their text and lose their keys and values."""
        self._lines.pop(line.session.id, None)
        self._pool.release(line.session.id)
        for job in (line.opening, line.round):
            if job is not None:
                job.fail(ERR_INTERNAL, "the verifier failed in this step; OPEN again")


def short(session_id: bytes) -> str:
    """A session's name in logs: enough to tell sessions apart, too little to take one over."""
    return session_id[:4].hex()
