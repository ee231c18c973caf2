"""The engine thread: takes whatever waits, runs it in one step, hands replies back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import structlog
from msgspec.structs import replace

from cloud.acceptance import Walk
from cloud.engine import Engine, Segment
from cloud.features import FeatureRows
from cloud.sessions import Session, SessionStore, Settled
from protocol.tree import TokenTree
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
#: a large target on a GPU turns compute-bound near this many tokens per step; above it nodes cost time
RIDGE_TOKENS = 144
#: how long the idle thread sleeps before it looks for sessions to forget
IDLE_SECONDS = 10.0
RETRY_AFTER_MS = 1000

log = structlog.get_logger()

#: what a job answers: a message, or feature rows for the connection to cut into FEATURES
Reply = ServerMessage | FeatureRows


@dataclass(eq=False)
class Job:
    """One request to the engine thread.

    tokens: OPEN's ids. tree: VERIFY's. reply(message, done) is called in the engine thread, `done` with the
    last message. `cancelled` may be set by any thread; a step under way still ends and is answered.
    `admitted`: the engine thread has it.
    """

    session: bytes
    request: Open | Verify | Generate | Close
    reply: Callable[[Reply, bool], None]
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree = field(default_factory=TokenTree)
    cancelled: bool = False
    admitted: bool = False
    waiting_since: float = field(default_factory=time.perf_counter)

    def fail(self, code: int, text: str, retry_after_ms: int = 0) -> None:
        self.reply(Error(code, text, self.request.stream, retry_after_ms), True)


@dataclass(eq=False)
class Line:
    """What waits for one session: rows an OPEN asked for, and one VERIFY or GENERATE."""

    session: Session
    opening: Job | None = None
    round: Job | None = None
    generated: int = 0  # tokens of the GENERATE so far


class Batcher:
    """Owns the engine, the pool and the sessions; only its thread touches them once it is started."""

    def __init__(
        self, engine: Engine, store: SessionStore, *, max_context: int, max_nodes: int, prefill_chunk: int
    ) -> None:
        self._engine, self._pool, self._store = engine, engine.pool, store
        self._max_context, self._max_nodes, self._prefill_chunk = max_context, max_nodes, prefill_chunk
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lines: dict[bytes, Line] = {}  # oldest first
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.tree_budget = max_nodes

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after the step under way; what still waits gets no reply."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Hand a job over, from any thread. Jobs of one session are taken in order."""
        self._queue.put(job)

    def _run(self) -> None:
        while self._take():
            self._store.expire(self._lines.keys())
            if self._lines:
                self._step()

    def _take(self) -> bool:
        """Take all that waits, sleeping only where there is nothing to do. False: the thread shall end."""
        try:
            job = self._queue.get(timeout=IDLE_SECONDS) if not self._lines else self._queue.get_nowait()
            while job is not None:
                self._admit(job)
                job = self._queue.get_nowait()
        except Empty:
            return True
        return False

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
        session = self._store.open(request, job.tokens, self._lines.keys())
        if session is None:
            job.fail(ERR_BUSY, "all sessions of this verifier are busy", RETRY_AFTER_MS)
            return
        cached = self._pool.used(session.id)
        log.info("session opened", session=short(session.id), committed=len(session.tokens), cached=cached)
        job.reply(Opened(request.stream, len(session.tokens), cached), False)
        self._lines[session.id] = Line(session, opening=job)

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
            line = self._lines.setdefault(session.id, Line(session))
            line.round, line.generated = job, 0
            if isinstance(request, Generate):
                session.seq, session.settled = request.seq, None

    def _drop(self, line: Line) -> None:
        """Forget a cancelled round. Its seq counts as used, whether or not a step came first."""
        request = line.round.request if line.round else None
        assert isinstance(request, Verify | Generate)
        line.session.seq, line.session.settled, line.round = request.seq, None, None

    def _step(self) -> None:
        running: list[Line] = []
        try:
            segments = self._plan(running)
            begun = time.perf_counter()
            walks = self._engine.step(segments)
            took = time.perf_counter() - begun
        except Exception:
            log.exception("step failed", sessions=len(running))
            for line in running or list(self._lines.values()):
                self._fail(line)
            return
        rounds = sum(walked is not None for walked in walks)
        if rounds:
            self.tree_budget = max(4, min(self._max_nodes, RIDGE_TOKENS // rounds))
        for line, walked in zip(running, walks, strict=True):
            self._finish(line, walked, begun, took)

    def _plan(self, running: list[Line]) -> list[Segment]:
        """Segments of the next step, oldest line first; their lines go to `running`, in the same order.

        Every line that has its rows takes part with its tree; lines that lack rows share `prefill_chunk`.
        A line never loses its rows to a younger one.
        """
        segments: list[Segment] = []
        keep: set[bytes] = set()
        prefill, room = self._prefill_chunk, STEP_TOKENS
        for line in list(self._lines.values()):
            self._drop_cancelled(line)
            session = line.session
            if line.opening is None and line.round is None:
                del self._lines[session.id]
                continue
            keep.add(session.id)
            used = self._pool.used(session.id)
            missing = len(session.tokens) - 1 - used
            chain = min(missing, prefill)
            tree = None
            if line.round is not None and chain == missing:
                tree, chain = line.round.tree, chain + 1
            features = line.opening is not None or line.round is None or isinstance(line.round.request, Verify)
            total = chain + (len(tree) if tree is not None else 0)
            if total == 0 and (missing > 0 or session.rows.stop >= used):
                if missing == 0:
                    self._send_features(line)
                continue
            if total > room and segments:
                continue
            if not self._pool.reserve(session.id, used + total, keep):
                continue
            prefill -= min(missing, chain)
            room -= total
            segments.append(Segment(session, chain, tree, features))
            running.append(line)
        return segments

    def _drop_cancelled(self, line: Line) -> None:
        if line.round is not None and line.round.cancelled:
            self._drop(line)
        if line.opening is not None and line.opening.cancelled:
            line.opening = None

    def _finish(self, line: Line, walked: Walk | None, begun: float, took: float) -> None:
        job, session = line.round, line.session
        if walked is not None and job is not None:
            base_len = len(session.tokens) - len(walked.accepted) - 1
            verify = isinstance(job.request, Verify)
            rows = session.rows.block(base_len - 1, base_len + len(walked.accepted)) if verify else b""
            verdict = Verdict(
                stream=job.request.stream,
                seq=session.seq + 1 if verify else session.seq,
                base_len=base_len,
                accepted=bytes(walked.accepted),
                bonus=walked.bonus,
                finish=walked.finish,
                rows=rows,
                tree_budget=self.tree_budget,
                queue_us=min(int((begun - job.waiting_since) * 1e6), 2**31 - 1),
                engine_us=min(int(took * 1e6), 2**31 - 1),
            )
            done = True
            if isinstance(job.request, Verify):
                session.seq = verdict.seq
                session.settled = Settled(job.request, verdict, tuple(session.tokens[base_len:]))
            elif isinstance(job.request, Generate):
                line.generated += 1
                job.waiting_since = time.perf_counter()
                done = walked.finish != FINISH_NONE or line.generated >= job.request.max_new
            if done:
                line.round = None
            job.reply(verdict, done)
        if line.opening is not None and len(line.opening.tokens) - 1 <= self._pool.used(session.id):
            self._send_features(line)

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
