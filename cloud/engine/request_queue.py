"""Sessions that wait for the engine. Requests are admitted here; those that need no step are answered at once."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from contextlib import suppress
from enum import StrEnum

from msgspec.structs import replace

from cloud.engine.kvpool import KVPool
from cloud.engine.replies import answer_open
from cloud.engine.request import EngineRequest, Status
from cloud.engine.sessions import SessionRecord, SessionStore
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
    """The part of a session that the verifier still had when its OPEN came; the label of `outrider:opens_total`."""

    NEW = "new"
    CACHED = "cached"
    EVICTED = "evicted"


class RequestQueue:
    """Sessions that wait, the oldest claim on the KV pool first. Only the engine thread may use it.

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
        self._waiting: dict[bytes, SessionRecord] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def session_ids(self) -> KeysView[bytes]:
        """Ids of the sessions that wait."""
        return self._waiting.keys()

    def admit(self, request: EngineRequest) -> None:
        """Answer `request` at once, or queue it for a step. Never raises."""
        request.status = Status.WAITING
        try:
            match request.message:
                case Open():
                    self._open(request, request.message)
                case Verify() | Generate():
                    self._start(request, request.message)
                case Close():
                    self._waiting.pop(request.session_id, None)
                    self._store.forget(request.session_id)
                    request.end()
        except Exception:
            log.exception("request failed", session=short_id(request.session_id), request=request.request_id)
            self._forget(request)

    def _forget(self, request: EngineRequest) -> None:
        """Drop the session of a request that failed half-way, as it may be half changed, with all its requests."""
        self._waiting.pop(request.session_id, None)
        session = self._store.get(request.session_id)
        others = [] if session is None else [each for each in session.requests if each is not request]
        self._pool.release(request.session_id)
        self._store.forget(request.session_id)
        for each in (*others, request):
            with suppress(Exception):  # the failure may be in its sender
                each.fail(ERR_INTERNAL, "the verifier failed on this request; OPEN again")

    def waiting(self) -> list[SessionRecord]:
        """Return sessions that need a step. Drops cancelled requests and answers OPENs that need nothing more."""
        for session in list(self._waiting.values()):
            if session.round is not None and session.round.cancelled:
                self._drop(session)
            if session.opening is not None and session.opening.cancelled:
                session.opening.end()
                session.opening = None
            answer_open(session, self._pool)
            if not session.requests:
                del self._waiting[session.id]
        return list(self._waiting.values())

    def move_to_back(self, session: SessionRecord) -> None:
        """Let the other sessions' claims on the pool precede this one's."""
        self._waiting[session.id] = self._waiting.pop(session.id)

    def fail(
        self,
        sessions: Iterable[SessionRecord],
        why: str = "the verifier failed in this step; OPEN again",
        code: int = ERR_INTERNAL,
    ) -> None:
        """Fail the step of `sessions`: they keep their text, lose their keys and values, and get the reason."""
        for session in list(sessions):
            self._waiting.pop(session.id, None)
            self._pool.release(session.id)
            failed, session.opening, session.round = session.requests, None, None
            for request in failed:
                request.fail(code, why)

    def fail_all(self) -> None:
        """Fail every session that waits."""
        self.fail(self._waiting.values())

    def _open(self, request: EngineRequest, message: Open) -> None:
        if request.cancelled:
            request.end()
            return
        self._waiting.pop(request.session_id, None)  # the connection has cancelled its requests
        session = self._store.open(
            request.session_id, message, request.tokens, self._waiting.keys(), request.account, request.rules
        )
        if session is None:
            request.fail(ERR_BUSY, "all sessions of this verifier are busy", RETRY_AFTER_MS)
            return
        cached = self._pool.used(session.id)
        found = OpenedAs.NEW if message.seq == 0 else OpenedAs.CACHED if cached else OpenedAs.EVICTED
        self._metrics.opened.labels(found).inc()
        log.info(
            "session opened",
            session=short_id(message.session),  # the device's own id
            request=request.request_id,
            committed=len(session.tokens),
            cached=cached,
        )
        request.send(Opened(message.stream, len(session.tokens), cached), False)
        session.opening, session.round = request, None
        self._waiting[session.id] = session

    def _start(self, request: EngineRequest, message: Verify | Generate) -> None:
        """Answer at once if no step is needed; else queue the request for one."""
        session = self._store.get(request.session_id)
        if session is None:
            request.fail(ERR_UNKNOWN, "the session was forgotten; OPEN it again")
            return
        if session.round is not None:
            self._drop(session)  # the connection lets a second round through only after a CANCEL
        committed = len(session.tokens)
        settled = session.settled
        if isinstance(message, Verify) and settled is not None and settled.answers(message):
            if message.seq == session.seq + 1 and message.base_len == committed:
                # the device lost the reply, reconnected with OPEN and asks again
                session.tokens += settled.committed
                session.seq = message.seq
            if message.seq == session.seq:
                request.answer(replace(settled.verdict, stream=message.stream))
                return
        if message.seq != session.seq + 1:
            request.fail(ERR_ORDER, f"seq {message.seq} where {session.seq + 1} is next")
        elif message.base_len != committed:
            request.answer(Resync(message.stream, committed))
        elif committed >= self._max_context:
            request.fail(ERR_TOO_LONG, f"the context of {self._max_context} tokens is full")
        else:
            self._waiting.setdefault(session.id, session).round = request
            if isinstance(message, Generate):
                session.seq, session.settled = message.seq, None
            elif session.answered:
                self._budget.observe_pause(request.waiting_since - session.answered)

    def _drop(self, session: SessionRecord) -> None:
        """Forget a cancelled round. Its seq counts as used, whether or not a step has run."""
        request = session.round
        assert request is not None and isinstance(request.message, Verify | Generate)
        request.end()
        session.seq, session.settled, session.round = request.message.seq, None, None


def short_id(session_id: bytes) -> str:
    """Shorten a session's id for logs: enough to tell sessions apart, too little to take one over."""
    return session_id[:4].hex()
