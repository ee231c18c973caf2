"""Hostile companions that hold sockets, bodies and messages open: what a client can do with few bytes.

    half-request    asks once, then sends half of a second request and waits
    half-tls        begins a TLS handshake and says no more
    drip-body       sends a body a byte at a time behind a refusal
    chunks          sends a request in chunks of a byte, as fast as they are taken
    idle-sockets    connects and says nothing
    unfinished      sends the first half of a message of 1 MiB
    crowd           opens as many connections as it gets
    long-prompts    asks for completions of prompts of a megabyte
    grammars        asks for answers by schemas that take long to compile, each another one

Each comes back as soon as it is cut. `benchmarks.load_hostile` runs them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection

from benchmarks.load_device import FAULTS, Dial, Refusal, describe

#: sockets of one companion at a time
SOCKETS = 24
#: seconds until one that was cut comes again
AGAIN = 0.2
DRIP = 0.2
#: the head of a TLS ClientHello of 512 bytes
HELLO = bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3])
HALF_MESSAGE = bytes([0x82, 0xFF, *(1 << 20).to_bytes(8, "big"), 0, 0, 0, 0]) + bytes(1 << 19)
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Strangers:
    """SOCKETS tasks of one kind. counts: their actions and results. ready: set once one has begun."""

    def __init__(self, dial: Dial, model: str, counts: Counter[str], ready: asyncio.Event) -> None:
        self._dial, self._model, self._counts, self._ready = dial, model, counts, ready
        address = urlsplit(dial.url)
        self._host, self._port = address.hostname or "", address.port or (443 if address.scheme == "wss" else 80)
        self._tls = ssl.create_default_context(cafile=dial.tls_ca) if address.scheme == "wss" else None
        self.kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "half-request": (SOCKETS, self._half_request),
            "half-tls": (10 * SOCKETS, self._half_tls),
            "drip-body": (SOCKETS, self._drip_body),
            "chunks": (4, self._chunks),
            "idle-sockets": (10 * SOCKETS, self._idle),
            "unfinished": (SOCKETS, self._unfinished),
            "crowd": (4 * SOCKETS, self._crowd),
            "long-prompts": (4, self._long_prompt),
            "grammars": (8, self._grammar),
        }

    async def run(self, kind: str) -> None:
        """Run until cancelled."""
        number, once = self.kinds[kind]

        async def again_and_again() -> None:
            while True:
                try:
                    await once()
                except Refusal as refusal:
                    self._counts[f"error {refusal.error.code}"] += 1
                except FAULTS as fault:
                    self._counts[describe(fault)] += 1
                await asyncio.sleep(AGAIN)

        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(again_and_again())
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def _connected(self, plain: bool = False) -> AsyncIterator[Peer]:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=None if plain else self._tls)
        self._counts["connected"] += 1
        self._ready.set()
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _until_cut(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        self._counts["cut"] += 1

    def _head(self, request: str, *headers: str) -> bytes:
        return "\r\n".join([f"{request} HTTP/1.1", f"Host: {self._host}:{self._port}", *headers, "", ""]).encode()

    async def _half_request(self) -> None:
        async with self._connected() as (reader, writer):
            writer.write(self._head("GET /healthz") + self._head("GET /healthz")[:-4])
            await self._until_cut(reader)

    async def _half_tls(self) -> None:
        async with self._connected(plain=True) as (reader, writer):
            writer.write(HELLO)
            await self._until_cut(reader)

    async def _drip_body(self) -> None:
        async with self._connected() as (reader, writer):
            writer.write(self._head("POST /v1/chat/completions", "Authorization: Bearer no", "Content-Length: 99999"))
            cut = asyncio.create_task(self._until_cut(reader))
            while not cut.done():
                writer.write(b"x")
                await asyncio.sleep(DRIP)

    async def _chunks(self) -> None:
        async with self._connected() as (reader, writer):
            writer.write(self._post("Transfer-Encoding: chunked"))
            for byte in json.dumps({"model": self._model, "prompt": "w5 " * 20_000}).encode():
                writer.write(b"1\r\n%c\r\n" % byte)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await self._answered(reader)

    async def _idle(self) -> None:
        async with self._connected() as (reader, _):
            await self._until_cut(reader)

    async def _unfinished(self) -> None:
        async with self._dial.open() as (connection, _):
            self._counts["connected"] += 1
            self._ready.set()
            connection.transport.write(HALF_MESSAGE)
            await self._until_closed(connection)

    async def _crowd(self) -> None:
        async with self._dial.open() as (connection, _):
            self._counts["connected"] += 1
            self._ready.set()
            await self._until_closed(connection)

    async def _until_closed(self, connection: ClientConnection) -> None:
        await connection.wait_closed()
        self._counts[f"closed with {connection.close_code}"] += 1

    async def _long_prompt(self) -> None:
        text = "word " * 190_000 + secrets.token_hex(8)
        await self._ask({"messages": [{"role": "user", "content": text}]})

    async def _grammar(self) -> None:
        names = [secrets.token_hex(4) for _ in range(60)]
        text = {"type": "string", "pattern": f"^([a-z]{{1,40}}-?){{1,30}}{names[0]}$"}
        form = {"type": "object", "properties": dict.fromkeys(names, text), "required": names}
        schema = {"name": "form", "schema": {**form, "additionalProperties": False}}
        asked = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 4}
        await self._ask({"messages": [{"role": "user", "content": "w5"}], **asked})

    async def _ask(self, fields: dict[str, Any]) -> None:
        body = json.dumps({"model": self._model, **fields}).encode()
        async with self._connected() as (reader, writer):
            writer.write(self._post(f"Content-Length: {len(body)}") + body)
            await self._answered(reader)

    def _post(self, length: str) -> bytes:
        headers = ["Content-Type: application/json", length, "Connection: close"]
        if self._dial.token:
            headers.append(f"Authorization: Bearer {self._dial.token}")
        return self._head("POST /v1/chat/completions", *headers)

    async def _answered(self, reader: asyncio.StreamReader) -> None:
        status = (await reader.readline()).split()
        self._counts[f"status {status[1].decode()}" if len(status) > 1 else "cut"] += 1
        await self._until_cut(reader)


#: kinds for `--bad`
STRANGERS = (
    "half-request",
    "half-tls",
    "drip-body",
    "chunks",
    "idle-sockets",
    "unfinished",
    "crowd",
    "long-prompts",
    "grammars",
)
