"""Sessions that wait for the engine. Requests are admitted here; those that need no step are answered at once."""

from __future__ import annotations

from collections.abc import KeysView
from enum import StrEnum

from msgspec.structs import replace

from cloud.engine.jobs import Job, PendingSession
from cloud.engine.kvpool import KVPool
from cloud.engine.replies import answer_open
from cloud.engine.sessions import SessionStore
from cloud.engine.tree_budget import TreeBudget
from cloud.telemetry import log
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.wire import (
    ERR_BUSY,
    ERR_INTERNAL,
    ERR_ORDER,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    Close,
    Generate,
    Open,
    Opened,
    Resync,
    Verify,
)

RETRY_AFTER_MS = 1000


class OpenedAs(StrEnum):
    """What the verifier still had of a session when its OPEN came; the label of `outrider:opens_total`."""

    NEW = "new"
    CACHED = "cached"
    EVICTED = "evicted"


class RequestQueue:
    """Pending sessions, the oldest claim on the KV pool first. Only the engine thread may use it.

    budget: learns how long sessions pause between a verdict and their next tree.
    """

    def __init__(
        self,
        store: SessionStore,
        pool: KVPool,
        metrics: Metrics,
        budget: TreeBudget,
        max_context: int,
    ) -> None:
        self._store, self._pool, self._metrics, self._budget = store, pool, metrics, budget
        self._max_context = max_context
        self._pending: dict[bytes, PendingSession] = {}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def session_ids(self) -> KeysView[bytes]:
        """Ids of the pending sessions."""
        return self._pending.keys()

    def admit(self, job: Job) -> None:
        """Answer `job` at once or let it wait for a step. Never raises."""
        job.admitted = True
        try:
            match job.request:
                case Open():
                    self._open(job, job.request)
                case Verify() | Generate():
                    self._begin(job, job.request)
                case Close():
                    self._pending.pop(job.session, None)
                    self._store.forget(job.session)
        except Exception:
            log.exception("request failed", session=short_id(job.session), request=job.request_id)
            job.fail(ERR_INTERNAL, "the verifier failed on this request; OPEN again")

    def waiting(self) -> list[PendingSession]:
        """Sessions that need a step. Drops what was cancelled and answers OPENs that need nothing more."""
        for pending in list(self._pending.values()):
            if pending.round is not None and pending.round.cancelled:
                self._drop(pending)
            if pending.opening is not None and pending.opening.cancelled:
                pending.opening = None
            answer_open(pending, self._pool)
            if pending.opening is None and pending.round is None:
                del self._pending[pending.session.id]
        return list(self._pending.values())

    def move_to_back(self, pending: PendingSession) -> None:
        """Give the other sessions the older claim on the pool."""
        self._pending[pending.session.id] = self._pending.pop(pending.session.id)

    def fail(
        self,
        sessions: list[PendingSession],
        why: str = "the verifier failed in this step; OPEN again",
        code: int = ERR_INTERNAL,
    ) -> None:
        """A step of `sessions` failed: they keep their text, lose their keys and values, and are told why."""
        for pending in sessions:
            self._pending.pop(pending.session.id, None)
            self._pool.release(pending.session.id)
            for job in (pending.opening, pending.round):
                if job is not None:
                    job.fail(code, why)

    def fail_all(self) -> None:
        """Fail every pending session."""
        self.fail(list(self._pending.values()))

    def _open(self, job: Job, request: Open) -> None:
        if job.cancelled:
            return
        self._pending.pop(job.session, None)  # the connection has cancelled its jobs
        session = self._store.open(job.session, request, job.tokens, self._pending.keys(), job.account, job.rules)
        if session is None:
            job.fail(ERR_BUSY, "all sessions of this verifier are busy", RETRY_AFTER_MS)
            return
        cached = self._pool.used(session.id)
        found = OpenedAs.NEW if request.seq == 0 else OpenedAs.CACHED if cached else OpenedAs.EVICTED
        self._metrics.opened.labels(found).inc()
        log.info(
            "session opened",
            session=short_id(request.session),  # as the device knows it
            request=job.request_id,
            committed=len(session.tokens),
            cached=cached,
        )
        job.reply(Opened(request.stream, len(session.tokens), cached), False)
        self._pending[session.id] = PendingSession(session, job.account, opening=job)

    def _begin(self, job: Job, request: Verify | Generate) -> None:
        """Answer at once what needs no step; else let the job wait for one."""
        session = self._store.get(job.session)
        if session is None:
            job.fail(ERR_UNKNOWN, "the session was forgotten; OPEN it again")
            return
        pending = self._pending.get(session.id)
        if pending is not None and pending.round is not None:
            self._drop(pending)  # the connection lets a second round through only after a CANCEL
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
            pending = self._pending.setdefault(session.id, PendingSession(session, job.account))
            pending.round, pending.generated, pending.token_by_token = job, 0, False
            if isinstance(request, Generate):
                session.seq, session.settled = request.seq, None
            elif session.answered:
                self._budget.observe_pause(job.waiting_since - session.answered)

    def _drop(self, pending: PendingSession) -> None:
        """Forget a cancelled round. Its seq counts as used, whether or not a step has run."""
        request = pending.round.request if pending.round else None
        assert isinstance(request, Verify | Generate)
        pending.session.seq, pending.session.settled, pending.round = request.seq, None, None


def short_id(session_id: bytes) -> str:
    """A session's name in logs: enough to tell sessions apart, too little to take one over."""
    return session_id[:4].hex()
