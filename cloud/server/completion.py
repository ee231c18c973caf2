"""Completions by the target alone: a session of the engine, and its record for metrics and log."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from cloud.engine.acceptance import Chances
from cloud.engine.request import EngineRequest, Reply
from cloud.server.limits import Account
from cloud.server.service import Verifier
from cloud.telemetry import log
from cloud.telemetry.metrics import ABORT, Metrics
from outrider_core.chat.api.constraints import field_of
from outrider_core.chat.api.errors import ApiError
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.ending import FinishReason
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import (
    ERR_BOUNDS,
    ERR_BUSY,
    ERR_UNKNOWN,
    FINISH_EOS,
    Close,
    Error,
    Generate,
    Open,
    Opened,
    Verdict,
    pack_ids,
)

RETRY_SECONDS = 1
#: seconds between checks of a waiting request that the engine thread is alive
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Drawn:
    """A token. finish_reason: set on the last one. is_text: False for a token that ends the answer.

    chances: if requested.
    """

    token: int
    finish_reason: FinishReason | None
    is_text: bool
    chances: Chances = ()


class EngineSession:
    """A session of the engine in which the target decodes `ids` alone, until it is done or closed.

    Replies wait here for a slow reader, at most `max_new` of them. The engine's session is freed with the last reply,
    whether or not the client has read it. `account` already counts it among its streams; `close` ends that.
    """

    def __init__(
        self,
        verifier: Verifier,
        account: Account,
        ids: list[int],
        sampling: Sampling,
        rules: Rules | None,
        max_new: int,
        request_id: str,
        top: int | None = None,
    ) -> None:
        self._verifier, self._loop = verifier, asyncio.get_running_loop()
        self._account = account
        self._replies: asyncio.Queue[tuple[Reply, bool, Chances]] = asyncio.Queue()
        self._session = session = secrets.token_bytes(16)
        self._closed = False
        opening = Open(0, session, 0, pack_ids(ids), len(ids), sampling)
        self._opening = EngineRequest(
            session, opening, self._opened, tokens=ids, rules=rules, account=account.name, request_id=request_id
        )
        self._round = EngineRequest(
            session,
            Generate(0, 1, len(ids), max_new),
            self._post,
            top=top,
            account=account.name,
            request_id=request_id,
        )
        verifier.submit(self._opening)
        verifier.submit(self._round)

    async def opened(self) -> None:
        """Wait until the engine has opened the session. Raises ApiError if it cannot."""
        reply, _, _ = await self._next()
        if not isinstance(reply, Opened):
            raise _failed()

    async def tokens(self) -> AsyncIterator[Drawn]:
        """Yield tokens as the target draws them. Raises ApiError if the engine fails."""
        done = False
        while not done:
            reply, done, chances = await self._next()
            if isinstance(reply, Verdict):
                is_eos = reply.finish == FINISH_EOS
                reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
                yield Drawn(reply.bonus, reason if done else None, not is_eos, chances)
            elif done:
                raise _failed()

    @property
    def drafted(self) -> tuple[int, int]:
        """Return how many nodes were verified for it beyond plain decoding, and how many the target drew too."""
        return self._round.drafted, self._round.accepted

    def close(self) -> None:
        """Stop drawing and forget the session. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._account.streams -= 1
            self._opening.cancelled = self._round.cancelled = True
            self._verifier.submit(EngineRequest(self._session, Close(0), lambda reply, done: None))

    def _opened(self, reply: Reply, done: bool) -> None:
        """Cancel the rest of OPEN, whose feature rows are not needed. Runs in the engine thread.

        The GENERATE that follows fills the KV cache without them.
        """
        self._opening.cancelled = True
        self._post(reply, done and isinstance(reply, Error))

    def _post(self, reply: Reply, done: bool) -> None:
        """Deliver a reply. Runs in the engine thread."""
        with suppress(RuntimeError):  # the event loop has ended, and nothing waits for the reply
            self._loop.call_soon_threadsafe(self._deliver, reply, done, self._round.chances)

    def _deliver(self, reply: Reply, done: bool, chances: Chances) -> None:
        self._replies.put_nowait((reply, done, chances))
        if isinstance(reply, Verdict):
            self._account.spend(verifies=1)
        if done:
            self.close()

    async def _next(self) -> tuple[Reply, bool, Chances]:
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    reply, done, chances = await self._replies.get()
                break
            except TimeoutError:
                if not self._verifier.alive:
                    raise ApiError(503, "the server stopped; ask another", None, "not_ready", RETRY_SECONDS) from None
        if isinstance(reply, Error):
            raise _engine_error(reply, self._opening.rules)
        return reply, done, chances


def _engine_error(error: Error, rules: Rules | None) -> ApiError:
    if error.code in (ERR_BUSY, ERR_UNKNOWN):  # ERR_UNKNOWN: the session was evicted at once
        seconds = max(RETRY_SECONDS, math.ceil(error.retry_after_ms / 1000))
        return ApiError(429, "the server is busy; try again later", None, "server_busy", seconds)
    if error.code == ERR_BOUNDS:
        return ApiError(400, error.text, field_of(rules.constraint if rules else None), "invalid_schema")
    return _failed()


def _failed() -> ApiError:
    return ApiError(500, "the server failed on this request; send it again", code="internal_error")


class CompletionRecord:
    """Times and end of one completion, for metrics and the log. begun: time.perf_counter() at the request."""

    def __init__(self, metrics: Metrics, begun: float) -> None:
        self._metrics, self._begun, self._last = metrics, begun, begun
        self._tokens, self._finish = 0, ""

    def token(self) -> None:
        """Note a token."""
        now = time.perf_counter()
        times = self._metrics.inter_token_seconds if self._tokens else self._metrics.first_token_seconds
        times.observe(now - self._last)
        self._tokens, self._last = self._tokens + 1, now

    def finish(self, reason: str) -> None:
        """Mark it finished by the target."""
        self._finish = reason

    def close(self, **fields: object) -> None:
        """Note that nothing more is sent. An unfinished one was abandoned by its client."""
        reason, seconds = self._finish or ABORT, time.perf_counter() - self._begun
        self._metrics.finished.labels(reason).inc()
        self._metrics.request_seconds.observe(seconds)
        log.info("completion", finish=reason, tokens=self._tokens, seconds=round(seconds, 3), **fields)
