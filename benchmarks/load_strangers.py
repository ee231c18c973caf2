"""Hostile companions that hold sockets, bodies and messages open: what a client can do with few bytes.

    half-request    asks once, then sends half of a second request and waits
    drip-body       sends a body a byte at a time behind a refusal
    idle-sockets    connects and says nothing
    unfinished      sends the first half of a message of 1 MiB
    crowd           opens as many connections as it gets
    long-prompts    asks for completions of prompts of a megabyte

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
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection

from benchmarks.load_device import FAULTS, Dial, Refusal, describe

#: sockets of one companion at a time
SOCKETS = 24
#: seconds until one that was cut comes again
AGAIN = 0.2
DRIP = 0.2
HALF_MESSAGE = bytes([0x82, 0xFF, *(1 << 20).to_bytes(8, "big"), 0, 0, 0, 0]) + bytes(1 << 19)
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Strangers:
    """SOCKETS tasks of one kind. counts: what they did and what became of it. ready: set once one has begun."""

    def __init__(self, dial: Dial, model: str, counts: Counter[str], ready: asyncio.Event) -> None:
        self._dial, self._model, self._counts, self._ready = dial, model, counts, ready
        address = urlsplit(dial.url)
        self._host, self._port = address.hostname or "", address.port or (443 if address.scheme == "wss" else 80)
        self._tls = ssl.create_default_context(cafile=dial.tls_ca) if address.scheme == "wss" else None
        self.kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "half-request": (SOCKETS, self._half_request),
            "drip-body": (SOCKETS, self._drip_body),
            "idle-sockets": (10 * SOCKETS, self._idle),
            "unfinished": (SOCKETS, self._unfinished),
            "crowd": (4 * SOCKETS, self._crowd),
            "long-prompts": (4, self._long_prompt),
        }

    async def run(self, kind: str) -> None:
        """Until cancelled."""
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
    async def _connected(self) -> AsyncIterator[Peer]:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
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

    async def _drip_body(self) -> None:
        async with self._connected() as (reader, writer):
            writer.write(self._head("POST /v1/chat/completions", "Authorization: Bearer no", "Content-Length: 99999"))
            cut = asyncio.create_task(self._until_cut(reader))
            while not cut.done():
                writer.write(b"x")
                await asyncio.sleep(DRIP)

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
        body = json.dumps({"model": self._model, "messages": [{"role": "user", "content": text}]}).encode()
        headers = ["Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"]
        if self._dial.token:
            headers.append(f"Authorization: Bearer {self._dial.token}")
        async with self._connected() as (reader, writer):
            writer.write(self._head("POST /v1/chat/completions", *headers) + body)
            status = (await reader.readline()).split()
            self._counts[f"status {status[1].decode()}" if len(status) > 1 else "cut"] += 1
            await self._until_cut(reader)


#: what `--bad` takes of these
STRANGERS = ("half-request", "drip-body", "idle-sockets", "unfinished", "crowd", "long-prompts")
