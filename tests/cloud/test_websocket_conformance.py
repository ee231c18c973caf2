"""RFC 6455 over hand-made frames: what the server understands, refuses and with which close code.

The categories are those of the Autobahn test suite, but the peer here is the verifier itself and not an echo.
Behind every case another device is still served right.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import queue
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from cloud.http_server import uvicorn_config
from cloud.server.limits import MAX_FRAGMENTS, Gate
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import MAX_CLIENT_FRAME, SUBPROTOCOL, Welcome, decode_server, encode
from tests.cloud.drive import HELLO, Client, make_verifier, serve
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
MODEL = tiny_model("llama", seed=4, vocab=199)
PROMPT = [10, 20, 30, 40, 50]
TRUTH = plain_decode(MODEL, PROMPT, Sampling(), 4, eos_ids=())
GREETING = encode(HELLO)
KEY = base64.b64encode(bytes(range(16))).decode()
HEADERS = {
    "Host": "verifier",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": KEY,
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": SUBPROTOCOL,
}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return make_verifier(MODEL, (), kv_tokens=2048)


@pytest.fixture(scope="module")
def address(verifier: Verifier) -> Iterator[str]:
    with serve(verifier) as address:
        yield address


@pytest.fixture(autouse=True)
def others_are_served(address: str, verifier: Verifier) -> Iterator[None]:
    """After each case another device gets the right text."""
    yield
    with Client(address) as client:
        client.open(PROMPT)
        verdict = client.verify(1, 5, TokenTree.chain(TRUTH[:3]))
        assert (list(verdict.accepted), verdict.bonus) == ([0, 1, 2], TRUTH[3])
    assert verifier.alive


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, reserved: int = 0, masked: bool = True, length: int = 0
) -> bytes:
    """A client's frame. reserved: RSV1..3 as three bits. length: bytes of the length field, 0 the fewest."""
    size = len(payload)
    length = length or (1 if size < 126 else 2 if size < 1 << 16 else 8)
    field = {1: bytes([size & 127]), 2: struct.pack(">BH", 126, size & 0xFFFF), 8: struct.pack(">BQ", 127, size)}[
        length
    ]
    head = bytes([fin << 7 | reserved << 4 | opcode, masked << 7 | field[0]]) + field[1:]
    if not masked:
        return head + payload
    mask = os.urandom(4)
    stream = (mask * (size // 4 + 1))[:size]
    mixed = int.from_bytes(payload, "little") ^ int.from_bytes(stream, "little")
    return head + mask + mixed.to_bytes(size, "little")


def request(method: str = "GET", version: str = "HTTP/1.1", **changed: str | None) -> bytes:
    """An opening handshake; `changed` replaces headers (None: left out), with _ for -."""
    headers: dict[str, str | None] = dict(HEADERS)
    headers.update({name.replace("_", "-"): value for name, value in changed.items()})
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} /v1/verify {version}", *lines, "", ""]).encode()


class Peer:
    """A raw TCP client of the server."""

    def __init__(self, address: str, *, shaken: bool = True) -> None:
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=HANG)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""
        if shaken:
            self.send(request())
            assert self.status() == 101

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes) -> None:
        self.socket.sendall(b"".join(pieces))

    def status(self) -> int:
        """Read the answer's head up to its empty line; its headers go to `headers`."""
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, self._data = self._data.split(b"\r\n\r\n", 1)
        first, *rest = head.decode("latin-1").split("\r\n")
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        return int(first.split(" ")[1])

    def frame(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame, which must be whole and unmasked."""
        head = self._take(2)
        size = head[1]
        assert head[0] & 0xF0 == 0x80 and size < 128, head
        if size >= 126:
            size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
        return head[0] & 15, self._take(size)

    def welcomed(self) -> bool:
        """The next frame answers the HELLO."""
        opcode, payload = self.frame()
        return opcode == BINARY and isinstance(decode_server(payload), Welcome)

    def closed_with(self) -> int | None:
        """Code of the closing frame, None where it has none; the server must end the connection behind it."""
        opcode, payload = self.frame()
        assert opcode == CLOSE, (opcode, payload)
        with suppress(ConnectionError):  # ended before all that was sent had been read
            self.send(frame(CLOSE, payload))
            assert self.socket.recv(1) == b""
        return int.from_bytes(payload[:2], "big") if payload else None

    def _take(self, size: int) -> bytes:
        while len(self._data) < size:
            self._more()
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, "the server ended the connection without a word"
        self._data += data


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def fragments(opcode: int, parts: list[bytes], between: bytes = b"") -> bytes:
    """A message in fragments, with `between` (whole frames) in every gap."""
    last = len(parts) - 1
    return between.join(frame(CONT if i else opcode, part, fin=i == last) for i, part in enumerate(parts))


def test_the_accept_key_proves_the_handshake(address: str) -> None:
    with Peer(address) as peer:
        digest = hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        assert peer.headers["sec-websocket-accept"] == base64.b64encode(digest).decode()
        assert peer.headers["sec-websocket-protocol"] == SUBPROTOCOL


@pytest.mark.parametrize(
    ("sent", "status"),
    {
        "no key": (request(Sec_WebSocket_Key=None), 400),
        "short key": (request(Sec_WebSocket_Key="AAAA"), 400),
        "key that is not valid base64": (request(Sec_WebSocket_Key="%" * 24), 400),
        "no version": (request(Sec_WebSocket_Version=None), 400),
        "version 8": (request(Sec_WebSocket_Version="8"), 400),
        "version 14": (request(Sec_WebSocket_Version="14"), 400),
        "POST": (request("POST"), 405),
        "no Connection: Upgrade": (request(Connection="keep-alive"), 426),
        "another upgrade": (request(Upgrade="h2c"), 426),
        "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        "endless header": (request(Cookie="x" * (1 << 20)), 431),
    }.values(),
    ids=str,
)
def test_broken_handshakes_are_refused(address: str, sent: bytes, status: int) -> None:
    with Peer(address, shaken=False) as peer:
        peer.send(sent)
        assert peer.status() == status


@pytest.mark.parametrize(
    "offer",
    ["permessage-deflate", "permessage-deflate; client_max_window_bits, x-webkit-deflate-frame", "permessage-bzip2"],
)
def test_compression_is_never_negotiated(address: str, offer: str) -> None:
    with Peer(address, shaken=False) as peer:
        peer.send(request(Sec_WebSocket_Extensions=offer))
        assert peer.status() == 101 and "sec-websocket-extensions" not in peer.headers
        peer.send(frame(BINARY, GREETING))
        assert peer.welcomed()


def test_handshakes_left_half_sent_disturb_nobody(address: str) -> None:
    """The server does not end them, nor wait for them; one that goes on is served."""
    waiting = [Peer(address, shaken=False) for _ in range(20)]
    for peer in waiting:
        peer.send(request()[:60])
    with Client(address) as client:
        client.open(PROMPT)
    first = waiting[0]
    first.send(request()[60:])
    assert first.status() == 101
    first.send(frame(BINARY, GREETING))
    assert first.welcomed()
    for peer in waiting:
        peer.socket.close()


def test_byte_by_byte(address: str) -> None:
    with Peer(address, shaken=False) as peer:
        for byte in pieces(request(), 1):
            peer.send(byte)
        assert peer.status() == 101
        for byte in pieces(frame(PING, b"slow") + frame(BINARY, GREETING), 1):
            peer.send(byte)
        assert peer.frame() == (PONG, b"slow")
        assert peer.welcomed()


def test_frames_before_the_answer_are_not_read(address: str) -> None:
    """RFC 6455 has the client wait for the answer; what it sends before is dropped, and the socket goes on."""
    with Peer(address, shaken=False) as peer:
        peer.send(request(), frame(PING, b"early"))
        assert peer.status() == 101
        peer.send(frame(PING, b"in time"), frame(BINARY, GREETING))
        assert peer.frame() == (PONG, b"in time")
        assert peer.welcomed()


@pytest.mark.parametrize("size", [64, 125, 126, 127, 128, 65535, 65536, MAX_CLIENT_FRAME])
def test_every_length_of_payload_is_understood(address: str, size: int) -> None:
    with Peer(address) as peer:
        peer.send(frame(BINARY, GREETING.ljust(size, b"\0")))
        assert peer.welcomed()


@pytest.mark.parametrize(("size", "length"), [(64, 2), (64, 8), (125, 2), (125, 8), (300, 8), (65535, 8)])
def test_lengths_that_are_not_minimal_are_understood(address: str, size: int, length: int) -> None:
    """RFC 6455 obliges the sender to the shortest form; the library is lenient, which harms nobody."""
    with Peer(address) as peer:
        peer.send(frame(BINARY, GREETING.ljust(size, b"\0"), length=length))
        assert peer.welcomed()


@pytest.mark.parametrize("size", [0, 1, 4, 124, 125])
@pytest.mark.parametrize("greeted", [False, True])
def test_ping_is_answered_with_its_payload(address: str, size: int, greeted: bool) -> None:
    payload = os.urandom(size)
    with Peer(address) as peer:
        if greeted:
            peer.send(frame(BINARY, GREETING))
            assert peer.welcomed()
        peer.send(*[frame(PING, payload)] * 3)
        assert [peer.frame() for _ in range(3)] == [(PONG, payload)] * 3


@pytest.mark.parametrize("payload", [b"", b"never asked for", bytes(125)])
def test_pongs_that_nobody_asked_for_are_ignored(address: str, payload: bytes) -> None:
    with Peer(address) as peer:
        peer.send(frame(PONG, payload), frame(BINARY, GREETING), frame(PONG, payload))
        assert peer.welcomed()


FRAGMENTED = {
    "two": fragments(BINARY, pieces(GREETING, 40)),
    "single bytes": fragments(BINARY, pieces(GREETING, 1)),
    "empty ones": fragments(BINARY, [b"", b"", GREETING, b"", b""]),
    "pings between": fragments(BINARY, pieces(GREETING, 20), frame(PING, b"between")),
    "pongs between": fragments(BINARY, pieces(GREETING, 20), frame(PONG, b"between")),
}


@pytest.mark.parametrize("sent", FRAGMENTED.values(), ids=FRAGMENTED)
@pytest.mark.parametrize("step", [1 << 20, 7])
def test_fragmented_messages_are_understood(address: str, sent: bytes, step: int) -> None:
    with Peer(address) as peer:
        for piece in pieces(sent, step):
            peer.send(piece)
        while (got := peer.frame())[0] == PONG:
            assert got[1] == b"between"
        assert got[0] == BINARY and isinstance(decode_server(got[1]), Welcome)


BEGUN = frame(BINARY, GREETING[:20], fin=False)
REFUSED: dict[str, tuple[int, bytes]] = {
    **{f"opcode {n}": (1002, frame(n, b"x")) for n in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    **{f"opcode {n}, empty": (1002, frame(n)) for n in (3, 7, 11, 15)},
    **{f"reserved bits {n} on data": (1002, frame(BINARY, GREETING, reserved=n)) for n in (1, 2, 4, 7)},
    **{f"reserved bits {n} on ping": (1002, frame(PING, reserved=n)) for n in (1, 2, 4, 7)},
    "reserved bit on continuation": (1002, BEGUN + frame(CONT, GREETING[20:], reserved=4)),
    "unmasked data": (1002, frame(BINARY, GREETING, masked=False)),
    "unmasked ping": (1002, frame(PING, b"x", masked=False)),
    "unmasked close": (1002, frame(CLOSE, b"\x03\xe8", masked=False)),
    "ping of 126": (1002, frame(PING, bytes(126))),
    "ping of 65536": (1002, frame(PING, bytes(65536))),
    "pong of 126": (1002, frame(PONG, bytes(126))),
    "close of 126": (1002, frame(CLOSE, b"\x03\xe8" + b"x" * 124)),
    "fragmented ping": (1002, frame(PING, b"x", fin=False)),
    "fragmented pong": (1002, frame(PONG, b"x", fin=False)),
    "fragmented close": (1002, frame(CLOSE, b"\x03\xe8", fin=False)),
    "continuation of nothing": (1002, frame(CONT, GREETING)),
    "open continuation of nothing": (1002, frame(CONT, GREETING, fin=False)),
    "continuation behind a whole message": (1002, frame(PONG) + frame(CONT, b"x")),
    "data inside a message": (1002, BEGUN + frame(BINARY, GREETING)),
    "text inside a message": (1002, BEGUN + frame(TEXT, b"x")),
    "text": (1003, frame(TEXT, b"hello")),
    "empty text": (1003, frame(TEXT)),
    "fragmented text": (1003, fragments(TEXT, [b"hel", b"lo"])),
    "text that is not valid UTF-8": (1007, frame(TEXT, b"\xce\xba\xed\xa0\x80")),
    "text that ends early": (1007, frame(TEXT, b"\xce")),
    "fragmented text that is not valid UTF-8": (1007, fragments(TEXT, [b"hello", b"\xff"])),
    "one byte too long": (1009, frame(BINARY, bytes(MAX_CLIENT_FRAME + 1))),
    "fragments too long": (1009, fragments(BINARY, [bytes(1 << 16)] * 17)),
    "length with the top bit": (1009, b"\x82\xff" + b"\xff" * 8),
}


@pytest.mark.parametrize(("code", "sent"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("greeted", [False, True], ids=["first", "greeted"])
def test_violations_close_with_their_code(address: str, code: int, sent: bytes, greeted: bool) -> None:
    with Peer(address) as peer:
        if greeted:
            peer.send(frame(BINARY, GREETING))
            assert peer.welcomed()
        peer.send(sent)
        assert peer.closed_with() == code


@pytest.mark.parametrize("case", ["one byte too long", "text"])
def test_a_peer_that_is_still_sending_learns_why_it_was_refused(address: str, case: str) -> None:
    """A socket closed at once would be reset by what comes next."""
    code, sent = REFUSED[case]
    with Peer(address) as peer:
        peer.send(sent[: 1 << 16])
        peer.socket.recv(1, socket.MSG_PEEK)  # the server has sent its close frame
        for _ in range(8):
            peer.send(bytes(1 << 16))
        assert peer.closed_with() == code


MANY_FRAGMENTS = fragments(BINARY, [b""] * (MAX_FRAGMENTS + 2))
BEHIND: dict[str, tuple[int, bytes]] = {
    "invalid text, ping": (1007, REFUSED["text that ends early"][1] + frame(PING)),
    "invalid text, close": (1000, REFUSED["text that ends early"][1] + frame(CLOSE, b"\x03\xe8")),
    "too many fragments, ping": (1009, MANY_FRAGMENTS + frame(PING)),
}


@pytest.mark.parametrize(("code", "sent"), BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("behind", [b"", frame(PING) + frame(TEXT, b"\xce")], ids=["", "and more"])
def test_frames_behind_a_violation_are_dropped(
    address: str, code: int, sent: bytes, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with Peer(address) as peer:
        peer.send(sent)
        peer.socket.recv(1, socket.MSG_PEEK)  # the server has sent its close frame
        with suppress(ConnectionError):
            peer.send(behind)
        got = peer.frame()
        while got[0] == PONG:  # read before the violation was noticed
            got = peer.frame()
        assert got[0] == CLOSE and int.from_bytes(got[1][:2], "big") == code
        with suppress(ConnectionError):
            assert peer.socket.recv(1) == b""
    with Client(address):  # the server has handled all of it
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Bare:
    """A server of the product's protocols with an app of the test's own."""

    def __init__(self, app: Any) -> None:
        self.asgi, self.gate = app, Gate(Settings(), Metrics())
        self.gate.message_seconds = 0.1


@contextmanager
def bare(app: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(Bare(app), lifespan="off"))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(HANG)


def test_an_app_that_is_still_sending_to_a_refused_peer_learns_that_it_is_gone() -> None:
    """As an app does that has not come to read of it."""
    ends: queue.Queue[BaseException] = queue.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        try:
            while True:
                await send({"type": "websocket.send", "bytes": b"more"})
                await asyncio.sleep(0.001)
        except BaseException as error:
            ends.put(error)

    with bare(app) as address, Peer(address) as peer:
        peer.send(REFUSED["opcode 3"][1])
        assert isinstance(ends.get(timeout=HANG), OSError)


def test_a_refused_peer_that_reads_late_leaves_no_timer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A timer would cut a socket that is gone, at which asyncio fails."""
    monkeypatch.setattr("cloud.server.uvicorn_protocols.LAST_READ", 1.0)
    refused, over = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": bytes(16 << 20)})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        refused.set()
        await asyncio.sleep(1.5)
        over.set()

    with bare(app) as address, Peer(address) as peer:
        peer.send(BEGUN)  # and no more
        assert refused.wait(HANG)
        peer.socket.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while peer.socket.recv(1 << 20):
                pass
        assert over.wait(HANG)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 3000, 3999, 4000, 4999])
def test_close_is_echoed(address: str, code: int) -> None:
    with Peer(address) as peer:
        peer.send(frame(CLOSE, code.to_bytes(2, "big")))
        assert peer.closed_with() == code


@pytest.mark.parametrize("reason", ["größe ✓".encode(), b"x" * 123], ids=["text", "longest"])
def test_close_with_a_reason_is_echoed(address: str, reason: bytes) -> None:
    with Peer(address) as peer:
        peer.send(frame(CLOSE, b"\x03\xe8" + reason))
        assert peer.closed_with() == 1000


def test_close_without_a_code_is_echoed(address: str) -> None:
    with Peer(address) as peer:
        peer.send(frame(CLOSE))
        assert peer.closed_with() is None


BAD_CLOSES = {
    "one byte": (1002, b"\x03"),
    "reason that is not valid UTF-8": (1007, b"\x03\xe8\xce\xba\xed\xa0\x80"),
    **{
        str(code): (1002, code.to_bytes(2, "big"))
        for code in (0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535)
    },
}


@pytest.mark.parametrize(("code", "payload"), BAD_CLOSES.values(), ids=BAD_CLOSES)
def test_bad_closes_are_refused(address: str, code: int, payload: bytes) -> None:
    with Peer(address) as peer:
        peer.send(frame(CLOSE, payload))
        assert peer.closed_with() == code


def test_nothing_is_read_behind_a_close(address: str) -> None:
    with Peer(address) as peer:
        peer.send(frame(CLOSE, b"\x03\xe8"), frame(BINARY, GREETING), frame(PING, b"x"))
        assert peer.closed_with() == 1000


def test_close_inside_a_fragmented_message_ends_it(address: str) -> None:
    """The library calls the message incomplete where the RFC would have 1000 echoed; closed it is."""
    with Peer(address) as peer:
        peer.send(BEGUN, frame(CLOSE, b"\x03\xe8"))
        assert peer.closed_with() == 1002


@pytest.mark.parametrize("size", [MAX_CLIENT_FRAME + 1, 1 << 31, 1 << 62])
def test_a_declared_length_takes_no_memory(address: str, size: int) -> None:
    with Peer(address) as peer:
        tracemalloc.start()
        peer.send(b"\x82\xff" + size.to_bytes(8, "big") + b"mask" + b"x" * 1000)
        assert peer.closed_with() == 1009
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20, peak


def test_a_declared_length_within_bounds_takes_no_memory_before_it_comes(address: str) -> None:
    tracemalloc.start()
    waiting = [Peer(address) for _ in range(8)]
    for peer in waiting:
        peer.send(b"\x82\xff" + MAX_CLIENT_FRAME.to_bytes(8, "big") + b"mask" + b"x" * 1000)
    time.sleep(0.2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for peer in waiting:
        peer.socket.close()
    assert peak < 4 << 20, peak


def test_a_device_that_ends_its_side_is_let_go(address: str) -> None:
    with Peer(address) as peer:
        peer.send(frame(BINARY, GREETING))
        assert peer.welcomed()
        peer.send(BEGUN)
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.socket.recv(1) == b""


def test_pings_of_a_peer_that_does_not_read_are_bounded(address: str) -> None:
    pings = frame(PING, bytes(125)) * 500
    with Peer(address) as peer:
        tracemalloc.start()
        with pytest.raises(ConnectionError):
            for _ in range(2000):  # 125 MB
                peer.send(pings)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20, peak


def test_endless_empty_fragments_are_bounded(address: str) -> None:
    with Peer(address) as peer:
        peer.send(BEGUN, frame(CONT, fin=False) * 5000)
        assert peer.closed_with() == 1009


@pytest.mark.parametrize("sent", [b"", b"GET /v1/verify HTTP/1.1\r\nHost:", b"\r\n"])
def test_sockets_that_ask_nothing_are_dropped(sent: bytes) -> None:
    """Within the time for a first request; a device that has shaken hands stays."""
    with serve(make_verifier(MODEL, ()), request_seconds=1.0) as address, Client(address) as device:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=HANG) as silent:
            silent.sendall(sent)
            with suppress(ConnectionResetError):
                while silent.recv(1000):
                    pass  # perhaps a 400 first
        device.open([5, 6, 7])
        assert device.verify(1, 3, TokenTree()).base_len == 3
