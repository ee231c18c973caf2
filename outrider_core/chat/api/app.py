"""The OpenAI-style calls as one Starlette app for any backend: a verifier's engine, or a device's runtime."""

from __future__ import annotations

import asyncio
import codecs
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from outrider_core.chat.api.completions import CompletionRequest, parse_completion
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import ApiRequest, Fields, check_model
from outrider_core.chat.api.openapi import description
from outrider_core.chat.api.replies import AnswerParts, Delta, Ending, ReplyWriter, model_card, model_list
from outrider_core.chat.api.requests import ChatRequest, parse
from outrider_core.chat.api.responses import ResponseRequest, parse_response

#: path -> parses a body; raises ApiError
PARSERS: dict[str, Callable[[bytes], ApiRequest]] = {
    "/v1/chat/completions": parse,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_response,
}
#: path -> type of the body
CALLS: dict[str, type[Fields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
}
#: answers a plain request
Answering = Callable[[Request], Awaitable[Response]]
MAX_BODY = 1 << 20
BODY_SECONDS = 30.0
#: most seconds that a stream waits for its first token, so that a refusal gets its own status
BEGIN_SECONDS = 5.0
#: header that names ignored fields
IGNORED = "x-outrider-ignored"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # otherwise proxies may hold events back


class Completion(Protocol):
    """A request in progress, from its headers to the last byte of its reply."""

    async def prepare(self, asked: ApiRequest, size: int) -> ReplyWriter:
        """Accept the request, whose body has `size` bytes, and return the writer of the reply. Raises ApiError."""

    def parts(self) -> AnswerParts:
        """Return the answer as it is written."""

    def failed(self, error: Exception) -> ApiError:
        """Return the error to send to the client after any exception here or while its request was read."""

    async def close(self) -> None:
        """Cancel unfinished work. Always called."""


class Backend(Protocol):
    """Answers requests. model: the name of the served model. aliases: further names."""

    model: str
    aliases: Sequence[str]

    def admit(self, request: HTTPConnection) -> object:
        """Raise ApiError if this client may not ask."""

    def begin(self, request: HTTPConnection) -> Completion:
        """Admit a completion, before its body is read. Raises ApiError."""


class ClientGone(Exception):
    """The client has hung up."""


def api_routes(backend: Backend) -> list[Route]:
    """Return the routes of all calls, answered by `backend`."""
    cards = {name: model_card(name) for name in (backend.model, *backend.aliases)}

    async def models(request: Request) -> Response:
        backend.admit(request)
        return _json(model_list(cards.values()))

    async def model(request: Request) -> Response:
        backend.admit(request)
        name = request.path_params["name"]
        check_model(name, cards)
        return _json(cards[name])

    described = description(CALLS, ["/v1/models"], cards)

    async def openapi(request: Request) -> Response:
        backend.admit(request)
        return _json(described)

    return [
        *(Route(path, _Call(backend, parsed), methods=["POST"]) for path, parsed in PARSERS.items()),
        Route("/openapi.json", openapi),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def probe_routes(
    alive: Callable[[Request], Awaitable[Response]], ready: Callable[[Request], Awaitable[Response]]
) -> list[Route]:
    """Return the routes that orchestrators probe, also under the names that other servers use."""

    async def told(_: Request) -> Response:
        return _json({"version": version("outrider")})

    probes = {"/healthz": alive, "/livez": alive, "/ping": alive, "/readyz": ready, "/health": ready, "/version": told}
    return [Route(path, probe) for path, probe in probes.items()]


def api_app(
    routes: Sequence[BaseRoute], origins: Sequence[str], lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """Return the app of `routes`, with refusals in OpenAI's form. origins: of web pages that may read replies."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["retry-after", "x-request-id", IGNORED],
    )
    app = Starlette(
        middleware=[*([cors] if origins else []), Middleware(_Slashless)],
        routes=routes,
        lifespan=lifespan,
        exception_handlers={404: _no_such_route, 405: _no_such_route, ApiError: _refused},
    )
    app.router.redirect_slashes = False  # a redirect would name a scheme that a proxy's client did not use
    return app


async def _no_such_route(request: HTTPConnection, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = f"{request.scope.get('method', 'GET')} {request.url.path} is not served here; "
    text += f"there are POST {', '.join(PARSERS)} and GET /v1/models"
    refusal = ApiError(status, text, code="method_not_allowed" if status == 405 else "unknown_url")
    if isinstance(error, HTTPException) and error.headers:  # Allow, which a 405 must have
        refusal.headers |= {name: ", ".join(sorted(value.split(", "))) for name, value in error.headers.items()}
    return await _refused(request, refusal)


async def _refused(_: HTTPConnection, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body(), error.status, error.headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


class _Slashless:
    """Serves a path with trailing slashes as without: a redirect would name a wrong scheme, and send a body twice."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (shorter := scope["path"].rstrip("/")):
            scope = {**scope, "path": shorter}
        await self._app(scope, receive, send)


class _Call:
    """ASGI app of one call."""

    def __init__(self, backend: Backend, parsed: Callable[[bytes], ApiRequest]) -> None:
        self._backend, self._parsed = backend, parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        completion = self._backend.begin(HTTPConnection(scope))
        try:
            body = _plain(await _read_body(receive), Headers(scope=scope).get("content-encoding", "identity"))
            asked = self._parsed(body)
            check_model(asked.model, (self._backend.model, *self._backend.aliases))
            await _unless_gone(_reply(completion, asked, len(body), scope, receive, send), receive)
        except ClientGone:
            pass
        except Exception as error:
            raise completion.failed(error) from None
        finally:
            await completion.close()


async def _reply(
    completion: Completion, asked: ApiRequest, size: int, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the answer in the requested form.

    Raises errors that come before anything was sent; in a stream that has begun an error is an event.
    """
    with asked.named():
        writer = await completion.prepare(asked, size)
    parts = _told(completion, asked)
    told = {IGNORED: ", ".join(asked.ignored)} if asked.ignored else {}
    if asked.streams:
        events = writer.events(await begun(parts))
        stream = StreamingResponse(events, headers={**STREAM_HEADERS, **told}, media_type="text/event-stream")
        await stream.stream_response(send)
    else:
        await _json(await writer.whole(parts), headers=told)(scope, receive, send)


async def _told(completion: Completion, asked: ApiRequest) -> AnswerParts:
    """Yield the answer's parts, and turn their exceptions into ApiError."""
    with asked.named():
        try:
            async for part in completion.parts():
                yield part
        except Exception as error:
            raise completion.failed(error) from None


async def _read_body(receive: Receive) -> bytes:
    """Read the request's body of at most MAX_BODY bytes; the rest of a larger one stays unread.

    Raises ApiError 413 if it is larger, ApiError 408 if it is slow, ClientGone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise _too_large()
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        text = f"the body did not arrive within {BODY_SECONDS:.0f} s"
        raise ApiError(408, text, code="request_timeout") from None


def _plain(body: bytes, coding: str) -> bytes:
    """Return a body as text in UTF-8, of at most MAX_BODY bytes: unpacked, and without a byte order mark.

    Raises ApiError 413 if it is larger, 415 if it is packed in another way, 400 if it cannot be unpacked.
    """
    if coding.lower() in ("gzip", "x-gzip"):
        unpacking = zlib.decompressobj(wbits=31)
        try:
            body = unpacking.decompress(body, MAX_BODY + 1)
        except zlib.error as error:
            raise ApiError(400, f"the body is not gzip: {error}", code="invalid_gzip") from None
        if len(body) > MAX_BODY:
            raise _too_large()
        if not unpacking.eof or unpacking.unused_data:
            raise ApiError(400, "the body is not one whole gzip member", code="invalid_gzip")
    elif coding.lower() != "identity":
        refusal = ApiError(
            415, f"content-encoding {coding} is not supported; send gzip or none", code="unsupported_encoding"
        )
        refusal.headers["accept-encoding"] = "gzip"
        raise refusal
    return body.removeprefix(codecs.BOM_UTF8)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY} bytes; send less", code="request_too_large")


async def begun(parts: AnswerParts) -> AnswerParts:
    """Return the answer once it has a first part, or after BEGIN_SECONDS. Raises its errors up to then."""
    first, ends = list[Delta | Ending](), asyncio.get_running_loop().time() + BEGIN_SECONDS
    while True:
        coming = asyncio.ensure_future(_next(parts))
        try:
            await asyncio.wait({coming}, timeout=ends - asyncio.get_running_loop().time())
        except asyncio.CancelledError:
            coming.cancel()
            raise
        if not coming.done():
            return _joined(first, coming, parts)
        part = coming.result()
        if part is not None:
            first.append(part)
        if not (isinstance(part, Delta) and part.idle):
            return _joined(first, None, parts)


async def _next(parts: AnswerParts) -> Delta | Ending | None:
    return await anext(parts, None)


async def _joined(
    first: list[Delta | Ending], coming: asyncio.Future[Delta | Ending | None] | None, rest: AnswerParts
) -> AsyncIterator[Delta | Ending]:
    for part in first:
        yield part
    if coming is not None and (late := await coming) is not None:
        yield late
    async for part in rest:
        yield part


async def _unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Await `work` until it is done or the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    except OSError:
        pass  # servers other than uvicorn raise it when the client has hung up
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
