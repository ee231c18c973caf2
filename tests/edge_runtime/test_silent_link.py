"""A connection that has become silent: kept, replaced or given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request

from benchmarks.links import EmulatedLink
from edge_runtime.link.events import Arrived, LinkDown, LinkEvent, LinkUp
from edge_runtime.link.websocket import CONNECT_TIMEOUT, HEAD_START, LONGEST_TIMEOUT, RENEWALS, ROUND_TRIPS, Link
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import (
    PROTOCOL_VERSION,
    SUBPROTOCOL,
    Features,
    Hello,
    Open,
    Welcome,
    decode_client,
    encode,
)
from tests.waiting import HANG

HASH = "0" * 16
HELLO = Hello(PROTOCOL_VERSION, HASH, HASH, "test")
WELCOME = Welcome(PROTOCOL_VERSION, HASH, HASH, 100, 64, 8, 8)
#: longer than anything takes here


class Greeter:
    """Greets who dials, answers pings, and says what it is told to."""

    def __init__(self) -> None:
        self.connections: list[ServerConnection] = []
        self.greets = asyncio.Event()
        self.greets.set()

    async def serve(self, connection: ServerConnection) -> None:
        self.connections.append(connection)
        assert isinstance(decode_client(await connection.recv(decode=False)), Hello)
        await self.greets.wait()
        await connection.send(encode(WELCOME))
        await connection.wait_closed()

    async def say(self, number: int) -> None:
        await self.connections[-1].send(encode(Features(0, number, b"")))

    async def all_closed(self) -> None:
        for connection in self.connections:
            await asyncio.wait_for(connection.wait_closed(), HANG)


class Device:
    """A link and what it reports."""

    def __init__(self, address: str) -> None:
        self.events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        self.link = Link(address, HELLO, self.events.put_nowait)
        self.task = asyncio.create_task(self.link.run())

    async def next(self) -> LinkEvent:
        return await asyncio.wait_for(self.events.get(), HANG)

    async def hears(self) -> int:
        event = await self.next()
        assert isinstance(event, Arrived) and isinstance(event.message, Features), event
        return event.message.start

    async def comes_up(self) -> None:
        while not isinstance(await self.next(), LinkUp):
            pass

    async def close(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Greeter, EmulatedLink, Device]]:
    greeter = Greeter()
    async with (
        serve(greeter.serve, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server,  # type: ignore[list-item]
        EmulatedLink(server.sockets[0].getsockname()[1]) as link,
    ):
        device = Device(link.address)
        try:
            await device.comes_up()
            yield greeter, link, device
        finally:
            await device.close()
            greeter.greets.set()


def run(test: Callable[[Greeter, EmulatedLink, Device], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with linked() as (greeter, link, device):
            await test(greeter, link, device)

    asyncio.run(all_of_it())


async def lose_a_message(greeter: Greeter, link: EmulatedLink) -> None:
    """The network has moved: what is open now reaches nobody any more."""
    link.silent = True
    await greeter.say(0)
    await asyncio.sleep(0.05)
    link.silent = False


def test_a_busy_verifier_answers_a_ping_and_is_kept() -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device) -> None:
        for _ in range(3):
            device.link.renew()
            await asyncio.sleep(0.05)
        await asyncio.sleep(2 * HEAD_START)
        await greeter.say(7)
        assert await device.hears() == 7
        assert len(greeter.connections) == 1

    run(test)


def test_a_half_open_connection_is_replaced() -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device) -> None:
        await lose_a_message(greeter, link)
        device.link.renew()
        down = await device.next()
        assert isinstance(down, LinkDown) and "another connection" in down.reason
        assert isinstance(await device.next(), LinkUp) and device.link.welcome == WELCOME
        assert len(greeter.connections) == 2
        await greeter.say(8)
        assert await device.hears() == 8
        await device.close()
        await greeter.all_closed()

    run(test)


def test_one_that_speaks_again_first_is_kept() -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device) -> None:
        greeter.greets.clear()
        link.held = True
        device.link.renew()
        await asyncio.sleep(2 * HEAD_START)  # it is being dialled beside
        link.held = False
        await greeter.say(9)
        assert await device.hears() == 9
        greeter.greets.set()
        await asyncio.sleep(HEAD_START)
        await greeter.connections[0].send(encode(Features(0, 10, b"")))
        assert await device.hears() == 10
        for connection in greeter.connections[1:]:
            await asyncio.wait_for(connection.wait_closed(), HANG)

    run(test)


def test_where_nobody_can_be_dialled_the_silent_one_is_given_up() -> None:
    """So that the app is told why, as of any link that is down."""

    async def test(greeter: Greeter, link: EmulatedLink, device: Device) -> None:
        await lose_a_message(greeter, link)
        port, link.upstream_port = link.upstream_port, 1
        device.link.renew()
        down = await device.next()
        assert isinstance(down, LinkDown) and "dialling again failed" in down.reason
        assert device.link.welcome is None
        link.upstream_port = port
        await device.comes_up()
        await greeter.say(11)
        assert await device.hears() == 11

    run(test)


def test_pings_alone_do_not_keep_a_connection_for_ever() -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device) -> None:
        for _ in range(RENEWALS):
            device.link.renew()
            await asyncio.sleep(0.02)
        await greeter.say(12)
        assert await device.hears() == 12
        for _ in range(RENEWALS + 1):
            assert device.events.empty()
            device.link.renew()
            await asyncio.sleep(0.02)
        down = await device.next()
        assert isinstance(down, LinkDown) and "silent for too long" in down.reason
        await device.comes_up()

    run(test)


def test_closing_ends_what_is_being_dialled() -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device) -> None:
        await lose_a_message(greeter, link)
        greeter.greets.clear()
        device.link.renew()
        while len(greeter.connections) < 2:
            await asyncio.sleep(0.01)
        await device.close()
        greeter.greets.set()
        await greeter.all_closed()
        assert device.link.welcome is None

    run(test)


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (1012, "", "the verifier is restarting"),
        (1000, "", "the verifier closed the connection"),
        (4003, "the token was revoked", "the token was revoked"),
        (4999, "", "the verifier closed the connection with code 4999"),
        (None, "", "the connection was cut"),
    ],
)
def test_the_end_of_a_connection_is_told_in_words(code: int | None, said: str, told: str) -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device) -> None:
        if code is None:
            link.cut()
        else:
            await greeter.connections[-1].close(code, said)
        assert await device.next() == LinkDown(told)

    run(test)


def test_a_verifier_that_greets_and_hangs_up_is_dialled_ever_more_slowly() -> None:
    dialled: list[float] = []

    async def greet(connection: ServerConnection) -> None:
        dialled.append(asyncio.get_running_loop().time())
        await connection.recv()
        await connection.send(encode(WELCOME))
        await connection.close(1011, "broken")

    async def test() -> None:
        async with serve(greet, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server:  # type: ignore[list-item]
            device = Device(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            while len(dialled) < 5:
                await device.next()
            await device.close()

    asyncio.run(test())
    assert dialled[4] - dialled[3] > 0.5, "the fourth delay is 0.8 s, give or take 30 %"


#: more than sockets of this machine hold between two ends, in frames that a verifier takes
LONG, FRAMES = Open(0, bytes(16), 0, bytes(500_000), 0, Sampling()), 40


def unsent(link: Link) -> int:
    assert link._connection is not None
    return link._queued + link._connection.transport.get_write_buffer_size()


async def holds(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def unread() -> AsyncIterator[tuple[Greeter, Device]]:
    """A device that has sent more than a verifier takes which does not read, with nothing between them."""
    greeter = Greeter()
    # no pings: their pongs would wait behind what the device has not sent, and the server would hang up
    options: dict[str, Any] = {"max_queue": 1, "ping_interval": None, "close_timeout": 0.1}
    async with serve(greeter.serve, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL], **options) as server:  # type: ignore[list-item]
        device = Device(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            await device.comes_up()
            for _ in range(FRAMES):
                device.link.send(LONG)
            yield greeter, device
        finally:
            await device.close()


def test_sending_never_waits_and_another_connection_is_dialled() -> None:
    """While the one there takes nothing."""

    async def test() -> None:
        async with unread() as (greeter, device):
            while device.link._beside is None:  # until then what there is to send is taken
                device.link.renew()
                await asyncio.sleep(0.1)
            assert unsent(device.link) > 0
            down = await device.next()
            assert isinstance(down, LinkDown) and "another connection" in down.reason
            assert isinstance(await device.next(), LinkUp) and len(greeter.connections) == 2
            await asyncio.wait_for(device.link.flush(), HANG)
            assert unsent(device.link) == 0

    asyncio.run(test())


def test_a_verifier_that_hangs_up_while_it_is_still_sent_something_is_dialled_again() -> None:
    """It reads on, and drops what it reads: the connection ends after that, and not with an error."""

    async def test() -> None:
        async with unread() as (greeter, device):
            await holds(lambda: unsent(device.link) > 0)
            refused = greeter.connections[-1]
            refused.protocol.fail(1009, "too large")
            refused.send_data()
            refused.transport.resume_reading()
            assert await device.next() == LinkDown("too large")
            assert isinstance(await device.next(), LinkUp)

    asyncio.run(test())


def test_a_long_message_on_its_way_is_not_silence() -> None:
    async def test() -> None:
        async with unread() as (greeter, device):
            await holds(lambda: device.link._queued < FRAMES * len(LONG.tokens))
            for _ in range(3):
                device.link.renew()
                assert device.link._beside is None
                before = unsent(device.link)
                while unsent(device.link) >= before:
                    await asyncio.wait_for(greeter.connections[0].recv(decode=False), HANG)
            assert len(greeter.connections) == 1

    asyncio.run(test())


@pytest.mark.parametrize(("upgrade", "greeting"), [(0.35, 0.35), (0.75, 0.1), (0.1, 0.75)])
def test_each_phase_of_a_connection_has_its_time_and_more_after_a_time_out(upgrade: float, greeting: float) -> None:
    """Both together may take longer than one; where one takes longer by itself, the next connection waits for it."""
    patience, dials = 0.5, list[int]()

    async def accept(connection: ServerConnection, request: Request) -> None:
        dials.append(1)
        await asyncio.sleep(upgrade)

    async def greet(connection: ServerConnection) -> None:
        await connection.recv()
        await asyncio.sleep(greeting)
        with suppress(ConnectionClosed):
            await connection.send(encode(WELCOME))
            await connection.wait_closed()

    async def test() -> None:
        names = [SUBPROTOCOL]
        async with serve(greet, "127.0.0.1", 0, subprotocols=names, process_request=accept) as server:  # type: ignore[arg-type]
            device = Device(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            device.link._patience = patience
            await asyncio.wait_for(device.comes_up(), HANG)
            assert device.link._patience == min(max(CONNECT_TIMEOUT, ROUND_TRIPS * device.link._rtt), LONGEST_TIMEOUT)
            assert device.link._rtt >= greeting
            await device.close()

    asyncio.run(test())
    assert len(dials) >= (1 if max(upgrade, greeting) < patience else 2)
