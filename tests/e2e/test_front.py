"""The HTTP front that verifier and device share: statuses, headers, bodies of any form, and clients that mean ill."""

from __future__ import annotations

import socket
from contextlib import suppress

import httpx
import pytest

from tests.e2e.endpoints import Served
from tests.waiting import HANG


def said(peer: socket.socket) -> bytes:
    """All that comes until the socket is closed or cut."""
    came = bytearray()
    with suppress(ConnectionError):
        while got := peer.recv(65536):
            came += got
    return bytes(came)


def in_chunks(data: bytes, size: int) -> bytes:
    """The data in HTTP's chunks of `size` bytes, without the last, empty one."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


HEAD = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 8, 100])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/responses", b"/healthz", b"/nowhere"])
def test_a_body_in_tiny_chunks_is_cut(served: Served, path: bytes, size: int) -> None:
    """Before most of it is read, whether anybody wants it or not: each chunk takes the loop as long as a large one."""
    with served.connect() as peer:
        peer.sendall(HEAD % path)
        begin = in_chunks(b" " * 300 * size, size)
        with suppress(ConnectionError):
            for _ in range((16 << 20) // len(begin)):  # more than any buffer on the way
                peer.sendall(begin)
            raise AssertionError("read to its end")
    assert httpx.get(f"{served.root}/healthz", timeout=HANG).status_code == 200


def test_a_body_in_tiny_chunks_is_told_why(served: Served) -> None:
    with served.connect() as peer:
        peer.sendall(HEAD % b"/v1/chat/completions" + in_chunks(b" " * 258, 1))
        answer = said(peer)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"chunks" in answer and b'"invalid_request_error"' in answer


@pytest.mark.parametrize("size", [1, 300, 4096])
def test_a_body_in_chunks_is_read(served: Served, size: int) -> None:
    body = httpx.Request("POST", "http://x", json=served.body(n=9)).content
    body = body.ljust(200 if size == 1 else 300_000)
    with served.connect() as peer:
        peer.sendall(HEAD % b"/v1/chat/completions" + in_chunks(body, size) + b"0\r\n\r\n")
        answer = b""
        while b"\r\n\r\n{" not in answer or not answer.endswith(b"}"):
            answer += peer.recv(65536)
    assert b'"n"' in answer
