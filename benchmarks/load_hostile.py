"""Hostile companions of a load run, each a process of its own so that the measuring one stays undisturbed.

    flood      sends its VERIFY again and again, and PINGs, as fast as the socket takes them
    slow       asks for all feature rows of a long text twenty times a second and reads one frame a second
    big        valid trees of the largest size, one right after the other
    half-open  never reads again after the handshake, but keeps asking

and those of `benchmarks.load_strangers`, which hold sockets, bodies and messages open.

A companion reads one JSON line (`Orders`) from standard input, prints `ready` after its handshake, runs until standard
input ends and then prints what it did as one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from websockets.asyncio.client import ClientConnection

from benchmarks.load_device import FAULTS, GREEDY, RETRY, Dial, Drafts, Refusal, describe
from benchmarks.load_strangers import STRANGERS, Strangers
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import (
    ERR_ORDER,
    FINISH_NONE,
    Error,
    Open,
    Opened,
    Verdict,
    Verify,
    Welcome,
    decode_server,
    encode,
    pack_ids,
    pack_tree,
)

KINDS = ("flood", "slow", "big", "half-open", *STRANGERS)


class Orders(msgspec.Struct):
    """prompt: token ids. model: name of the model in completions. Other fields: see `Dial`."""

    kind: str
    url: str
    target_hash: str
    drafter_hash: str
    token: str | None
    tls_ca: str | None
    prompt: list[int]
    seed: str
    model: str

    def dial(self) -> Dial:
        ca = Path(self.tls_ca) if self.tls_ca else None
        return Dial(self.url, self.target_hash, self.drafter_hash, self.token, ca)


class Companion:
    """A hostile client; `counts` says what it sent and received."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._rng = orders, random.Random(orders.seed)
        self.counts: Counter[str] = Counter()
        self.ready = asyncio.Event()
        self._session, self._seq, self._base_len = b"", 0, 0

    async def run(self) -> None:
        """Run until cancelled; a lost connection is counted and opened again."""
        if self._orders.kind in STRANGERS:
            await Strangers(self._orders.dial(), self._orders.model, self.counts, self.ready).run(self._orders.kind)
        kinds: dict[str, Callable[[ClientConnection, Welcome], Awaitable[None]]] = {
            "flood": self._flood,
            "slow": self._slow,
            "big": self._big,
            "half-open": self._half_open,
        }
        while True:
            try:
                async with self._orders.dial().open() as (connection, welcome):
                    self.ready.set()
                    await kinds[self._orders.kind](connection, welcome)
            except Refusal as refusal:
                self.counts[f"error {refusal.error.code}"] += 1
            except FAULTS as fault:
                self.counts[describe(fault)] += 1
            await asyncio.sleep(RETRY)

    async def _send(self, connection: ClientConnection, message: Open | Verify) -> None:
        await connection.send(encode(message))
        self.counts[f"sent {type(message).__name__}"] += 1

    async def _open(self, connection: ClientConnection, prompt: Sequence[int], have: int) -> None:
        self._session, self._seq, self._base_len = secrets.token_bytes(16), 0, len(prompt)
        await self._send(connection, Open(0, self._session, 0, pack_ids(tuple(prompt)), have, GREEDY))

    def _tree(self, nodes: int, vocab_size: int) -> TokenTree:
        tree, _ = Drafts(nodes, 0, vocab_size, self._rng).tree([vocab_size])  # no true token is known
        return tree

    async def _receive(self, connection: ClientConnection) -> Opened | Verdict | Error | None:
        """Receive one message; a verdict advances this side."""
        message = decode_server(await connection.recv(decode=False))
        name = f"got error {message.code}" if isinstance(message, Error) else f"got {type(message).__name__}"
        self.counts[name] += 1
        if isinstance(message, Verdict) and message.seq == self._seq + 1:
            self._seq = message.seq
            self._base_len = message.base_len + len(message.accepted) + 1
        return message if isinstance(message, Opened | Verdict | Error) else None

    async def _flood(self, connection: ClientConnection, welcome: Welcome) -> None:
        prompt = self._orders.prompt
        await self._open(connection, prompt, len(prompt))
        over = asyncio.Event()

        async def read() -> None:
            while True:
                message = await self._receive(connection)
                if isinstance(message, Error):
                    if message.code != ERR_ORDER:  # a VERIFY that came too late
                        over.set()
                elif isinstance(message, Verdict) and message.finish != FINISH_NONE:
                    over.set()

        async with _beside(read()) as reader:
            tree, at = self._tree(min(12, welcome.max_nodes), welcome.vocab_size), -1
            while not reader.done():
                if over.is_set():
                    over.clear()
                    await self._open(connection, prompt, len(prompt))
                if at != self._seq:
                    tree, at = self._tree(min(12, welcome.max_nodes), welcome.vocab_size), self._seq
                for _ in range(8):
                    verify = Verify(0, self._seq + 1, self._base_len, *pack_tree(tree))
                    await self._send(connection, verify)
                await connection.ping()
                self.counts["sent PING"] += 1
                await asyncio.sleep(0)
            await reader  # raises its error

    async def _big(self, connection: ClientConnection, welcome: Welcome) -> None:
        prompt = self._orders.prompt
        while True:
            await self._open(connection, prompt, len(prompt))
            message: Opened | Verdict | Error | None = None
            # a random tree is not as deep as its number of nodes, but may be
            while self._base_len + welcome.max_nodes <= welcome.max_context:
                tree = self._tree(welcome.max_nodes, welcome.vocab_size)
                await self._send(connection, Verify(0, self._seq + 1, self._base_len, *pack_tree(tree)))
                while not isinstance(message := await self._receive(connection), Verdict | Error):
                    pass
                if isinstance(message, Error) or message.finish != FINISH_NONE:
                    break
            if isinstance(message, Error):
                await asyncio.sleep(message.retry_after_ms / 1e3)

    def _long(self, welcome: Welcome) -> list[int]:
        """Repeat the prompt up to half of the context."""
        prompt = self._orders.prompt
        return (prompt * (welcome.max_context // len(prompt) + 1))[: max(1, welcome.max_context // 2)]

    async def _slow(self, connection: ClientConnection, welcome: Welcome) -> None:
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        text = self._long(welcome)

        async def read() -> None:
            while True:
                await self._receive(connection)
                await asyncio.sleep(1.0)

        async with _beside(read()) as reader:
            await self._open(connection, text, 0)
            while not reader.done():
                await self._send(connection, Open(0, self._session, 0, pack_ids(text), 0, GREEDY))
                await asyncio.sleep(0.05)
            await reader

    async def _half_open(self, connection: ClientConnection, welcome: Welcome) -> None:
        connection.transport.pause_reading()
        await self._open(connection, self._long(welcome), 0)
        while True:
            await self._send(connection, Open(0, self._session, 0, pack_ids(self._long(welcome)), 0, GREEDY))
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _beside(work: Awaitable[None]) -> AsyncIterator[asyncio.Future[None]]:
    """Run `work` as a task for as long as the block lasts."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    orders = msgspec.json.decode(await loop.run_in_executor(None, sys.stdin.buffer.readline), type=Orders)
    companion, processor, began = Companion(orders), time.process_time(), time.monotonic()
    async with _beside(companion.run()):
        end = loop.run_in_executor(None, sys.stdin.buffer.read)
        ready = asyncio.ensure_future(companion.ready.wait())
        await asyncio.wait({end, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            print("ready", flush=True)
            await end
        ready.cancel()
    share = round(100 * (time.process_time() - processor) / (time.monotonic() - began))
    print(json.dumps({**companion.counts, "percent of a core": share}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
