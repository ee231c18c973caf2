"""Completions by the target alone: a session of the engine, and the ASGI response that reads from it."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from cloud.engine.acceptance import Chances
from cloud.engine.request import EngineRequest, Reply
from cloud.server.limits import Account
from cloud.server.service import Verifier
from cloud.telemetry import log
from cloud.telemetry.metrics import ABORT, ERROR, Metrics
from cloud.telemetry.tracing import trace_of
from outrider_core.chat.api.asgi import send_answer, send_error, unless_gone
from outrider_core.chat.api.constraints import field_of
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import Request, token_limit
from outrider_core.chat.api.replies import Delta, Ending, FinishReason, TokenChance, TokenChances
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.text import Detokeniser, StopStrings
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
#: how often a waiting request checks that the engine thread is alive
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Drawn:
    """A token. finish_reason: set on the last one. is_text: False for a token that ends the answer.

    chances: where they were asked for.
    """

    token: int
    finish_reason: FinishReason | None
    is_text: bool
    chances: Chances = ()


class EngineSession:
    """A session of the engine in which the target decodes `ids` alone, until it is done or closed.

    Replies wait here for a slow reader, at most `max_new` of them. The engine's session is freed with the last reply,
    whether or not the client has read it. `account` has counted it among its streams already; `close` takes it off.
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
        """Wait until the engine has opened the session. Raises ApiError where it cannot."""
        reply, _, _ = await self._next()
        if not isinstance(reply, Opened):
            raise _failed()

    async def tokens(self) -> AsyncIterator[Drawn]:
        """Tokens as the target draws them. Raises ApiError where the engine fails."""
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
        """Nodes verified for it beyond plain decoding, and those that were the target's own."""
        return self._round.drafted, self._round.accepted

    def close(self) -> None:
        """Stop drawing and forget the session. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._account.streams -= 1
            self._opening.cancelled = self._round.cancelled = True
            self._verifier.submit(EngineRequest(self._session, Close(0), lambda reply, done: None))

    def _opened(self, reply: Reply, done: bool) -> None:
        """Runs in the engine thread. Cancels the rest of OPEN, which would produce feature rows that nobody reads here.

        The GENERATE that follows fills the KV cache without them.
        """
        self._opening.cancelled = True
        self._post(reply, done and isinstance(reply, Error))

    def _post(self, reply: Reply, done: bool) -> None:
        """Runs in the engine thread."""
        with suppress(RuntimeError):  # the event loop has ended, so nobody waits for the reply any more
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
    """Times and end of one completion, for metrics and the log. begun: time.perf_counter() when it was asked for."""

    def __init__(self, metrics: Metrics, begun: float) -> None:
        self._metrics, self._begun, self._last = metrics, begun, begun
        self._tokens, self._finish = 0, ""

    def token(self) -> None:
        """A token has come."""
        now = time.perf_counter()
        times = self._metrics.inter_token_seconds if self._tokens else self._metrics.first_token_seconds
        times.observe(now - self._last)
        self._tokens, self._last = self._tokens + 1, now

    def finish(self, reason: str) -> None:
        """It has ended, as far as the target is concerned."""
        self._finish = reason

    def close(self, **fields: object) -> None:
        """Nothing more is sent. One that has not finished was given up by its client."""
        reason, seconds = self._finish or ABORT, time.perf_counter() - self._begun
        self._metrics.finished.labels(reason).inc()
        self._metrics.request_seconds.observe(seconds)
        log.info("completion", finish=reason, tokens=self._tokens, seconds=round(seconds, 3), **fields)


class Completion:
    """An ASGI response: opens a session of the engine for each choice, sends what the target writes, closes it.

    rules: of each choice. The account has counted one stream already, which the choices use one after another.
    """

    def __init__(
        self,
        verifier: Verifier,
        account: Account,
        model_name: str,
        request: Request,
        ids: list[int],
        rules: Sequence[Rules | None],
        tokenizer: ChatTokenizer,
        begun: float,
    ) -> None:
        self._verifier, self._account, self._request, self._ids = verifier, account, request, ids
        self._rules, self._tokenizer = rules, tokenizer
        self._record = CompletionRecord(verifier.metrics, begun)
        self._writer = request.writer(model_name, verifier.target_hash, len(ids), lambda: tokenizer.decode(ids))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = trace_of(scope)
        self._session = session = self._opened(0, trace.request)
        try:
            await unless_gone(self._send(session, send, trace.request), receive)
        finally:
            self._session.close()
            self._record.close(
                completion=self._writer.id, account=self._account.name, prompt_tokens=len(self._ids), **trace.fields
            )

    def _opened(self, choice: int, request_id: str) -> EngineSession:
        asked = self._request
        max_new = token_limit(asked, self._verifier.max_context - len(self._ids))
        sampling, rules = asked.sampling(choice), self._rules[choice]
        return EngineSession(
            self._verifier, self._account, self._ids, sampling, rules, max_new, request_id, top=asked.top
        )

    async def _send(self, session: EngineSession, send: Send, request_id: str) -> None:
        try:
            with self._request.named():
                try:
                    await session.opened()  # before a stream begins, so that a refusal has a status of its own
                except Exception as error:
                    self._record.finish(ERROR)
                    raise as_api_error(error) from None
                await send_answer(send, self._request, self._writer, self._answers(request_id))
        except ApiError as error:
            await send_error(send, error)

    async def _answers(self, request_id: str) -> AsyncIterator[Delta | Ending]:
        """All choices. Raises ApiError, whatever went wrong."""
        ending = None
        try:
            for choice in range(self._request.choices):
                if choice:
                    self._session.close()
                    self._account.streams += 1
                    self._session = self._opened(choice, request_id)
                    await self._session.opened()
                async for part in self._answer(self._session):
                    ending = part if isinstance(part, Ending) else ending
                    yield part
        except Exception as error:
            self._record.finish(ERROR)
            raise as_api_error(error) from None
        if ending is not None:
            self._record.finish(ending.finish_reason)

    async def _answer(self, session: EngineSession) -> AsyncIterator[Delta | Ending]:
        text, stops = Detokeniser(self._tokenizer.decode, self._tokenizer.special_ids), StopStrings(self._request.stops)
        drawn, reason, chances = 0, FinishReason.LENGTH, list[TokenChances]()
        async for token in session.tokens():
            drawn += 1
            self._record.token()
            piece = stops.push(text.push(token.token)) if token.is_text else ""
            if token.is_text and token.chances:
                chances.append(self._reported(token.chances))
            if token.finish_reason is not None:
                reason = token.finish_reason
                piece += stops.push(text.flush())
                piece += stops.flush()
            if piece or (chances and token.finish_reason is not None):
                yield Delta(piece, chances=chances)
                chances = []
            if stops.hit:
                session.close()
                reason = FinishReason.STOP
                break
        drafted, accepted = session.drafted
        yield Ending(reason, drawn, drafted=drafted, accepted=accepted)

    def _reported(self, chances: Chances) -> TokenChances:
        each = [TokenChance(*self._tokenizer.spelling(token), logprob) for token, logprob in chances]
        return TokenChances(each[0], each[1:])


def as_api_error(error: Exception) -> ApiError:
    """The error itself, or a 500 for an unexpected one, which is logged without its values, as they may hold text."""
    if isinstance(error, ApiError):
        return error
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("completion failed", error=type(error).__name__, where=where)
    return ApiError(500, "the server failed on this request; its log says where", code="internal_error")
