"""OpenAI-style requests and replies as ASGI messages: bodies in, JSON or a stream of events out. No framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import Request
from outrider_core.chat.api.replies import Answer, Delta, Ending, Writer

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 1 << 20
BODY_SECONDS = 30.0
#: for so long may a stream wait for its first token, so that a refusal has a status of its own
BEGIN_SECONDS = 5.0


class ClientGone(Exception):
    """The client has hung up."""


async def read_body(receive: Receive) -> bytes:
    """The request's body, of at most MAX_BODY bytes; what a larger one has beyond that is left unread.

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
                    text = f"the body is larger than {MAX_BODY} bytes; send less"
                    raise ApiError(413, text, code="request_too_large")
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        text = f"the body did not arrive within {BODY_SECONDS:.0f} s"
        raise ApiError(408, text, code="request_timeout") from None


async def send_answer(send: Send, request: Request, writer: Writer, answer: Answer) -> None:
    """Send an answer in the form that `request` asks for.

    Raises ApiError where the answer fails and nothing was sent yet; in a stream that has begun the error is an event.
    """
    if request.streams:
        await send_events(send, writer.events(await begun(answer)))
    else:
        await send_json(send, await writer.whole(answer))


async def begun(answer: Answer) -> Answer:
    """The answer, once something of it is written, or after BEGIN_SECONDS. Raises ApiError where it fails before."""
    parts, ends = list[Delta | Ending](), asyncio.get_running_loop().time() + BEGIN_SECONDS
    while True:
        coming = asyncio.ensure_future(_next(answer))
        try:
            await asyncio.wait({coming}, timeout=ends - asyncio.get_running_loop().time())
        except asyncio.CancelledError:
            coming.cancel()
            raise
        if not coming.done():
            return _joined(parts, coming, answer)
        part = coming.result()
        if part is not None:
            parts.append(part)
        if not (isinstance(part, Delta) and part.idle):
            return _joined(parts, None, answer)


async def _next(answer: Answer) -> Delta | Ending | None:
    return await anext(answer, None)


async def _joined(
    parts: list[Delta | Ending], coming: asyncio.Future[Delta | Ending | None] | None, answer: Answer
) -> Answer:
    for part in parts:
        yield part
    if coming is not None and (part_of := await coming) is not None:
        yield part_of
    async for part in answer:
        yield part


async def send_error(send: Send, error: ApiError) -> None:
    """Refuse a request."""
    await send_json(send, error.body(), error.status, error.headers)


async def send_json(send: Send, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """Send a complete reply."""
    data = msgspec.json.encode(value)
    all_headers = {"content-length": str(len(data)), "content-type": "application/json", **(headers or {})}
    start = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": data})


async def send_events(send: Send, events: AsyncIterator[bytes]) -> None:
    """Server-sent events, as `events` has them."""
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # else proxies may hold events back
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(work: Awaitable[None], receive: Receive) -> None:
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
