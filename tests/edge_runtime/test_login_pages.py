"""Networks that answer in place of the verifier, such as a login page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from edge_runtime.link.events import LinkDown, LinkEvent, LinkRefused
from edge_runtime.link.websocket import Link
from outrider_core.protocol.wire import PROTOCOL_VERSION, Hello
from tests.waiting import HANG

HELLO = Hello(PROTOCOL_VERSION, "t", "d", "test")
PAGE = b"<html>" + b"please sign in " * 1000 + b"</html>"


@contextmanager
def answering(status: int, headers: dict[str, str], body: bytes) -> Iterator[tuple[str, list[Any]]]:
    """(the address of a server that answers everything so, the headers of the requests that came)."""
    seen: list[Any] = []

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append(self.headers)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def events_of(address: str, count: int) -> list[LinkEvent]:
    async def dial() -> list[LinkEvent]:
        events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        task = asyncio.create_task(Link(address, HELLO, events.put_nowait, token="secret").run())
        try:
            return [await asyncio.wait_for(events.get(), HANG) for _ in range(count)]
        finally:
            task.cancel()

    return asyncio.run(dial())


def first_event(address: str) -> LinkEvent:
    return events_of(address, 1)[0]


@pytest.mark.parametrize("status", [200, 302, 401, 403, 511])
def test_a_login_page_is_a_link_that_is_down(status: int) -> None:
    """And not a refusal: once the user has signed in, the verifier answers."""
    headers = {"Content-Type": "text/html", "Content-Length": str(len(PAGE))}
    with answering(status, headers | ({"Location": "http://login.example/"} if status == 302 else {}), PAGE) as (at, _):
        event = first_event(at)
    assert isinstance(event, LinkDown) and "sign in" in event.reason and len(event.reason) < 200


def test_redirects_are_not_followed() -> None:
    with answering(200, {}, b"") as (elsewhere, seen):
        redirect = {"Location": f"ws://{elsewhere}/v1/verify", "Content-Length": "0"}
        with answering(302, redirect, b"") as (address, asked):
            assert isinstance(first_event(address), LinkDown)
    assert len(asked) == 1 and not seen


def test_a_verifier_that_wants_another_token_is_dialled_again() -> None:
    """Another one at this address may be told of it; but it is not taken for a network that is down."""
    headers = {"Content-Type": "text/plain", "Content-Length": "14"}
    with answering(401, headers, b"a token is off") as (address, seen):
        assert first_event(address) == LinkDown("a token is off", refused=True)
        first = len(seen)
        assert events_of(address, 3) == [LinkDown("a token is off", refused=True)] * 3
    assert len(seen) == first + 3


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:99999",
        "127.0.0.1:0",
        "a..b:80",
        "::1:8765",
        "",
        "ws://",
        "ftp://there:1",
        "two words:80",
        "x" * 64 + ".y:1",
    ],
)
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(LinkRefused, match="is not an address; write host:port"):
        Link(address, HELLO, print)


@pytest.mark.parametrize("address", ["h", "h:1", "[::1]:8765", "wss://verifier.example/base", "https://bücher.example"])
def test_addresses(address: str) -> None:
    Link(address, HELLO, print)
