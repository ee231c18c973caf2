"""`outrider serve`: an OpenAI-style endpoint on this device, so that apps use the runtime by changing one URL.

Requests are answered one at a time. Content is verified text; what the device wrote alone travels in the extension
field `outrider` = {"state", "provisional"} of a chunk. Where an answer ends without the verifier it becomes content
(`unverified="end"`), marked {"unverified": true}. Web pages are refused unless their Origin is allowed; those that are
get what browsers ask for (CORS).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Literal

import uvicorn

from edge_runtime.answer.constraints import ConstraintUnsupported
from edge_runtime.answer.threads import DrafterFailed
from edge_runtime.context import ConversationTooLong, FittedMessages
from edge_runtime.events import Event, Finished, LinkState, Provisional
from edge_runtime.link.websocket import EngineFailed, LinkRefused
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.states import FinishReason as EndReason
from edge_runtime.session.states import Writer
from outrider.cli.serve_protocol import DeviceProtocol
from outrider_core.chat.api.asgi import (
    ClientGone,
    Message,
    Receive,
    Send,
    read_body,
    send_answer,
    send_error,
    send_json,
    unless_gone,
)
from outrider_core.chat.api.constraints import field_of
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import Request, check_model, token_limit
from outrider_core.chat.api.replies import Delta, Ending, FinishReason, model_card, model_list
from outrider_core.chat.api.routes import PARSERS
from outrider_core.protocol.constraint import Constraint
from outrider_core.serving import PageRules

#: requests that may wait behind the one being answered
MOST_WAITING = 8
RETRY_SECONDS = 2
#: seconds that a client may take to read what was sent; answers are written meanwhile, and the next one's turn comes
READ_SECONDS = 30.0
#: for how long browsers may remember what a page is allowed
PREFLIGHT_SECONDS = 600
#: tokens kept free for an answer whose request names no length
USUAL_LENGTH = 256

#: parts of an answer as they are written; None at its end, or an exception in its place
_Parts = asyncio.Queue[Delta | Ending | Exception | None]
Unverified = Literal["end", "never"]


class Endpoint:
    """An ASGI app around one runtime, which must have been entered.

    unverified: what becomes of text that no verifier has seen when the answer ends. origins: of web pages that may use
    the endpoint. key: the Bearer token that requests must carry; "": none.
    """

    def __init__(
        self,
        runtime: EdgeRuntime,
        *,
        unverified: Unverified = "end",
        origins: Collection[str] = (),
        key: str = "",
    ) -> None:
        self.runtime, self.unverified, self.origins, self.key = runtime, unverified, frozenset(origins), key
        self._pages = PageRules(origins, needs_token=bool(key))
        self.model = runtime.bundle.manifest.target
        self._card = model_card(self.model)
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        more = {}
        if headers.get("origin") in self.origins:
            more = {"access-control-allow-origin": headers["origin"], "vary": "Origin"}
        try:
            await self._route(scope, headers, receive, _patient(send, more))
        except ClientGone:
            pass
        except ApiError as error:  # the body may be unread: nobody is waited for
            with contextlib.suppress(ClientGone):
                await send_error(_patient(send, {**more, "connection": "close"}), error)

    async def _route(self, scope: Message, headers: dict[str, str], receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/healthz":
            linked = bool(self.runtime.link and self.runtime.link.welcome)
            return await send_json(send, {"status": "ok", "link": linked})
        self._check_page(headers)
        if method == "OPTIONS" and "origin" in headers:
            return await _allow(send)
        self._check_key(headers)
        match method, path.rstrip("/").split("/")[1:]:
            case "GET", ["v1", "models"]:
                await send_json(send, model_list(self._card))
            case "GET", ["v1", "models", *name]:
                check_model("/".join(name), self.model)
                await send_json(send, self._card)
            case "POST", _ if parsed := PARSERS.get(path.rstrip("/")):
                await self._complete(parsed, receive, send)
            case _:
                known = path.rstrip("/") in (*PARSERS, "/v1/models")
                text = f"{method} {path} is not served here; POST {', '.join(PARSERS)} and GET /v1/models are"
                raise ApiError(405 if known else 404, text, code="method_not_allowed" if known else "unknown_url")

    def _check_page(self, headers: dict[str, str]) -> None:
        """Raise ApiError where a web page asks that was not allowed to."""
        if self._pages.foreign(headers):
            origin = headers["origin"]
            raise ApiError(403, f"pages of {origin} are refused; start with --allow-origin {origin}", code="origin")
        if self._pages.rebound(headers):
            raise ApiError(403, f"{headers.get('host')!r} is not a name of this device; use 127.0.0.1", code="host")

    def _check_key(self, headers: dict[str, str]) -> None:
        """Raise ApiError unless the request carries the key, where there is one."""
        given = headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        if self.key and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise ApiError(401, "this endpoint needs its key as a Bearer token", code="invalid_api_key")

    async def _complete(self, parsed: Callable[[bytes], Request], receive: Receive, send: Send) -> None:
        asked = parsed(await read_body(receive))
        check_model(asked.model, self.model)
        with asked.named():
            if asked.top is not None:
                text = "log probabilities are told by the verifier's own endpoint: its verdicts carry tokens alone"
                raise ApiError(400, text, "logprobs", "unsupported_parameter")
            fitted = self._fit(asked)
            self._check_constraint(asked, fitted)
        if self._waiting >= MOST_WAITING:
            raise ApiError(429, "too many requests are waiting already", None, "server_busy", RETRY_SECONDS)
        answer, parts = _Answer(self, asked, fitted), _Parts()
        writing = asyncio.create_task(self._write(answer, parts))
        self._waiting += 1
        writing.add_done_callback(self._written)
        try:
            await unless_gone(answer.send(send, _taken(parts)), receive)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, answer: _Answer, parts: _Parts) -> None:
        """Write `answer` in its turn, at the runtime's own pace, however slowly its client reads."""
        try:
            async with self._turn:
                async for part in answer.parts():
                    parts.put_nowait(part)
        except Exception as error:
            parts.put_nowait(error)
        parts.put_nowait(None)

    def _written(self, writing: asyncio.Task[None]) -> None:
        self._waiting -= 1

    def _check_constraint(self, asked: Request, fitted: FittedMessages) -> None:
        """Raise ApiError where the answer is to be held to what cannot be."""
        constraint = asked.constraint(len(fitted.ids), self.runtime.bundle.manifest.vocab_size)
        if constraint and (why := self.runtime.unsupported(constraint)):
            raise ApiError(400, why, field_of(constraint), "unsupported_parameter")

    def _fit(self, asked: Request) -> FittedMessages:
        if asked.conversation is None:
            return FittedMessages([], [], self._plain_prompt(asked.plain_prompt))
        tools = asked.tool_use.prompt if asked.tool_use else ()
        try:
            return self.runtime.fit_messages(asked.conversation, asked.length or USUAL_LENGTH, tools)
        except ConversationTooLong as error:
            raise ApiError(400, str(error), "messages", "context_length_exceeded") from None
        except Exception as error:  # a template may raise anything
            raise ApiError(400, f"the chat template of {self.model} refuses this: {error}", "messages") from None

    def _plain_prompt(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt that no chat template writes. Raises ApiError where it does not fit."""
        manifest = self.runtime.bundle.manifest
        ids = prompt if isinstance(prompt, list) else self.runtime.bundle.chat.encode_prompt(prompt)
        if len(ids) >= manifest.max_context:
            text = f"the prompt has {len(ids)} tokens; at most {manifest.max_context - 1} fit this device's context"
            raise ApiError(400, text, "prompt", "context_length_exceeded")
        if not ids or max(ids) >= manifest.vocab_size:
            text = f"the prompt needs token ids from 0 to {manifest.vocab_size - 1}"
            raise ApiError(400, text, "prompt", "invalid_value")
        return ids


class _Answer:
    """The answer to one request, in all its choices."""

    def __init__(self, endpoint: Endpoint, asked: Request, fitted: FittedMessages) -> None:
        self._endpoint, self._asked, self._ids = endpoint, asked, fitted.ids
        #: says, beside the content, how many of the oldest messages did not fit
        self._dropped = {"dropped_messages": len(fitted.dropped)} if fitted.dropped else {}
        self._manifest = endpoint.runtime.bundle.manifest
        self._writer = asked.writer(
            endpoint.model, self._manifest.target_hash, len(fitted.ids), lambda: endpoint.runtime.decode(fitted.ids)
        )

    async def send(self, send: Send, parts: AsyncIterator[Delta | Ending]) -> None:
        """Send the answer, made of `parts`, as it was asked for."""
        await send_answer(send, self._asked, self._writer, parts)

    async def parts(self) -> AsyncIterator[Delta | Ending]:
        """All choices, one after another."""
        for choice in range(self._asked.choices):
            async for part in self._choice(choice):
                yield part

    async def _events(self, choice: int) -> AsyncIterator[Event]:
        asked, manifest = self._asked, self._manifest
        constraint = self._constraint()
        events = self._endpoint.runtime.answer_ids(
            self._ids,
            asked.sampling(choice),
            token_limit(asked, manifest.max_context - len(self._ids)),
            asked.stops,
            constraint,
        )
        try:
            async for event in events:
                yield event
        except ConstraintUnsupported as error:
            with asked.named():
                raise ApiError(400, str(error), field_of(constraint), "invalid_schema") from None
        except (LinkRefused, EngineFailed) as error:
            raise ApiError(502, str(error), code="verifier_refused") from None
        except DrafterFailed as error:
            raise ApiError(500, str(error), code="drafter_failed") from None
        finally:
            await events.aclose()

    async def _choice(self, choice: int) -> AsyncIterator[Delta | Ending]:
        """Verified text as it grows; the device's own beside it, in the extension field where that changes."""
        sent, mark = "", {"state": "connecting", "provisional": "", "writer": Writer.TARGET}
        async for event in self._events(choice):
            state = event.state if isinstance(event, LinkState) else mark["state"]
            writer = event.writer if isinstance(event, Provisional) else mark["writer"]
            writer = writer if event.provisional else Writer.TARGET
            now = {"state": state, "provisional": event.provisional, "writer": writer}
            new = event.verified[len(sent) :]
            if new or now != mark:
                yield Delta(
                    new, {} if now == mark else {"outrider": now}, idle=not (event.verified or event.provisional)
                )
            sent, mark = event.verified, now
        assert isinstance(event, Finished)
        if event.reason == EndReason.UNREACHABLE and not event.token_ids and self._constraint():
            raise ApiError(502, f"no verifier wrote this answer: {event.detail}", code="verifier_refused")
        text = event.provisional if self._endpoint.unverified == "end" else ""
        if text:
            yield Delta(text, {"outrider": {"unverified": True}})
        yield self._ending(event, unverified=bool(text) or event.stats.adopted > 0)

    def _constraint(self) -> Constraint | None:
        """What the answer is held to."""
        return self._asked.constraint(len(self._ids), self._manifest.vocab_size)

    def _ending(self, last: Finished, unverified: bool) -> Ending:
        keeps_unverified = self._endpoint.unverified == "end"
        drawn = len(last.token_ids) if keeps_unverified else last.stats.tokens
        written = Counter[str]()
        for span in last.spans:
            written[span.writer] += span.end - span.begin
        mark: dict[str, Any] = {"unverified": unverified, "tokens_by": dict(written), **self._dropped}
        if not self._asked.streams:
            mark["state"] = "unverified" if unverified else "verified"
        accepted = round(max(last.stats.tau - 1.0, 0.0) * last.stats.rounds)
        reason = self._finish_reason(last, keeps_unverified)
        return Ending(reason, drawn, {"outrider": mark}, last.stats.nodes, accepted)

    def _finish_reason(self, last: Finished, keeps_unverified: bool) -> FinishReason:
        ended_by_itself = bool(last.token_ids) and last.token_ids[-1] in self._manifest.eos_ids
        if last.reason == "stop" or (last.reason == "unverified" and keeps_unverified and ended_by_itself):
            return FinishReason.STOP
        return FinishReason.LENGTH


async def _taken(parts: _Parts) -> AsyncIterator[Delta | Ending]:
    """What was put there, until None. Raises the exception among it."""
    while (part := await parts.get()) is not None:
        if isinstance(part, Exception):
            raise part
        yield part


def _patient(send: Send, headers: dict[str, str]) -> Send:
    """`send` with more headers, for a client that reads. Raises ClientGone where it does not."""
    more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *more]}
        try:
            async with asyncio.timeout(READ_SECONDS):
                await send(message)
        except TimeoutError:
            raise ClientGone from None

    return sent


async def _allow(send: Send) -> None:
    """The reply to a browser that asks whether a page may ask."""
    headers = {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "authorization, content-type",
        "access-control-allow-private-network": "true",
        "access-control-max-age": str(PREFLIGHT_SECONDS),
    }
    start = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 204, "headers": start})
    await send({"type": "http.response.body", "body": b""})


async def run(endpoint: Endpoint, bound: list[socket.socket]) -> None:
    """Serve there until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        endpoint,
        log_level="warning",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=30,
        http=DeviceProtocol,
    )
    async with endpoint.runtime:
        with contextlib.suppress(KeyboardInterrupt):
            await uvicorn.Server(config).serve(sockets=bound)
