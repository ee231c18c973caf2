"""What a finished step sends: verdicts for VERIFY and GENERATE, feature rows for OPEN."""

from __future__ import annotations

import time

from cloud.engine.acceptance import AcceptedPath
from cloud.engine.features import MOST_LACKING, STREAMED_ROWS
from cloud.engine.jobs import Job, PendingSession
from cloud.engine.kvpool import KVPool
from cloud.engine.sessions import Session, Settled
from cloud.engine.step import Step
from outrider_core.protocol.wire import FINISH_NONE, Generate, Open, Verdict, Verify

_MAX_MICROSECONDS = 2**31 - 1


def answer_open(pending: PendingSession, pool: KVPool) -> None:
    """Once all keys, values and feature rows of an OPEN's tokens exist, send the rows that the device lacks."""
    job, session = pending.opening, pending.session
    if job is None or not isinstance(job.request, Open):
        return
    stop = len(job.tokens) - 1
    if min(pool.used(session.id), session.rows.stop) < stop:
        return
    pending.opening = None
    start = min(job.request.features_have, stop)
    job.reply(session.rows.copy(start, stop), True)


class RoundReplies:
    """Answers the rounds of one step. tree_budget: the one to advertise with each verdict."""

    def __init__(self, step: Step, tree_budget: int) -> None:
        self._step, self._tree_budget = step, tree_budget

    def answer(self, pending: PendingSession, job: Job, path: AcceptedPath) -> None:
        """Send what the step means for `pending`'s round, and end the round where nothing is left to send."""
        match job.request:
            case Verify():
                self._answer_verify(pending, job, job.request, path)
            case Generate():
                self._answer_generate(pending, job, job.request, path)

    def _answer_verify(self, pending: PendingSession, job: Job, request: Verify, path: AcceptedPath) -> None:
        """One verdict, which is remembered in case the device asks again."""
        session = pending.session
        base_len = len(session.tokens) - len(path.accepted) - 1
        rows = self._rows(session, base_len + len(path.accepted), 1 + len(path.accepted))
        verdict = self._verdict(job, request, base_len, path, rows)
        session.seq = request.seq
        session.settled = Settled(request, verdict, tuple(session.tokens[base_len:]))
        session.answered = time.perf_counter()
        pending.round = None
        job.reply(verdict, True)

    def _answer_generate(self, pending: PendingSession, job: Job, request: Generate, path: AcceptedPath) -> None:
        """One verdict for each token of the step."""
        session = pending.session
        base_len = len(session.tokens) - len(path.accepted) - 1
        last = len(session.tokens) - 1
        for at in range(base_len, last + 1):
            single = AcceptedPath([], session.tokens[at], path.finish if at == last else FINISH_NONE)
            pending.generated += 1
            done = single.finish != FINISH_NONE or pending.generated >= request.max_new
            if done:
                pending.round = None
            due = request.rows and session.rows.stop >= at and (done or at - session.rows_due >= STREAMED_ROWS)
            rows = self._rows(session, at, 1) if due else b""
            job.chances = path.chances[at - base_len] if path.chances else ()
            job.reply(self._verdict(job, request, at, single, rows, same_step=at > base_len), done)
        job.waiting_since = time.perf_counter()

    def _rows(self, session: Session, stop: int, least: int) -> bytes:
        """The rows up to position `stop` that the device lacks, and the `least` newest of them in any case."""
        start = min(session.rows_due, stop - least)
        session.rows_due = stop
        return session.rows.block(start if stop - least - start <= MOST_LACKING else stop - least, stop)

    def _verdict(
        self,
        job: Job,
        request: Verify | Generate,
        base_len: int,
        path: AcceptedPath,
        rows: bytes,
        same_step: bool = False,
    ) -> Verdict:
        """same_step: as the verdict before, which told the step's time."""
        return Verdict(
            stream=request.stream,
            seq=request.seq,
            base_len=base_len,
            accepted=bytes(path.accepted),
            bonus=path.bonus,
            finish=path.finish,
            rows=rows,
            tree_budget=self._tree_budget,
            queue_us=0 if same_step else _microseconds(self._step.queue_seconds(job)),
            engine_us=0 if same_step else _microseconds(self._step.seconds),
        )


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), _MAX_MICROSECONDS)
