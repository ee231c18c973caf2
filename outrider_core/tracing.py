"""Request ids end to end: taken from the client or made here, sent back, logged."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: key of an app's `Trace` in the ASGI scope
TRACE = "outrider_trace"
_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
#: W3C Trace Context: version, trace id, parent id, flags
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


@dataclass(frozen=True)
class Trace:
    """request: the id of a request or connection. trace: the trace id of its traceparent, or ""."""

    request: str
    trace: str = ""

    @property
    def fields(self) -> dict[str, str]:
        """Return the fields to log."""
        return {"request": self.request, **({"trace": self.trace} if self.trace else {})}


def trace_of(scope: Scope) -> Trace:
    """Return the trace of a request or connection; an empty one if the app is not inside `Traced`."""
    trace = scope.get(TRACE)
    return trace if isinstance(trace, Trace) else Trace("")


class Traced:
    """An ASGI app whose requests and WebSockets have ids. X-Request-Id and traceparent are echoed.

    replied(path, status): called as each reply begins; status 101 if a WebSocket is accepted.
    """

    def __init__(self, app: ASGIApp, replied: Callable[[str, int], None] = lambda path, status: None) -> None:
        self._app, self._replied = app, replied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        asked, parent = headers.get(b"x-request-id", b""), headers.get(b"traceparent", b"")
        name = asked if _ID.fullmatch(asked) else secrets.token_hex(8).encode()
        found = _TRACEPARENT.fullmatch(parent)
        scope[TRACE] = Trace(name.decode(), found[1].decode() if found else "")
        echoed = [(b"x-request-id", name), *([(b"traceparent", parent)] if found else [])]

        async def traced(message: Message) -> None:
            if message["type"] in _STARTS:
                message["headers"] = [*message.get("headers", ()), *echoed]
                self._replied(scope["path"], message.get("status", 101))
            await send(message)

        await self._app(scope, receive, traced)
