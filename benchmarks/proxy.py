"""A TCP proxy that breaks links on purpose: resets, silence (half-open links) and delay."""

from __future__ import annotations

import asyncio
import contextlib


class FaultyLink:
    """Listens on loopback and forwards to `upstream_port`; the faults are switched while it runs.

    silent: bytes are swallowed in both directions while every connection stays open.
    delay: seconds added to each direction.
    """

    def __init__(self, upstream_port: int, delay: float = 0.0) -> None:
        self.upstream_port, self.delay = upstream_port, delay
        self.silent = False
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> FaultyLink:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server:
            self._server.close()
        self.cut()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(up_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer)),
            asyncio.create_task(self._pump(up_reader, writer)),
        ]
        with contextlib.suppress(asyncio.CancelledError):  # the loop ends
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for end in (writer, up_writer):
            self._writers.discard(end)
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.silent:
                    continue
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.silent:
                    continue
                writer.write(data)
                await writer.drain()
