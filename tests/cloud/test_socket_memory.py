"""A TLS socket that is gone leaves nothing large: its buffers are freed at once, however it ended."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast

import pytest
import trustme
from uvicorn.server import ServerState

from cloud.app import App
from cloud.http_server import uvicorn_config
from cloud.settings import Settings
from outrider_core.http_protocol import TLS_BUFFER, HttpProtocol, TlsServer
from tests.cloud.drive import make_verifier
from tests.tiny import tiny_model
from tests.waiting import HANG, until

#: sockets of each kind
PEERS = 3
HEAD = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


class Place:
    """Serves TLS sockets of a verifier that does not run. made: protocols so far."""

    def __init__(self) -> None:
        self._verifier = make_verifier(tiny_model(), ())
        self._config, self._state = uvicorn_config(App(self._verifier, Settings())), ServerState()
        self._config.load()
        self._context, self._trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").configure_cert(self._context)
        authority.configure_trust(self._trusting)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.made = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        with self._listener:
            server = TlsServer(self._make, self._listener, self._context, HANG)
            yield
            server.close()

    @property
    def sockets(self) -> float | None:
        """Return how many are open."""
        return self._verifier.metrics.registry.get_sample_value("outrider:sockets")

    def raw(self) -> socket.socket:
        return socket.create_connection(self._listener.getsockname(), timeout=HANG)

    def encrypted(self) -> socket.socket:
        return self._trusting.wrap_socket(self.raw(), server_hostname="127.0.0.1")

    def _make(self) -> HttpProtocol:
        self.made += 1
        make: Any = self._config.http_protocol_class
        return cast(HttpProtocol, make(config=self._config, server_state=self._state, app_state={}))


def reset(peer: socket.socket) -> None:
    """Close it with a reset instead of an end."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def half_a_handshake(place: Place) -> None:
    with place.raw() as peer:
        peer.sendall(bytes([22, 3, 1]))


def no_tls(place: Place) -> None:
    with place.raw() as peer, suppress(ConnectionError):
        peer.sendall(HEAD)
        assert not peer.recv(65536).startswith(b"HTTP")


def no_http(place: Place) -> None:
    with place.encrypted() as peer:
        peer.sendall(b"\0\r\n\r\n")
        assert peer.recv(65536).startswith(b"HTTP/1.1 400")


def half_a_request(place: Place) -> None:
    peer = place.encrypted()
    peer.sendall(HEAD)
    reset(peer)


def a_reply_and_no_more(place: Place) -> None:
    peer = place.encrypted()
    peer.sendall(HEAD + b"\r\n")
    assert peer.recv(65536).startswith(b"HTTP/1.1 ")
    reset(peer)


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def servers_ends() -> list[SSLProtocol]:
    """Return what asyncio holds of TLS sockets on the server's side, garbage included."""
    return [each for each in gc.get_objects() if type(each) is SSLProtocol and each._server_side]  # type: ignore[attr-defined]


@pytest.mark.parametrize("peer", [half_a_handshake, no_tls, no_http, half_a_request, a_reply_and_no_more])
def test_a_socket_that_is_gone_leaves_no_garbage(peer: Callable[[Place], None]) -> None:
    place = Place()

    async def run() -> None:
        async with place.serving():
            for _ in range(PEERS):
                await asyncio.to_thread(peer, place)
            assert await asyncio.to_thread(until, lambda: place.made == PEERS and place.sockets == 0)
            for _ in range(10):  # what the loop has still to call
                await asyncio.sleep(0)
            assert not servers_ends()

    with no_collections():
        assert not servers_ends()
        asyncio.run(run())


def test_a_socket_without_a_handshake_takes_little() -> None:
    place = Place()

    async def run() -> None:
        async with place.serving():
            with await asyncio.to_thread(place.raw):
                assert await asyncio.to_thread(until, servers_ends)
                assert [len(each._ssl_buffer) for each in servers_ends()] == [TLS_BUFFER]  # type: ignore[attr-defined]

    with no_collections():
        asyncio.run(run())
