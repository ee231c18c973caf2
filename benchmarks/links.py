"""Network links in one process: a TCP proxy with delay, jitter, bandwidth, loss, outages, silence and resets.

It emulates the effect of a bad link on TCP, not packets: a lost packet delays all that follows by a retransmission,
bytes never come out of order, and in an outage they wait until it is over. Randomness is seeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

#: bytes of one packet, for loss
PACKET = 1448
#: most bytes that may wait in one direction; then the sender is slowed down
BUFFER = 1 << 18
#: a lost packet is sent again after this many round trips, and never sooner than `LEAST_RETRY` seconds
RETRY_TRIPS, LEAST_RETRY = 1.5, 0.2


@dataclass(frozen=True)
class Profile:
    """A link. rtt, jitter: ms, a round trip's mean and standard deviation; loss: % of packets; down, up: Mbit/s.

    outage: seconds of silence in every `period` seconds. half_open: an outage never ends for connections that were
    open; a new connection gets through.
    """

    name: str
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    down: float = 1000.0
    up: float = 1000.0
    outage: float = 0.0
    period: float = 0.0
    half_open: bool = False


_4G = Profile("4g", 60, 20, 0.5, 20, 6)
#: typical links of phones and laptops
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("lan", 1),
        Profile("wifi", 8, 3, 0.1, 100, 40),
        Profile("5g", 30, 8, 0.1, 100, 20),
        _4G,
        Profile("edge-of-cell", 240, 60, 1, 5, 1),
        Profile("congested", 400, 120, 3, 1, 0.5),
        Profile("satellite", 1200, 40, 0.5, 10, 3),
        replace(_4G, name="flap", outage=0.5, period=4),
        replace(_4G, name="cut", outage=3, period=20),
        replace(_4G, name="half-open", outage=3, period=20, half_open=True),
    )
}


class LabLink:
    """A link of this profile to a verifier, with outages, random delays, and manual faults.

    Manual faults: `silent` (nothing that is sent arrives), `cut()` (every connection is reset), `delay` (seconds each
    way, on top of the profile's). The profile's own outages come within `weather()`, which restarts the random numbers:
    links of one seed behave alike in the same weather, and each direction (False down, True up) whatever is sent in the
    other. dilation: the profile's time runs slower by this factor than the clock.
    """

    def __init__(self, profile: Profile | None, seed: int, delay: float, dilation: float) -> None:
        self.profile, self.delay, self.dilation = profile or Profile("plain"), delay, dilation
        self.silent = self.held = False
        self.up = self.down = 0  # bytes forwarded
        self.cuts = 0
        self._seed, self.rngs = seed, [random.Random(f"{seed} {up}") for up in (False, True)]

    @property
    def address(self) -> str:
        """The address that the device dials."""
        raise NotImplementedError

    def cut(self) -> None:
        """Reset every connection; counted if there was one."""
        raise NotImplementedError

    def strand(self) -> None:
        """Drop everything sent over the present connections, however long they stay open."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def weather(self, phase: float = 0.5) -> AsyncIterator[None]:
        """Run the profile's outages in this context, the first one after `phase` periods; it also seeds the delays."""
        for up, rng in enumerate(self.rngs):
            rng.seed(f"{self._seed} {phase} {up}")
        outages = asyncio.create_task(self._outages(phase))
        try:
            yield
        finally:
            outages.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await outages

    async def _outages(self, phase: float) -> None:
        profile, dilation = self.profile, self.dilation
        if not profile.outage:
            return
        await asyncio.sleep(dilation * profile.period * phase)
        while True:
            self.held = True
            if profile.half_open:
                self.strand()
            try:
                await asyncio.sleep(dilation * profile.outage)
            finally:
                self.held = False
            await asyncio.sleep(dilation * (profile.period - profile.outage))

    def trip(self, up: bool) -> float:
        """Return the seconds of the next packet, one way, without losses."""
        profile, seconds = self.profile, self.profile.rtt / 2000
        if profile.jitter:  # gamma distributed, like real round trips: a steep start and a long tail
            rtt, spread = profile.rtt / 1000, profile.jitter / 1000
            seconds = self.rngs[up].gammavariate((rtt / spread) ** 2 / 2, spread**2 / rtt)
        return self.delay + self.dilation * seconds


class EmulatedLink(LabLink):
    """Listens on loopback and forwards to `upstream_port` over a link of this profile.

    While it is `silent`, bytes are dropped, and later ones in that direction too; connections stay open, and new ones
    wait, as TCP tries again. While it is `held`, as in an outage, bytes wait.
    """

    def __init__(
        self, upstream_port: int, profile: Profile | None = None, seed: int = 0, delay: float = 0.0, dilation: float = 1
    ) -> None:
        super().__init__(profile, seed, delay, dilation)
        self.upstream_port = upstream_port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()

    async def __aenter__(self) -> EmulatedLink:
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
        self.cuts += bool(self._pipes)
        for pipe in list(self._pipes):
            pipe.abort()

    def strand(self) -> None:
        for pipe in self._pipes:
            pipe.dead = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while self.silent:
                await asyncio.sleep(0.005)
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except (OSError, asyncio.CancelledError):  # the latter: the loop ends
            writer.transport.abort()
            return
        pipes = [_Pipe(self, reader, up_writer, True), _Pipe(self, up_reader, writer, False)]
        self._pipes.update(pipes)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the loop ends
                await asyncio.wait([asyncio.create_task(pipe.run()) for pipe in pipes],
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        finally:
            for pipe in pipes:
                self._pipes.discard(pipe)
                pipe.abort()

    def arrival(self, packets: int, at: float, up: bool) -> float:
        """Return when a chunk of `packets` packets that leaves at `at` arrives."""
        profile, late = self.profile, self.trip(up)
        if profile.loss:
            lost = sum(self.rngs[up].random() < profile.loss / 100 for _ in range(packets))
            late += self.dilation * lost * max(LEAST_RETRY, RETRY_TRIPS * profile.rtt / 1000)
        return at + late


class _Pipe:
    """A direction of one connection."""

    def __init__(
        self, link: EmulatedLink, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool
    ) -> None:
        self.link, self.reader, self.writer, self.up = link, reader, writer, up
        self.dead = False  # its packets no longer arrive
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._waiting = 0
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Forward until one end closes."""
        self._tasks = [asyncio.create_task(self._take()), asyncio.create_task(self._give())]
        with contextlib.suppress(OSError):
            await self._tasks[0]
            await self._tasks[1]

    def abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.writer.transport.abort()

    def _swallows(self) -> bool:
        """Return whether bytes are dropped now; later ones are too, as TCP keeps the order."""
        self.dead = self.dead or self.link.silent
        return self.dead

    async def _take(self) -> None:
        """Read a chunk and compute its arrival; an empty chunk ends."""
        loop, link = asyncio.get_running_loop(), self.link
        megabits = link.profile.up if self.up else link.profile.down
        free = arrival = loop.time()
        while True:
            data = await self.reader.read(65536)
            if data and self._swallows():
                continue
            free = max(free, loop.time()) + 8 * len(data) / (1e6 * megabits) * link.dilation
            arrival = max(arrival, link.arrival(-(-len(data) // PACKET), free, self.up))
            self._chunks.append((arrival, data))
            self._waiting += len(data)
            self._news.set()
            if not data:
                return
            while self._waiting > BUFFER:
                self._room.clear()
                await self._room.wait()

    async def _give(self) -> None:
        loop, link = asyncio.get_running_loop(), self.link
        while True:
            while not self._chunks:
                self._news.clear()
                await self._news.wait()
            arrival, data = self._chunks.popleft()
            await asyncio.sleep(max(0.0, arrival - loop.time()))
            while link.held and not self.dead:
                await asyncio.sleep(0.005)
            self._waiting -= len(data)
            self._room.set()
            if not data:
                return
            if self._swallows():
                continue
            if self.up:
                link.up += len(data)
            else:
                link.down += len(data)
            self.writer.write(data)
            await self.writer.drain()
