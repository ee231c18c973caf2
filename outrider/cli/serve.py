"""`outrider serve`: an OpenAI-style endpoint on this device, so that apps use the runtime by changing one URL.

Requests are answered one at a time. Content is verified text; offline text is sent in the extension field `outrider` =
{"state", "provisional"} of a chunk. If an answer ends without the verifier, that text becomes content
(`unverified="end"`), marked {"unverified": true}. A permanent refusal of the verifier is refused here with its reason;
an unfinished answer that timed out waiting for it is an error too. Web pages are refused unless their Origin is
allowed; allowed ones get the CORS headers that browsers need.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any, Literal

import uvicorn
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse

from edge_runtime.answer.constraints import ConstraintUnsupported
from edge_runtime.answer.threads import DrafterFailed
from edge_runtime.context import LEAST_ROOM, USUAL_ROOM, ConversationTooLong, FittedMessages
from edge_runtime.events import Finished, LinkState, Provisional
from edge_runtime.link.events import EngineFailed, LinkRefused
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.states import Writer
from outrider_core.chat.api.app import api_app, api_routes, probe_routes
from outrider_core.chat.api.constraints import field_of
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import ApiRequest, token_limit
from outrider_core.chat.api.replies import Delta, Ending, ReplyWriter
from outrider_core.http_protocol import KEEP_ALIVE, HttpProtocol
from outrider_core.protocol.ending import COMPLETE, FinishReason
from outrider_core.serving import PageRules, bearer
from outrider_core.tracing import Traced

#: most requests that wait behind the one being answered
MOST_WAITING = 8
RETRY_SECONDS = 2
#: seconds that an answer waits for the verifier once offline writing has stopped, while another request waits
STALLED_SECONDS = 10.0
#: most open sockets; beyond that, the one idle for longest is cut
MOST_SOCKETS = 64
#: seconds that a socket may take to the end of its next request's headers
HEAD_SECONDS = 30.0
#: seconds that a client may read nothing; answers are written meanwhile, and the next one's turn comes
READ_SECONDS = 30.0
#: seconds that the answer in progress may take after a signal
SHUTDOWN_SECONDS = 20.0
#: and further seconds for clients to read why there is no more
LAST_SECONDS = 1.0

Unverified = Literal["end", "never"]


class Endpoint:
    """The app of one entered runtime, and its sockets. Any ASGI server can serve `app`.

    Args:
        unverified: Treatment of unverified text when the answer ends.
        origins: Of web pages that may use the endpoint.
        key: The Bearer token that requests must carry; "": none.
        aliases: Further model names that are accepted, such as one built into an app.
    """

    def __init__(
        self,
        runtime: EdgeRuntime,
        *,
        unverified: Unverified = "end",
        origins: Collection[str] = (),
        key: str = "",
        aliases: Sequence[str] = (),
    ) -> None:
        self.runtime, self.unverified, self._key = runtime, unverified, key.encode()
        self._pages = PageRules(origins, needs_token=bool(key))
        self.model, self.aliases = runtime.bundle.manifest.target, aliases
        #: whether a signal has come: nothing new begins
        self.leaving = False
        self.turn, self.waiting = asyncio.Lock(), 0
        self.completions = set[DeviceCompletion]()
        self.worker = ThreadPoolExecutor(1, "tokenizer")  # a long conversation would block the event loop
        self.request_seconds, self.unread_seconds = HEAD_SECONDS, READ_SECONDS
        self.app = Traced(api_app([*probe_routes(self._healthz, self._readyz), *api_routes(self)], list(origins)))

    async def drain(self, seconds: float) -> None:
        """Begin nothing more, let the answer in progress end for at most `seconds`, refuse the rest."""
        self.leaving = True
        for completion in [*self.completions]:
            completion.refuse_unless_begun()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.turn.acquire(), seconds)
        for completion in [*self.completions]:
            completion.refuse()
        until = asyncio.get_running_loop().time() + LAST_SECONDS
        while self.completions and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        self.worker.shutdown(wait=False, cancel_futures=True)

    async def _healthz(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "link": bool(self.runtime.link and self.runtime.link.welcome)})

    async def _readyz(self, _: Request) -> JSONResponse:
        return JSONResponse({"ready": not self.leaving}, 503 if self.leaving else 200)

    def admit(self, request: HTTPConnection) -> None:
        """See Backend."""
        headers = request.headers
        if self._pages.foreign(headers):
            text = f"pages of {headers['origin']} are refused; start with --allow-origin {headers['origin']}"
            raise ApiError(403, text, code="origin_not_allowed")
        if self._pages.rebound(headers):
            text = f"{headers.get('host')!r} is not a name of this device; use 127.0.0.1"
            raise ApiError(403, text, code="host_not_allowed")
        given = (bearer(headers.get("authorization")) or "").encode("latin-1")  # the bytes that were sent
        if self._key and not hmac.compare_digest(given, self._key):
            raise ApiError(401, "this endpoint needs its key as a Bearer token", code="invalid_api_key")

    def begin(self, request: HTTPConnection) -> DeviceCompletion:
        """See Backend."""
        self.admit(request)
        if self.leaving:
            raise _leaving()
        return DeviceCompletion(self)

    def enter(self, protocol: HttpProtocol) -> bool:
        """See SocketBounds. A socket too many cuts the one idle for longest."""
        sockets = [one for one in protocol.connections if isinstance(one, HttpProtocol)]
        there = [one for one in sockets if not one.transport.is_closing()]  # a cut socket stays listed for a while
        if len(there) > MOST_SOCKETS:
            min((one for one in there if one.idle), key=lambda one: one.since).transport.abort()
        return True

    def leave(self, address: str) -> None:
        """See SocketBounds."""

    def refused(self, reason: str) -> None:
        """See SocketBounds."""


class DeviceCompletion:
    """The answer to one request, in all its choices. See Completion."""

    _asked: ApiRequest
    _writing: asyncio.Task[None] | None = None
    _counted = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._runtime = endpoint, endpoint.runtime
        self._manifest = endpoint.runtime.bundle.manifest
        #: parts of the answer as they are written; None at its end, or an exception instead
        self._parts = asyncio.Queue[Delta | Ending | Exception | None]()
        self._begun = False
        endpoint.completions.add(self)

    async def prepare(self, asked: ApiRequest, size: int) -> ReplyWriter:
        """See Completion."""
        if asked.top is not None:
            text = "log probabilities are only known to the verifier's own endpoint: its verdicts carry only tokens"
            raise ApiError(400, text, "logprobs", "unsupported_parameter")
        if self._endpoint.waiting >= MOST_WAITING:
            raise ApiError(429, "too many requests are waiting already", None, "server_busy", RETRY_SECONDS)
        if self._endpoint.waiting:
            self._runtime.hurry(STALLED_SECONDS)
        self._endpoint.waiting += 1
        self._counted = True
        await self._runtime.wait_for_link()
        fitted = await asyncio.get_running_loop().run_in_executor(self._endpoint.worker, self._fit, asked)
        self._asked, self._ids, self._dropped = asked, fitted.ids, len(fitted.dropped)
        self._constraint = asked.constraint(len(self._ids), self._manifest.vocab_size)
        if self._constraint and (why := self._runtime.unsupported(self._constraint)):
            raise ApiError(400, why, field_of(self._constraint), "unsupported_parameter")
        self._writing = asyncio.create_task(self._write())
        self._writing.add_done_callback(self._written)
        decode = partial(self._runtime.decode, self._ids)
        return asked.writer(self._endpoint.model, self._manifest.target_hash, len(self._ids), decode)

    async def parts(self) -> AsyncIterator[Delta | Ending]:
        """See Completion."""
        while (part := await self._parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    def failed(self, error: Exception) -> ApiError:
        """See Completion."""
        match error:
            case ApiError():
                return error
            case ConstraintUnsupported():
                return self._refused(str(error))
            case LinkRefused() | EngineFailed():
                return ApiError(502, str(error), code="verifier_refused")
            case DrafterFailed():
                return ApiError(500, str(error), code="drafter_failed")
        where = "".join(traceback.format_tb(error.__traceback__))
        logging.getLogger("outrider").error("completion failed: %s\n%s", type(error).__name__, where)
        return ApiError(500, "the endpoint failed on this request; its log says where", code="internal_error")

    async def close(self) -> None:
        """See Completion."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        self._written()
        self._endpoint.completions.discard(self)

    def refuse_unless_begun(self) -> None:
        """Answer that the endpoint is shutting down, if the answer has not begun."""
        if not self._begun:
            self.refuse()

    def refuse(self) -> None:
        """Answer that the endpoint is shutting down, instead of the rest."""
        self._parts.put_nowait(_leaving())

    async def _write(self) -> None:
        """Write the answer in its turn, at the runtime's own pace, however slowly its client reads."""
        try:
            async with self._endpoint.turn:
                if self._endpoint.leaving:
                    return
                self._begun = True
                for choice in range(self._asked.choices):
                    async for part in self._choice(choice):
                        self._parts.put_nowait(part)
        except Exception as error:
            self._parts.put_nowait(error)
        self._parts.put_nowait(None)

    def _written(self, _: asyncio.Task[None] | None = None) -> None:
        if self._counted:
            self._counted = False
            self._endpoint.waiting -= 1

    def _fit(self, asked: ApiRequest) -> FittedMessages:
        """Fit the conversation. Runs in the tokenizer's thread."""
        if asked.conversation is None:
            return FittedMessages([], [], self._plain_prompt(asked.plain_prompt))
        tools = asked.tool_use.prompt if asked.tool_use else ()
        reserve, least = (USUAL_ROOM, LEAST_ROOM) if asked.length is None else (asked.length, None)
        try:
            return self._runtime.fit_messages(asked.conversation, reserve, tools, least)
        except ConversationTooLong as error:
            raise ApiError(400, str(error), "messages", "context_length_exceeded") from None
        except Exception as error:  # a template may raise anything
            text = f"the chat template of {self._endpoint.model} refuses this: {error}"
            raise ApiError(400, text, "messages") from None

    def _plain_prompt(self, prompt: str | list[int]) -> list[int]:
        """Return token ids of a prompt without a chat template. Raises ApiError if it does not fit."""
        manifest = self._manifest
        ids = prompt if isinstance(prompt, list) else self._runtime.bundle.chat.encode_prompt(prompt)
        if len(ids) >= manifest.max_context:
            text = f"the prompt has {len(ids)} tokens; at most {manifest.max_context - 1} fit this device's context"
            raise ApiError(400, text, "prompt", "context_length_exceeded")
        if not ids or max(ids) >= manifest.vocab_size:
            text = f"the prompt needs token ids from 0 to {manifest.vocab_size - 1}"
            raise ApiError(400, text, "prompt", "invalid_value")
        return ids

    async def _choice(self, choice: int) -> AsyncIterator[Delta | Ending]:
        """Yield verified text as it grows; offline text beside it, in the extension field when it changes."""
        asked, keeps_unverified = self._asked, self._endpoint.unverified == "end"
        limit = token_limit(asked, self._manifest.max_context - len(self._ids))
        sent, mark = "", {"state": "connecting", "provisional": "", "writer": Writer.TARGET}
        answer = self._runtime.answer_ids(self._ids, asked.sampling(choice), limit, asked.stops, self._constraint)
        async with contextlib.aclosing(answer) as events:
            async for event in events:
                if why := self._runtime.refusal:
                    raise self._refused(why)
                if isinstance(event, LinkState) and self._endpoint.waiting > 1:
                    self._runtime.hurry(STALLED_SECONDS)
                state = event.state if isinstance(event, LinkState) else mark["state"]
                writer = event.writer if isinstance(event, Provisional) else mark["writer"]
                writer = writer if event.provisional else Writer.TARGET
                now = {"state": state, "provisional": event.provisional, "writer": writer}
                new = event.verified[len(sent) :]
                if new or now != mark:
                    waits = not (event.verified or event.provisional)
                    yield Delta(new, {} if now == mark else {"outrider": now}, idle=waits)
                sent, mark = event.verified, now
        assert isinstance(event, Finished)
        if event.reason is FinishReason.REFUSED:
            raise self._refused(event.detail)
        text = event.provisional if keeps_unverified else ""
        if text:
            yield Delta(text, {"outrider": {"unverified": True}})
        if event.reason not in COMPLETE or (event.provisional and not keeps_unverified):
            why = event.detail or "it has not answered, or this device has none"
            why = f"no verifier has completed this answer: {why}"
            raise ApiError(503, why, None, "verifier_unreachable", RETRY_SECONDS)
        yield self._ending(event, unverified=bool(text) or event.stats.adopted > 0)

    def _refused(self, why: str) -> ApiError:
        """Refuse in the same form as the verifier's own endpoint."""
        code = "invalid_schema" if self._constraint else "verifier_refused"
        return ApiError(400, why, field_of(self._constraint), code)

    def _ending(self, last: Finished, unverified: bool) -> Ending:
        written = Counter[str]()
        for span in last.spans:
            written[span.writer] += span.end - span.begin
        mark: dict[str, Any] = {"unverified": unverified, "tokens_by": dict(written)}
        if self._dropped:  # how many of the oldest messages did not fit
            mark["dropped_messages"] = self._dropped
        if not self._asked.streams:
            mark["state"] = "unverified" if unverified else "verified"
        accepted = round(max(last.stats.tau - 1.0, 0.0) * last.stats.rounds)
        return Ending(last.reason, len(last.token_ids), {"outrider": mark}, last.stats.nodes, accepted)


def _leaving() -> ApiError:
    return ApiError(503, "this endpoint is shutting down", None, "not_ready", RETRY_SECONDS)


class DeviceServer(uvicorn.Server):
    """uvicorn that gives answers SHUTDOWN_SECONDS at SIGINT, SIGTERM or SIGHUP; a second signal ends at once."""

    def __init__(self, endpoint: Endpoint, greeting: str) -> None:
        super().__init__(
            uvicorn.Config(
                endpoint.app,
                log_level="warning",
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=1,
                http=partial(HttpProtocol, endpoint),  # type: ignore[arg-type]
            )
        )
        self._endpoint, self._greeting, self._loop = endpoint, greeting, asyncio.get_running_loop()
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. Once the greeting is printed, requests are answered."""
        await super().startup(sockets)
        print(self._greeting, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn, which ignores SIGHUP: the terminal is gone."""
        with super().capture_signals():
            main = hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()
            if main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup starts a command like that
                signal.signal(signal.SIGHUP, self.handle_exit)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn. Nothing is raised at its end, so that the runtime is closed."""
        if self._endpoint.leaving:
            os._exit(128 + sig)
        self._endpoint.leaving = True
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._endpoint.drain(SHUTDOWN_SECONDS)
        self.should_exit = True


async def run(endpoint: Endpoint, bound: list[socket.socket], greeting: str) -> None:
    """Serve there, print `greeting` once it answers, until SIGINT, SIGTERM or SIGHUP, then close the runtime."""
    async with endpoint.runtime:
        with contextlib.suppress(KeyboardInterrupt):
            await DeviceServer(endpoint, greeting).serve(sockets=bound)
