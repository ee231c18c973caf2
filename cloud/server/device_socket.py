"""A device's WebSocket: moves frames between the socket and its `Connection`, within limits on both sides."""

from __future__ import annotations

import asyncio
import time

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloud.server.close_codes import CloseCode
from cloud.server.connection import Connection
from cloud.server.limits import BYTES_PER_FRAME, FRAMES_PER_SECOND, Account, Bucket
from cloud.server.service import Verifier
from cloud.server.stream import Stream
from outrider_core.tracing import trace_of


class DeviceSocket:
    """Moves frames between one WebSocket and its Connection.

    streams_by_session: of all connections of this process; hello_seconds: time limit for a device's HELLO.
    """

    def __init__(
        self,
        websocket: WebSocket,
        verifier: Verifier,
        account: Account,
        streams_by_session: dict[bytes, Stream],
        hello_seconds: float,
    ) -> None:
        self._websocket, self._hello_seconds = websocket, hello_seconds
        self._metrics = verifier.metrics
        self._changed, self._drained = asyncio.Event(), asyncio.Event()
        self._frames = Bucket(FRAMES_PER_SECOND, time.monotonic)
        post = asyncio.get_running_loop().call_soon_threadsafe
        self.connection = Connection(verifier, account, streams_by_session, post, self._changed.set)
        self.connection.request_id = trace_of(websocket.scope).request

    async def run(self) -> None:
        """Serve the device until the socket closes."""
        self._metrics.connections.inc()
        tasks = {asyncio.create_task(self._receive()), asyncio.create_task(self._send())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (WebSocketDisconnect, OSError):
            pass  # the device is gone
        finally:
            self.connection.lost()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._metrics.connections.dec()

    async def _receive(self) -> None:
        """Read until the device is gone. Once the connection is closing, frames are read and dropped."""
        connection, loop = self.connection, asyncio.get_running_loop()
        deadline = loop.time() + self._hello_seconds
        while True:
            try:
                async with asyncio.timeout_at(None if connection.greeted else deadline):
                    message = await self._websocket.receive()
            except TimeoutError:
                connection.close(CloseCode.POLICY, "no HELLO in time")
                await asyncio.Event().wait()
            if message["type"] == "websocket.disconnect":
                return
            frame = message.get("bytes")
            if connection.closing is not None:
                continue
            if frame is None:
                connection.close(CloseCode.UNSUPPORTED, "binary messages only")
                continue
            if connection.account.revoked or connection.account.expired:
                connection.close(CloseCode.REVOKED, "the token is no longer valid")
                continue
            self._metrics.bytes_in.inc(len(frame))
            connection.receive(frame)
            self._frames.take(1 + len(frame) // BYTES_PER_FRAME)  # a long one takes as much time as several
            if pause := self._frames.wait():
                await asyncio.sleep(pause)  # nothing is read meanwhile: a flood fills its own socket
            while connection.outbox.crowded and connection.closing is None:
                self._drained.clear()
                await self._drained.wait()
            while connection.backlogged:
                await asyncio.sleep(0.02)

    async def _send(self) -> None:
        """Send the frames that the Connection queues. Return once it wants the socket closed and everything is sent."""
        connection = self.connection
        while True:
            self._changed.clear()
            while (frame := connection.outbox.next()) is not None:
                await self._websocket.send_bytes(frame)
                self._metrics.bytes_out.inc(len(frame))
                self._drained.set()
            if connection.closing is not None:
                if self._websocket.application_state is WebSocketState.CONNECTED:
                    await self._websocket.close(*connection.closing)
                return
            await self._changed.wait()
