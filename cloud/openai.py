"""OpenAI-compatible HTTP: `POST /v1/chat/completions` and `GET /v1/models`. The target decodes alone.

Stock clients of the OpenAI API talk to the verifier through these routes. Each request is a session of its
own in the engine: OPEN, GENERATE, and CLOSE in every case, also when the client goes away. Sampling is the
devices' (`outrider_core.protocol.sampling`), so a seed gives the same text here and there. Fields that would change the
output and are not supported are refused by name; other unknown fields are ignored. No request text is logged.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cloud import log
from cloud.auth import Account
from cloud.jobs import Job, Reply
from cloud.service import Verifier
from outrider_core.chat_api.asgi import ClientGone, read_body, send_events, send_json, unless_gone
from outrider_core.chat_api.completions import ApiError, ChatRequest, Wording, check_model, model_card, parse, usage_of
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.text import Detokeniser, StopStrings
from outrider_core.protocol.wire import (
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
#: how often a request that waits looks whether the engine thread still lives
PATIENCE_SECONDS = 1.0


def openai_routes(
    verifier: Verifier, model_name: str, tokenizer: Any, admit: Callable[[Request], Account]
) -> list[Route]:
    """Routes for the app of `verifier`, which serves its target as `model_name`.

    tokenizer: the target's own transformers tokenizer. Where it has no chat template, every completion is
    refused with a message that says so. admit(request): whose request it is, or ApiError.
    """
    card = model_card(model_name, int(time.time()))
    skip = frozenset(tokenizer.all_special_ids)
    # away from the event loop, as a long prompt takes a while; one thread, as tokenizers are not made for more
    worker = ThreadPoolExecutor(1, "tokenizer")

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def encode(conversation: list[dict[str, str]]) -> list[int]:
        if not tokenizer.chat_template:
            raise ApiError(400, f"{model_name} has no chat template; serve an instruct model", "model")
        try:
            ids: list[int] = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise ApiError(400, f"the chat template of {model_name} refuses this: {error}", "messages") from None
        return ids

    async def chat(request: Request) -> Response | _Completion:
        account = admit(request)
        _check_ready(verifier)
        _check_limits(account, 0)  # one in debt has no prompt tokenised
        asked = parse(await read_body(request.receive))
        check_model(asked.model, model_name)
        ids = await asyncio.get_running_loop().run_in_executor(worker, encode, asked.conversation)
        _check_prompt(ids, verifier)
        _check_limits(account, len(ids))
        return _Completion(verifier, account, model_name, asked, ids, Detokeniser(decode, skip))

    async def models(request: Request) -> Response:
        admit(request)
        return _json({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        admit(request)
        check_model(request.path_params["name"], model_name)
        return _json(card)

    return [
        Route("/v1/chat/completions", _answered(chat), methods=["POST"]),
        Route("/v1/models", _answered(models)),
        Route("/v1/models/{name:path}", _answered(model)),
    ]


def _answered(
    endpoint: Callable[[Request], Awaitable[Response | _Completion]],
) -> Callable[[Request], Awaitable[Response | _Completion]]:
    """The endpoint with its exceptions turned into answers."""

    async def answered(request: Request) -> Response | _Completion:
        try:
            return await endpoint(request)
        except ClientGone:
            return Response(status_code=400)  # nobody reads it
        except Exception as error:
            return _refusal(error)

    return answered


def _as_api_error(error: Exception) -> ApiError:
    """The error itself, or a 500 for what nobody foresaw; that is logged without values, as they may be text."""
    if isinstance(error, ApiError):
        return error
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("completion failed", error=type(error).__name__, where=where)
    return ApiError(500, "the server failed on this request; its log says where", code="internal_error")


def _refusal(error: Exception) -> Response:
    refusal = _as_api_error(error)
    return _json(refusal.body(), refusal.status, refusal.headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _check_ready(verifier: Verifier) -> None:
    if not verifier.ready:
        raise ApiError(
            503, "the server takes no requests now; try again or ask another", None, "not_ready", RETRY_SECONDS
        )


def _check_prompt(ids: list[int], verifier: Verifier) -> None:
    if not ids:
        raise ApiError(400, "the chat template makes an empty prompt of these messages", "messages")
    if len(ids) >= verifier.max_context:
        text = f"the prompt has {len(ids)} tokens; at most {verifier.max_context - 1} fit this server's context"
        raise ApiError(400, text, "messages", "context_length_exceeded")
    if max(ids) >= verifier.vocab_size:  # would fail the step of every session
        raise ApiError(400, f"the prompt holds token {max(ids)}, which the model does not know", "messages")


def _check_limits(account: Account, prompt: int) -> None:
    """Charge the prompt; each token that is written counts as a verify when it comes."""
    if account.streams >= account.limits.sessions:
        text = f"this token's {account.limits.sessions} sessions are all in use"
        raise ApiError(429, text, None, "rate_limit_exceeded", RETRY_SECONDS)
    if wait := account.charge(prefill=prompt, verifies=0):
        text = "over this token's limit of tokens per second"
        raise ApiError(429, text, None, "rate_limit_exceeded", math.ceil(wait))


@dataclass(frozen=True)
class _Drawn:
    """A token. last: "stop" or "length" where nothing follows; `ends`: it is an end-of-answer token, not text."""

    token: int
    last: str | None
    ends: bool


class _Answer:
    """One session of the engine that draws tokens until `close`, which frees it there.

    Replies wait here for a slow reader, at most `max_new` of them. The session is freed with the last reply,
    whether or not the client has read it.
    """

    def __init__(self, verifier: Verifier, account: Account, ids: list[int], sampling: Sampling, max_new: int) -> None:
        self._verifier, self._loop = verifier, asyncio.get_running_loop()
        self._account = account
        account.streams += 1
        self._replies: asyncio.Queue[tuple[Reply, bool]] = asyncio.Queue()
        self._session = session = secrets.token_bytes(16)
        self._closed = False
        opening = Open(0, session, 0, pack_ids(ids), len(ids), sampling)
        self._opening = Job(session, opening, self._opened, tokens=ids, owner=account.name)
        self._round = Job(session, Generate(0, 1, len(ids), max_new), self._post, owner=account.name)
        verifier.submit(self._opening)
        verifier.submit(self._round)

    async def opened(self) -> None:
        """Once the engine has made room. Raises ApiError where there is none."""
        reply, _ = await self._next()
        if not isinstance(reply, Opened):
            raise _failed()

    async def tokens(self) -> AsyncIterator[_Drawn]:
        """Tokens as the target draws them. Raises ApiError where the engine fails."""
        last = False
        while not last:
            reply, last = await self._next()
            if isinstance(reply, Verdict):
                ends = reply.finish == FINISH_EOS
                yield _Drawn(reply.bonus, ("stop" if ends else "length") if last else None, ends)
            elif last:
                raise _failed()

    def close(self) -> None:
        """Stop drawing and forget the session. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._account.streams -= 1
            self._opening.cancelled = self._round.cancelled = True
            self._verifier.submit(Job(self._session, Close(0), lambda reply, done: None))

    def _opened(self, reply: Reply, done: bool) -> None:
        """In the engine thread. The OPEN itself asks for feature rows, which nobody wants here: give it up.

        The GENERATE behind it fills the cache without them.
        """
        self._opening.cancelled = True
        self._post(reply, done and isinstance(reply, Error))

    def _post(self, reply: Reply, done: bool) -> None:
        """In the engine thread."""
        with suppress(RuntimeError):  # the event loop has ended, and with it all who could wait
            self._loop.call_soon_threadsafe(self._deliver, reply, done)

    def _deliver(self, reply: Reply, done: bool) -> None:
        self._replies.put_nowait((reply, done))
        if isinstance(reply, Verdict):
            self._account.spend(verifies=1)
        if done:
            self.close()

    async def _next(self) -> tuple[Reply, bool]:
        while True:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    reply, done = await self._replies.get()
                break
            except TimeoutError:
                if not self._verifier.alive:
                    raise ApiError(503, "the server stopped; ask another", None, "not_ready", RETRY_SECONDS) from None
        if isinstance(reply, Error):
            raise _engine_error(reply)
        return reply, done


def _engine_error(error: Error) -> ApiError:
    if error.code in (ERR_BUSY, ERR_UNKNOWN):  # ERR_UNKNOWN: its session gave way to others at once
        seconds = max(RETRY_SECONDS, math.ceil(error.retry_after_ms / 1000))
        return ApiError(429, "the server is busy; try again later", None, "server_busy", seconds)
    return _failed()


def _failed() -> ApiError:
    return ApiError(500, "the server failed on this request; send it again", code="internal_error")


class _Completion:
    """An ASGI response: opens the session, writes one JSON object or a stream of events, closes the session."""

    def __init__(
        self, verifier: Verifier, account: Account, model_name: str, asked: ChatRequest, ids: list[int],
        detokeniser: Detokeniser,
    ) -> None:  # fmt: skip
        self._verifier, self._account, self._asked, self._ids = verifier, account, asked, ids
        self._detokeniser, self._stops = detokeniser, StopStrings(asked.stops)
        self._wording = Wording(model_name, verifier.target_hash)
        self._drawn = 0
        self._finish_reason: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room = self._verifier.max_context - len(self._ids)
        wanted = self._asked.max_completion_tokens or self._asked.max_tokens or room
        answer = _Answer(self._verifier, self._account, self._ids, self._asked.sampling, min(wanted, room))
        write = self._stream if self._asked.stream else self._whole
        try:
            await unless_gone(write(answer, scope, receive, send), receive)
        finally:
            answer.close()

    async def _whole(self, answer: _Answer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await answer.opened()
            text = "".join([piece async for piece in self._pieces(answer)])
        except Exception as error:
            await _refusal(error)(scope, receive, send)
            return
        await send_json(send, self._wording.whole(text, self._finish_reason, self._usage()))

    async def _stream(self, answer: _Answer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await answer.opened()
        except Exception as error:
            await _refusal(error)(scope, receive, send)
            return
        await send_events(send, self._events(answer))

    async def _events(self, answer: _Answer) -> AsyncIterator[bytes]:
        """The data of all events. An error that comes now can only be an event itself."""
        options = self._asked.stream_options
        usage = options is not None and bool(options.include_usage)
        unknown: dict[str, Any] = {"usage": None} if usage else {}
        word = self._wording.chunk
        try:
            yield word({"role": "assistant", "content": ""}, **unknown)
            async for piece in self._pieces(answer):
                yield word({"content": piece}, **unknown)
            yield word({}, self._finish_reason, **unknown)
            if usage:
                yield word(None, usage=self._usage())
        except Exception as error:
            yield msgspec.json.encode(_as_api_error(error).body())
        yield b"[DONE]"

    async def _pieces(self, answer: _Answer) -> AsyncIterator[str]:
        """The answer's text, no piece empty. Sets the reason it ended for and counts the tokens drawn."""
        text, stops = self._detokeniser, self._stops
        async for drawn in answer.tokens():
            self._drawn += 1
            piece = "" if drawn.ends else stops.push(text.push(drawn.token))
            if drawn.last is not None:
                piece += stops.push(text.flush())
                piece += stops.flush()
            if piece:
                yield piece
            if stops.hit:
                answer.close()
                self._finish_reason = "stop"
                return
            self._finish_reason = drawn.last

    def _usage(self) -> dict[str, int]:
        return usage_of(len(self._ids), self._drawn)
