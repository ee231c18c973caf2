"""`outrider serve`: an OpenAI-style endpoint on this device, so that apps gain the cloud by one URL.

Answers are given one after the other. Content is verified text; what the device wrote alone travels in the extension
field `outrider` = {"state", "provisional"} of a chunk, and becomes content only where an answer ends without the
verifier (`unverified="end"`), marked {"unverified": true}. A page in a browser may not ask: requests with an Origin are
refused unless it is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Collection
from typing import Any, Literal

import msgspec
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
    send_events,
    send_json,
    unless_gone,
)
from outrider_core.chat_api.completions import ApiError, ChatRequest, Wording, check_model, model_card, parse, usage_of

#: requests that may wait behind the one that is answered
MOST_WAITING = 8
RETRY_SECONDS = 2
#: tokens kept free for an answer whose request names no length
USUAL_LENGTH = 256
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

Unverified = Literal["end", "never"]


class Endpoint:
    """An ASGI app around one runtime, which must be entered. origins: of pages that may ask; key: a Bearer token that
    requests must carry, "" for none.
    """

    def __init__(
        self, runtime: EdgeRuntime, *, unverified: Unverified = "end", origins: Collection[str] = (), key: str = ""
    ) -> None:
        self.runtime, self.unverified, self.origins, self.key = runtime, unverified, frozenset(origins), key
        self.model = runtime.bundle.manifest.target
        self._card = model_card(self.model, int(time.time()))
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
            await send_json(send, error.body(), error.status, error.headers)

    async def _route(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        if path == "/healthz":
            linked = bool(self.runtime.link and self.runtime.link.welcome)
            return await send_json(send, {"status": "ok", "link": linked})
        self._admit(headers)
        match method, path.rstrip("/").split("/")[1:]:
            case "GET", ["v1", "models"]:
                await send_json(send, {"object": "list", "data": [self._card]})
            case "GET", ["v1", "models", *name]:
                check_model("/".join(name), self.model)
                await send_json(send, self._card)
            case "POST", ["v1", "chat", "completions"]:
                await self._complete(receive, send)
            case _:
                raise ApiError(404, f"{method} {path} is not served here; POST /v1/chat/completions is")

    def _admit(self, headers: dict[str, str]) -> None:
        """Raise ApiError for whom may not ask."""
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins:
            raise ApiError(403, f"pages of {origin} may not ask; start with --allow-origin {origin}", code="origin")
        host = headers.get("host", "").rsplit(":", 1)[0]
        if not self.key and host not in LOOPBACK:  # a name that a page made point here
            raise ApiError(403, f"{host!r} is not this device's own name; ask 127.0.0.1", code="host")
        given, wanted = headers.get("authorization", ""), f"Bearer {self.key}"
        if self.key and not hmac.compare_digest(given.encode(), wanted.encode()):
            raise ApiError(401, "this endpoint wants its key as a Bearer token", code="invalid_api_key")

    async def _complete(self, receive: Receive, send: Send) -> None:
        asked = parse(await read_body(receive))
        check_model(asked.model, self.model)
        fitted = self._fit(asked)
        if self._waiting >= MOST_WAITING:
            raise ApiError(429, "too many requests wait already", None, "server_busy", RETRY_SECONDS)
        self._waiting += 1
        try:
            async with self._turn:
                answer = _Answer(self, asked, fitted)
                await unless_gone(answer.stream(send) if asked.stream else answer.whole(send), receive)
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
        self._wording = Wording(endpoint.model, endpoint.runtime.bundle.manifest.target_hash)
        self._last: Finished | None = None

    async def _events(self) -> AsyncIterator[Event]:
        asked, runtime = self._asked, self._endpoint.runtime
        sampling = asked.sampling
        room = runtime.bundle.manifest.max_context - len(self._ids)
        events = runtime.generate(
            self._ids, max_new_tokens=min(asked.max_completion_tokens or asked.max_tokens or room, room),
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
            seed=sampling.seed, stop=asked.stops,
        )  # fmt: skip
        try:
            async for event in events:
                if isinstance(event, Finished):
                    self._last = event
                yield event
        except LinkRefused as error:
            raise ApiError(502, str(error), code="verifier_refused") from None
        except DrafterFailed as error:
            raise ApiError(500, str(error), code="drafter_failed") from None
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def whole(self, send: Send) -> None:
        async for _ in self._events():
            pass
        assert self._last is not None
        text, unverified = self._ending(self._last)
        body = self._wording.whole(
            self._last.verified + text, self._reason(self._last), self._usage(self._last),
            outrider={"state": "unverified" if unverified else "verified", "unverified": unverified, **self._dropped},
        )  # fmt: skip
        await send_json(send, body)

    async def stream(self, send: Send) -> None:
        await send_events(send, self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The data of all events. An error that comes now can only be an event itself."""
        options, word = self._asked.stream_options, self._wording.chunk
        usage = options is not None and bool(options.include_usage)
        unknown: dict[str, Any] = {"usage": None} if usage else {}
        sent, mark = "", {"state": "connecting", "provisional": ""}
        try:
            yield word({"role": "assistant", "content": ""}, **unknown)
            async for event in self._events():
                now = {"state": event.state if isinstance(event, LinkState) else mark["state"],
                       "provisional": event.provisional}  # fmt: skip
                new = event.verified[len(sent) :]
                if new or now != mark:
                    more: dict[str, Any] = {} if now == mark else {"outrider": now}
                    yield word({"content": new} if new else {}, **unknown, **more)
                sent, mark = event.verified, now
            assert self._last is not None
            text, unverified = self._ending(self._last)
            if text:
                yield word({"content": text}, outrider={"unverified": True}, **unknown)
            yield word({}, self._reason(self._last), outrider={"unverified": unverified, **self._dropped}, **unknown)
            if usage:
                yield word(None, usage=self._usage(self._last))
        except ApiError as error:
            yield msgspec.json.encode(error.body())
        yield b"[DONE]"

    def _ending(self, last: Finished) -> tuple[str, bool]:
        """Text behind the verified one that becomes content after all, and whether anything is unverified."""
        text = last.provisional if self._endpoint.unverified == "end" else ""
        return text, bool(text) or last.stats.adopted > 0

    def _reason(self, last: Finished) -> str:
        whole = last.reason == "stop" or (last.reason == "unverified" and self._endpoint.unverified == "end")
        ended = last.token_ids[-1:] and last.token_ids[-1] in self._endpoint.runtime.bundle.manifest.eos_ids
        return "stop" if last.reason == "stop" or (whole and ended) else "length"

    def _usage(self, last: Finished) -> dict[str, int]:
        drawn = len(last.token_ids) if self._endpoint.unverified == "end" else last.stats.tokens
        return usage_of(len(self._ids), drawn)


async def run(endpoint: Endpoint, host: str, port: int) -> None:
    """Serve until a signal says otherwise."""
    config = uvicorn.Config(
        endpoint, host=host, port=port, log_level="warning", lifespan="off", ws="none", server_header=False,
        timeout_keep_alive=30, limit_concurrency=64,
    )  # fmt: skip
    async with endpoint.runtime:
        with contextlib.suppress(KeyboardInterrupt):
            await uvicorn.Server(config).serve()
