"""Replies after a step: verdicts for VERIFY and GENERATE, feature rows for OPEN."""

from __future__ import annotations

import time

from cloud.engine.acceptance import AcceptedPath
from cloud.engine.features import MOST_LACKING, STREAMED_ROWS
from cloud.engine.kvpool import KVPool
from cloud.engine.outcome import StepOutcome
from cloud.engine.request import EngineRequest
from cloud.engine.sessions import SessionRecord, SettledRound
from outrider_core.protocol.wire import FINISH_NONE, Generate, Open, Verdict, Verify

_MAX_MICROSECONDS = 2**31 - 1


def answer_open(session: SessionRecord, pool: KVPool) -> None:
    """Once all keys, values and feature rows of an OPEN's tokens exist, send the rows that the device lacks."""
    request = session.opening
    if request is None or not isinstance(request.message, Open):
        return
    stop = len(request.tokens) - 1
    if min(pool.used(session.id), session.rows.stop) < stop:
        return
    session.opening = None
    start = min(request.message.features_have, stop)
    request.answer(session.rows.copy(start, stop))


class RoundReplies:
    """Answers the rounds of one step. tree_budget: advertised with each verdict."""

    def __init__(self, outcome: StepOutcome, tree_budget: int) -> None:
        self._outcome, self._tree_budget = outcome, tree_budget

    def answer(self, session: SessionRecord, request: EngineRequest, path: AcceptedPath) -> None:
        """Send the step's results for the session's round, and end the round if nothing is left to send."""
        match request.message:
            case Verify():
                self._answer_verify(session, request, request.message, path)
            case Generate():
                self._answer_generate(session, request, request.message, path)

    def _answer_verify(
        self, session: SessionRecord, request: EngineRequest, message: Verify, path: AcceptedPath
    ) -> None:
        """Send one verdict, and keep it in case the device asks again."""
        base_len = len(session.tokens) - len(path.accepted) - 1
        rows = self._rows(session, base_len + len(path.accepted), 1 + len(path.accepted))
        verdict = self._verdict(request, message, base_len, path, rows)
        session.seq = message.seq
        session.settled = SettledRound(message, verdict, tuple(session.tokens[base_len:]))
        session.answered = time.perf_counter()
        session.round = None
        request.answer(verdict)

    def _answer_generate(
        self, session: SessionRecord, request: EngineRequest, message: Generate, path: AcceptedPath
    ) -> None:
        """Send one verdict for each token of the step."""
        base_len = len(session.tokens) - len(path.accepted) - 1
        last = len(session.tokens) - 1
        for at in range(base_len, last + 1):
            single = AcceptedPath([], session.tokens[at], path.finish if at == last else FINISH_NONE)
            request.generated += 1
            done = single.finish != FINISH_NONE or request.generated >= message.max_new
            due = message.rows and session.rows.stop >= at and (done or at - session.rows_due >= STREAMED_ROWS)
            rows = self._rows(session, at, 1) if due else b""
            request.chances = path.chances[at - base_len] if path.chances else ()
            verdict = self._verdict(request, message, at, single, rows, same_step=at > base_len)
            if done:
                session.round = None
                request.answer(verdict)
            else:
                request.send(verdict, False)
        request.waiting_since = time.perf_counter()

    def _rows(self, session: SessionRecord, stop: int, least: int) -> bytes:
        """Return the rows up to position `stop` that the device lacks, at least the `least` newest of them."""
        start = min(session.rows_due, stop - least)
        session.rows_due = stop
        return session.rows.block(start if stop - least - start <= MOST_LACKING else stop - least, stop)

    def _verdict(
        self,
        request: EngineRequest,
        message: Verify | Generate,
        base_len: int,
        path: AcceptedPath,
        rows: bytes,
        same_step: bool = False,
    ) -> Verdict:
        """Make a verdict. same_step: it comes from the same step as the one before, which carries the step's time."""
        return Verdict(
            stream=message.stream,
            seq=message.seq,
            base_len=base_len,
            accepted=bytes(path.accepted),
            bonus=path.bonus,
            finish=path.finish,
            rows=rows,
            tree_budget=self._tree_budget,
            queue_us=0 if same_step else microseconds(self._outcome.queue_seconds(request)),
            engine_us=0 if same_step else microseconds(self._outcome.seconds),
        )


def microseconds(seconds: float) -> int:
    """Return a time as messages carry it."""
    return min(int(seconds * 1e6), _MAX_MICROSECONDS)
