"""`outrider serve`: an OpenAI-style endpoint on this device, so that apps use the runtime by changing one URL.

Requests are answered one at a time. Content is verified text; what the device wrote alone travels in the extension
field `outrider` = {"state", "provisional"} of a chunk. Where an answer ends without the verifier it becomes content
(`unverified="end"`), marked {"unverified": true}. Web pages are refused unless their Origin is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Collection
from typing import Any, Literal

import uvicorn

from edge_runtime.context import ConversationTooLong, FittedMessages
from edge_runtime.events import Event, Finished, LinkState
from edge_runtime.link import LinkRefused
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.worker import DrafterFailed
from outrider_core.chat_api.asgi import (
    ClientGone,
    Message,
    Receive,
    Send,
    read_body,
    send_completion,
    send_error,
    send_json,
    unless_gone,
)
from outrider_core.chat_api.errors import ApiError
from outrider_core.chat_api.replies import CompletionWriter, Delta, Ending, FinishReason, model_card, model_list
from outrider_core.chat_api.requests import ChatRequest, check_model, parse

#: requests that may wait behind the one being answered
MOST_WAITING = 8
RETRY_SECONDS = 2
#: tokens kept free for an answer whose request names no length
USUAL_LENGTH = 256
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

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
        self.model = runtime.bundle.manifest.target
        self._card = model_card(self.model)
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._route(scope, receive, send)
        except ClientGone:
            pass
        except ApiError as error:
            await send_error(send, error)

    async def _route(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        if path == "/healthz":
            linked = bool(self.runtime.link and self.runtime.link.welcome)
            return await send_json(send, {"status": "ok", "link": linked})
        self._admit(headers)
        match method, path.rstrip("/").split("/")[1:]:
            case "GET", ["v1", "models"]:
                await send_json(send, model_list(self._card))
            case "GET", ["v1", "models", *name]:
                check_model("/".join(name), self.model)
                await send_json(send, self._card)
            case "POST", ["v1", "chat", "completions"]:
                await self._complete(receive, send)
            case _:
                raise ApiError(404, f"{method} {path} is not served here; POST /v1/chat/completions is")

    def _admit(self, headers: dict[str, str]) -> None:
        """Raise ApiError unless the request is allowed."""
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins:
            raise ApiError(403, f"pages of {origin} are refused; start with --allow-origin {origin}", code="origin")
        host = headers.get("host", "").rsplit(":", 1)[0]
        if not self.key and host not in LOOPBACK:  # DNS rebinding: a page's own name may resolve to this device
            raise ApiError(403, f"{host!r} is not a name of this device; use 127.0.0.1", code="host")
        given, wanted = headers.get("authorization", ""), f"Bearer {self.key}"
        if self.key and not hmac.compare_digest(given.encode(), wanted.encode()):
            raise ApiError(401, "this endpoint needs its key as a Bearer token", code="invalid_api_key")

    async def _complete(self, receive: Receive, send: Send) -> None:
        asked = parse(await read_body(receive))
        check_model(asked.model, self.model)
        fitted = self._fit(asked)
        if self._waiting >= MOST_WAITING:
            raise ApiError(429, "too many requests are waiting already", None, "server_busy", RETRY_SECONDS)
        self._waiting += 1
        try:
            async with self._turn:
                answer = _Answer(self, asked, fitted)
                await unless_gone(answer.send(send), receive)
        finally:
            self._waiting -= 1

    def _fit(self, asked: ChatRequest) -> FittedMessages:
        length = asked.max_completion_tokens or asked.max_tokens
        try:
            return self.runtime.fit_messages(asked.conversation, length or USUAL_LENGTH)
        except ConversationTooLong as error:
            raise ApiError(400, str(error), "messages", "context_length_exceeded") from None
        except Exception as error:  # a template may raise anything
            raise ApiError(400, f"the chat template of {self.model} refuses this: {error}", "messages") from None


class _Answer:
    """One completion."""

    def __init__(self, endpoint: Endpoint, asked: ChatRequest, fitted: FittedMessages) -> None:
        self._endpoint, self._asked, self._ids = endpoint, asked, fitted.ids
        #: says, beside the content, how many of the oldest messages did not fit
        self._dropped = {"dropped_messages": len(fitted.dropped)} if fitted.dropped else {}
        self._manifest = endpoint.runtime.bundle.manifest
        self._writer = CompletionWriter(endpoint.model, self._manifest.target_hash, len(fitted.ids))

    async def send(self, send: Send) -> None:
        """Send the answer as it was asked for."""
        await send_completion(send, self._asked, self._writer, self._parts())

    async def _events(self) -> AsyncIterator[Event]:
        asked, sampling = self._asked, self._asked.sampling
        events = self._endpoint.runtime.generate(
            self._ids,
            max_new_tokens=asked.token_limit(self._manifest.max_context - len(self._ids)),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop=asked.stops,
        )
        try:
            async for event in events:
                yield event
        except LinkRefused as error:
            raise ApiError(502, str(error), code="verifier_refused") from None
        except DrafterFailed as error:
            raise ApiError(500, str(error), code="drafter_failed") from None
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def _parts(self) -> AsyncIterator[Delta | Ending]:
        """Verified text as it grows; the device's own beside it, in the extension field where that changes."""
        sent, mark = "", {"state": "connecting", "provisional": ""}
        async for event in self._events():
            state = event.state if isinstance(event, LinkState) else mark["state"]
            now = {"state": state, "provisional": event.provisional}
            new = event.verified[len(sent) :]
            if new or now != mark:
                yield Delta(new, {} if now == mark else {"outrider": now})
            sent, mark = event.verified, now
        assert isinstance(event, Finished)
        text = event.provisional if self._endpoint.unverified == "end" else ""
        if text:
            yield Delta(text, {"outrider": {"unverified": True}})
        yield self._ending(event, unverified=bool(text) or event.stats.adopted > 0)

    def _ending(self, last: Finished, unverified: bool) -> Ending:
        keeps_unverified = self._endpoint.unverified == "end"
        drawn = len(last.token_ids) if keeps_unverified else last.stats.tokens
        mark: dict[str, Any] = {"unverified": unverified, **self._dropped}
        if not self._asked.stream:
            mark["state"] = "unverified" if unverified else "verified"
        return Ending(self._finish_reason(last, keeps_unverified), drawn, {"outrider": mark})

    def _finish_reason(self, last: Finished, keeps_unverified: bool) -> FinishReason:
        ended_by_itself = bool(last.token_ids) and last.token_ids[-1] in self._manifest.eos_ids
        if last.reason == "stop" or (last.reason == "unverified" and keeps_unverified and ended_by_itself):
            return FinishReason.STOP
        return FinishReason.LENGTH


async def run(endpoint: Endpoint, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        endpoint,
        host=host,
        port=port,
        log_level="warning",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=30,
        limit_concurrency=64,
    )
    async with endpoint.runtime:
        with contextlib.suppress(KeyboardInterrupt):
            await uvicorn.Server(config).serve()
