"""A link that dials when something needs it and hangs up when nothing does, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from benchmarks.links import EmulatedLink
from edge_runtime.link.events import LinkDown, LinkEvent, LinkUp
from edge_runtime.link.websocket import Link
from outrider_core.protocol.wire import SUBPROTOCOL
from tests.edge_runtime.test_silent_link import HELLO, Device, Greeter, holds, linked
from tests.waiting import HANG


class Clock:
    """The event loop's, moved on by hand."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._real, self._ahead = loop.time, 0.0
        setattr(loop, "time", lambda: self._real() + self._ahead)  # noqa: B010 - a method

    async def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            self._ahead += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def run(test: Callable[[Greeter, EmulatedLink, Device, Clock], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with linked() as (greeter, link, device):
            await test(greeter, link, device, Clock())

    asyncio.run(all_of_it())


def test_ten_idle_minutes_bring_no_frame_and_no_dial_after_hanging_up() -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device, clock: Clock) -> None:
        device.link.stay(60)
        await clock.advance(58)
        assert device.link.welcome
        await clock.advance(4)
        assert device.link.welcome is None
        assert await device.next() == LinkDown("")
        await greeter.all_closed()
        sent = link.up
        for _ in range(10):
            await clock.advance(60)
            device.link.network_changed()
            await asyncio.sleep(0.02)
        assert (link.up, len(greeter.connections), device.events.qsize()) == (sent, 1, 0)
        device.link.stay(math.inf)
        assert isinstance(await device.next(), LinkUp)
        await clock.advance(600)
        assert device.link.welcome and len(greeter.connections) == 2

    run(test)


def test_another_network_means_one_dial_each_time() -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device, clock: Clock) -> None:
        for dials in range(2, 5):
            device.link.network_changed()
            assert await device.next() == LinkDown("the network has changed")
            assert isinstance(await device.next(), LinkUp)
            await asyncio.sleep(0.3)  # longer than the first pause between two attempts
            assert len(greeter.connections) == dials and device.events.empty()

    run(test)


def test_a_connection_that_slept_through_its_end_is_dialled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(greeter: Greeter, link: EmulatedLink, device: Device, clock: Clock) -> None:
        device.link.stay(60)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3600)  # while the event loop's clock stood still
        device.link.stay(math.inf)
        assert isinstance(await device.next(), LinkDown)
        assert isinstance(await device.next(), LinkUp)
        await holds(lambda: len(greeter.connections) == 2)

    run(test)


@pytest.mark.parametrize(
    ("refusals", "wanted"),
    [
        ([401], ["first", "second", "second"]),
        ([503], ["first", "first", "first"]),
        ([403], ["first", "first", "first"]),
    ],
)
def test_a_token_is_asked_for_again_after_401_alone(refusals: list[int], wanted: list[str]) -> None:
    tokens, sent = iter(["first", "second", "third"]), list[str]()

    async def provider() -> str:
        return next(tokens)

    def let_in(connection: ServerConnection, request: Request) -> Response | None:
        sent.append(request.headers["Authorization"].removeprefix("Bearer "))
        return connection.respond(refusals.pop(0), "no entry\n") if refusals else None

    async def test() -> None:
        refused = refusals[0] != 503
        events, serving = asyncio.Queue[LinkEvent](), Greeter().serve
        subprotocols = [SUBPROTOCOL]
        async with serve(serving, "127.0.0.1", 0, subprotocols=subprotocols, process_request=let_in) as server:  # type: ignore[arg-type]
            link = Link(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", HELLO, events.put_nowait, provider)
            running = asyncio.create_task(link.run())
            async with asyncio.timeout(HANG):
                assert await events.get() == LinkDown("no entry", refused)
                assert isinstance(await events.get(), LinkUp)
                link.network_changed()
                assert isinstance(await events.get(), LinkDown)
                assert isinstance(await events.get(), LinkUp)
            running.cancel()
        assert sent == wanted

    asyncio.run(test())


def test_a_failing_token_provider_is_a_link_that_is_down() -> None:
    async def provider() -> str:
        raise ValueError("signed out")

    async def test() -> None:
        events = asyncio.Queue[LinkEvent]()
        running = asyncio.create_task(Link("127.0.0.1:1", HELLO, events.put_nowait, provider).run())
        assert await asyncio.wait_for(events.get(), HANG) == LinkDown("no token: signed out")
        running.cancel()

    asyncio.run(test())
