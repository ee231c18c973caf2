"""The Kotlin WebSocket client against servers that are odd, wrong, secured or refuse."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
import struct
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from android_demo.ci import core
from edge_runtime.link.tls import pin_of
from outrider_core.protocol.wire import Error, Hello, Open, Welcome, decode_client, encode
from tests.android.device import PATIENCE, Device
from tests.broken_network import available, command_in_it
from tests.e2e.test_proxy import proxy
from tests.waiting import HANG

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, TEXT, CLOSE, PING, PONG = 0x82, 0x81, 0x88, 0x89, 0x8A
MASKED = 0x182  # a binary frame whose second byte is given as it is


class Peer:
    """One connection of the device, from the server's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = ""

    async def request(self) -> str:
        """The HTTP request; returns the key's answer."""
        self.head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        key = next(line.split(": ")[1] for line in self.head.split("\r\n") if line.startswith("Sec-WebSocket-Key"))
        return base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()

    async def greet(self, *changes: tuple[str, str]) -> None:
        """Answer the handshake; changes: of the answer's text."""
        text = (
            f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {await self.request()}\r\nSec-WebSocket-Protocol: outrider.v1\r\n\r\n"
        )
        for old, new in changes:
            text = text.replace(old, new)
        self.writer.write(text.encode())

    def send(self, first: int, payload: bytes, size: int | None = None) -> None:
        """A frame; size: what its header says, if that is not the truth."""
        size = len(payload) if size is None else size
        if size < 126 or first == MASKED:
            head = bytes([first & 0xFF, size])
        else:
            head = struct.pack(">BBH", first, 126, size) if size < 65536 else struct.pack(">BBQ", first, 127, size)
        self.writer.write(head + payload)

    async def receive(self) -> tuple[int, bytes]:
        """(first byte, payload) of the device's next frame, which must be masked."""
        first, second = await self.reader.readexactly(2)
        assert second & 0x80
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8), "big")
        mask = await self.reader.readexactly(4)
        data = await self.reader.readexactly(size)
        return first, bytes(byte ^ mask[i & 3] for i, byte in enumerate(data))

    async def welcome(self, manifest: dict[str, Any]) -> bytes:
        """After HELLO: the frame that says WELCOME."""
        first, data = await self.receive()
        hello = decode_client(data)
        assert first == BINARY and isinstance(hello, Hello) and hello.drafter_hash == manifest["drafter_hash"]
        return encode(Welcome(1, hello.target_hash, hello.drafter_hash, 199, 120, 32, 32))

    async def opened(self) -> None:
        """The device took the welcome."""
        assert isinstance(decode_client((await self.receive())[1]), Open)


Script = Callable[[Peer, dict[str, Any]], Awaitable[None]]


async def converse(
    classpath: list[Path], bundle: Path, scripts: list[Script], tls: ssl.SSLContext | None = None, host: str = "",
    told: Sequence[str] = (), seconds: float = 300, proxied: bool = False, **settings: Any,
) -> None:  # fmt: skip
    """Each connection of one device meets the next script; ends when all have run.

    told: what users are told. proxied: only a proxy knows the host.
    """
    manifest = json.loads((bundle / "manifest.json").read_text())
    left, errors, done = list(scripts), list[Exception](), asyncio.Event()
    heard = 0 if told else len(scripts) + 1  # events that show that the device knows of the last script

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while heard <= len(scripts) - len(left):  # what an answer does not see yet is never told
            await asyncio.sleep(0.01)
        script = left.pop(0) if left else None
        try:
            if script:
                await asyncio.wait_for(script(Peer(reader, writer), manifest), 60)
        except BaseException as error:
            errors.append(RuntimeError(f"{len(left)} scripts before the end: {error!r}"))
        writer.close()
        if not left:
            done.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    address = f"wss://{host}:{port}" if tls else f"ws://127.0.0.1:{port}"
    async with server, proxy(port) as (through, asked):
        named = ("-Dhttps.proxyHost=127.0.0.1", f"-Dhttps.proxyPort={through}") if proxied else ()
        program = (*named, "dev.outrider.core.ClientKt")
        settings = {"patience": asdict(replace(PATIENCE, offline=seconds)), **settings}
        async with Device(classpath, bundle, address, program, writer="CLOUD_ONLY", **settings) as device:
            device.ask([1, 5, 6])
            for text in ("", *told):
                while text not in (await device.hear()).get("detail", ""):
                    pass
                heard += 1
            await asyncio.wait([asyncio.create_task(done.wait())], timeout=seconds)
            assert device.process
            device.process.kill()
            await device.process.wait()
        assert set(asked) == ({f"CONNECT {host}:{port} HTTP/1.1".encode()} if proxied else set())
    assert not errors and not left, (errors, left)


async def whole(peer: Peer, manifest: dict[str, Any]) -> None:
    await peer.greet()
    peer.send(BINARY, await peer.welcome(manifest))
    await peer.opened()


def refuses(status: str, body: str = "", *fields: str) -> Script:
    """An HTTP answer in place of a WebSocket; fields: of its head."""

    async def script(peer: Peer, manifest: dict[str, Any]) -> None:
        await peer.request()
        head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields, "", body]
        peer.writer.write("\r\n".join(head).encode())

    return script


def wrong(*frames: tuple[int, bytes, int | None], code: int) -> Script:
    """The device closes with `code` after these frames."""

    async def script(peer: Peer, manifest: dict[str, Any]) -> None:
        await whole(peer, manifest)
        for frame in frames:
            peer.send(*frame)
        first = BINARY
        while first != CLOSE:
            first, payload = await peer.receive()
        assert payload == struct.pack(">H", code)

    return script


def handshake(*changes: tuple[str, str]) -> Script:
    """One that the device must not take."""

    async def script(peer: Peer, manifest: dict[str, Any]) -> None:
        await peer.greet(*changes)
        assert await peer.reader.read(1) == b""

    return script


async def in_pieces(peer: Peer, manifest: dict[str, Any]) -> None:
    """A message in three fragments with a ping between, a ping with content, an unasked pong."""
    await peer.greet()
    welcome = await peer.welcome(manifest)
    peer.send(0x02, welcome[:10])
    peer.send(0x89, b"between")
    peer.send(0x00, b"")
    peer.send(0x80, welcome[10:])
    assert await peer.receive() == (PONG, b"between")
    await peer.opened()
    peer.send(PONG, b"nobody asked")
    peer.send(PING, b"x" * 125)
    first, payload = await peer.receive()
    while first != PONG:
        first, payload = await peer.receive()
    assert payload == b"x" * 125


async def no_frame_of_ours(peer: Peer, manifest: dict[str, Any]) -> None:
    await whole(peer, manifest)
    peer.send(BINARY, b"no message")
    with pytest.raises(asyncio.IncompleteReadError):
        while True:
            await peer.receive()


async def restarts(peer: Peer, manifest: dict[str, Any]) -> None:
    await whole(peer, manifest)
    peer.send(CLOSE, struct.pack(">H", 1012) + b"restart")
    first = BINARY
    while first != CLOSE:
        first, payload = await peer.receive()
    assert payload == struct.pack(">H", 1012)


async def other_side_is_busy(peer: Peer, manifest: dict[str, Any]) -> None:
    await peer.greet()
    await peer.welcome(manifest)
    peer.send(BINARY, encode(Error(6, "full", -1, 100)))


def test_odd_but_right_and_wrong_servers(classpath: list[Path], folders: dict[str, Path]) -> None:
    """One device meets them one after another, and dials again each time."""
    scripts: list[Script] = [
        whole, in_pieces, no_frame_of_ours, restarts, other_side_is_busy, refuses("503 Busy"), refuses("302 Found"),
        handshake(("Sec-WebSocket-Accept: ", "Sec-WebSocket-Accept: x")), handshake(("outrider.v1", "other")),
        handshake(("Upgrade: websocket", "Upgrade: h2c")), handshake(("HTTP/1.1", "SSH-2.0")),
        handshake(("outrider.v1", "outrider.v1\r\nSec-WebSocket-Extensions: permessage-deflate")),
        wrong((TEXT, b"words", None), code=1003), wrong((MASKED, b"masked", 0x80 | 6), code=1002),
        wrong((0xC2, b"reserved", None), code=1002), wrong((0x8B, b"", None), code=1002),
        wrong((0x09, b"a ping in pieces", None), code=1002), wrong((PING, b"x" * 126, None), code=1002),
        wrong((0x80, b"no beginning", None), code=1002),
        wrong((0x02, b"a", None), (BINARY, b"b", None), code=1002), wrong((BINARY, b"", (1 << 20) + 1), code=1009),
        wrong((0x02, b"x" * 60000, None), (0x80, b"", (1 << 20) - 59999), code=1009), whole,
    ]  # fmt: skip
    asyncio.run(converse(classpath, folders["bundle"], scripts))


def test_login_pages_are_links_that_are_down(classpath: list[Path], folders: dict[str, Path]) -> None:
    """Once the user has signed in, the verifier answers."""
    html, page = "Content-Type: text/html", "<html>please sign in</html>"
    scripts = [
        refuses("200 OK", page, html), refuses("403 Forbidden", page, html), refuses("401 Unauthorized", page),
        refuses("302 Found", "", "Location: http://login.example/"), whole,
    ]  # fmt: skip
    asyncio.run(converse(classpath, folders["bundle"], scripts))


def test_refusals_are_told_and_dialled_past(classpath: list[Path], folders: dict[str, Path]) -> None:
    async def other_target(peer: Peer, manifest: dict[str, Any]) -> None:
        await peer.greet()
        await peer.welcome(manifest)
        peer.send(BINARY, encode(Error(2, "another target")))

    async def asks_for_a_token(peer: Peer, manifest: dict[str, Any]) -> None:
        await peer.request()
        assert "\r\nAuthorization: Bearer secret-token\r\n" in peer.head
        assert peer.head.startswith("GET /v1/verify HTTP/1.1\r\n")
        peer.writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 8\r\n\r\nno token")

    scripts = [refuses("503 Busy"), other_target, asks_for_a_token, refuses("403 Forbidden"), whole]
    told = ["HTTP 503", "another target", "no token", "HTTP 403"]
    asyncio.run(converse(classpath, folders["bundle"], scripts, told=told, token="secret-token"))


def test_tls_checks_who_it_is(classpath: list[Path], folders: dict[str, Path], tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    def context(name: str) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(name).configure_cert(made)
        return made

    async def nothing(peer: Peer, manifest: dict[str, Any]) -> None:
        assert await peer.reader.read(1) == b""

    async def run() -> None:
        known = {"ca_file": str(tmp_path / "ca.pem"), "host": "localhost"}
        await converse(classpath, folders["bundle"], [whole], context("localhost"), **known)
        for tls, settings in ((context("example.org"), known), (context("localhost"), {"host": "localhost"})):
            with pytest.raises(AssertionError):  # no script ever runs: the handshake fails
                await converse(classpath, folders["bundle"], [nothing], tls, seconds=5, **settings)

    asyncio.run(run())


def test_only_pinned_keys_are_spoken_to(classpath: list[Path], folders: dict[str, Path], tmp_path: Path) -> None:
    """Through a proxy, too; who has another key gets no request."""
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("verifier.test", "localhost")
    issued.configure_cert(tls)
    right = pin_of(ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode()))
    wrong = "sha256/" + base64.b64encode(bytes(32)).decode()

    async def nothing(peer: Peer, manifest: dict[str, Any]) -> None:
        assert await peer.reader.read(1) == b""

    async def run() -> None:
        for host, proxied in (("localhost", False), ("verifier.test", True)):
            known = {"ca_file": str(tmp_path / "ca.pem"), "host": host, "proxied": proxied}
            await converse(classpath, folders["bundle"], [whole], tls, pins=[wrong, right], **known)
            told = [f"its public key is not pinned: {right}"]
            await converse(classpath, folders["bundle"], [nothing], tls, told=told, pins=[wrong], **known)

    asyncio.run(run())


def test_the_second_address_is_reached_within_a_second(classpath: list[Path]) -> None:
    if not available():
        pytest.skip("no network of its own can be made here")
    by_the_system = "-Djava.net.preferIPv6Addresses=system"  # as on Android; else IPv4 comes first
    dial = core.java(classpath, by_the_system, "dev.outrider.core.link.FirstAddressKt", "{}")
    done = subprocess.run(command_in_it(*dial), capture_output=True, text=True, timeout=HANG)
    assert 0.2 < float(done.stdout) < 1, done.stderr
