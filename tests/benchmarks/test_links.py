"""Emulated links: every byte in order, never sooner than the profile says, and faults that are what they claim."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from benchmarks.links import PROFILES, EmulatedLink, Profile
from tests.waiting import HANG

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo_behind(profile: Profile | None = None, seed: int = 0) -> AsyncIterator[EmulatedLink]:
    """An emulated link to a server that sends back what it gets."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with EmulatedLink(server.sockets[0].getsockname()[1], profile, seed) as link:
        yield link
    server.close()


async def dial(link: EmulatedLink) -> Ends:
    return await asyncio.open_connection("127.0.0.1", link.port)


async def round_trip(ends: Ends, data: bytes) -> bytes:
    ends[1].write(data)
    return await asyncio.wait_for(ends[0].readexactly(len(data)), HANG)


async def nothing_comes(ends: Ends) -> bool:
    try:
        await asyncio.wait_for(ends[0].read(1), 0.3)
    except TimeoutError:
        return True
    return False


def test_bytes_come_out_whole_and_in_order_whatever_the_link() -> None:
    profile = Profile("bad", rtt=4, jitter=6, loss=2, down=80, up=80)
    data = random.Random(0).randbytes(300_000)

    async def run() -> None:
        async with echo_behind(profile) as link:
            assert await round_trip(await dial(link), data) == data
            assert link.up == link.down == len(data)

    asyncio.run(run())


def test_a_round_trip_is_never_shorter_than_the_profile_says() -> None:
    async def run() -> None:
        async with echo_behind(Profile("far", rtt=80)) as link:
            ends = await dial(link)
            for _ in range(3):
                began = time.monotonic()
                await round_trip(ends, b"x")
                assert time.monotonic() - began >= 0.08

    asyncio.run(run())


def test_chunks_on_their_way_do_not_wait_for_each_other() -> None:
    """Ten messages sent within a round trip come back within about one, not ten, once the machine is not busy."""

    async def run() -> float:
        async with echo_behind(Profile("far", rtt=300)) as link:
            ends = await dial(link)
            began = time.monotonic()
            for number in range(10):
                ends[1].write(bytes([number]))
                await asyncio.sleep(0.01)
            assert await ends[0].readexactly(10) == bytes(range(10))
            return time.monotonic() - began

    assert any(asyncio.run(run()) < 1.5 for _ in range(20))


def test_bandwidth_bounds_what_gets_through() -> None:
    async def run() -> None:
        async with echo_behind(Profile("thin", up=4, down=1000)) as link:
            began = time.monotonic()
            await round_trip(await dial(link), bytes(200_000))
            assert time.monotonic() - began >= 8 * 200_000 / 4e6

    asyncio.run(run())


def test_round_trips_have_the_mean_and_the_spread_of_the_profile() -> None:
    for name in ("wifi", "4g", "congested", "satellite"):
        profile = replace(PROFILES[name], loss=0)
        for dilation in (1.0, 4.0):
            link = EmulatedLink(1, profile, dilation=dilation)
            round_trips = [1000 / dilation * link.arrival(1, link.arrival(1, 0.0, True), False) for _ in range(5000)]
            assert statistics.mean(round_trips) == pytest.approx(profile.rtt, rel=0.03)
            assert statistics.stdev(round_trips) == pytest.approx(profile.jitter, rel=0.05)


def test_chance_is_seeded() -> None:
    profile = PROFILES["congested"]
    links = [EmulatedLink(1, profile, seed) for seed in (1, 1, 2)]
    round_trips = [[link.arrival(3, 0.0, False) for _ in range(20)] for link in links]
    assert round_trips[0] == round_trips[1] != round_trips[2]
    assert min(round_trips[0]) > 0 and len(set(round_trips[0])) == 20


async def luck(link: EmulatedLink, phase: float) -> list[float]:
    """Arrivals in both directions, first up, then down."""
    async with link.weather(phase):
        return [link.arrival(3, 0.0, up) for up in (True, False) for _ in range(20)]


def test_the_same_weather_brings_the_same_luck_whatever_was_before() -> None:
    async def test() -> None:
        link, same, other = (EmulatedLink(1, PROFILES["congested"], seed) for seed in (1, 1, 2))
        for up in (True, False):
            link.arrival(5, 0.0, up)
        assert await luck(link, 0.25) == await luck(same, 0.25) != await luck(other, 0.25)
        assert await luck(link, 0.75) != await luck(link, 0.25) == await luck(same, 0.25)

    asyncio.run(test())


def test_what_is_sent_changes_nobodys_luck_in_the_other_direction() -> None:
    """So that two modes which stream alike lose the same packets, though one of them asked for more."""

    async def test() -> None:
        link, busy = EmulatedLink(1, PROFILES["satellite"]), list[float]()
        async with link.weather(0.25):
            for _ in range(20):
                link.arrival(1, 0.0, True)
                busy.append(link.arrival(3, 0.0, False))
        quiet = await luck(link, 0.25)
        assert busy == quiet[20:] and quiet[:20] != quiet[20:]

    asyncio.run(test())


def test_silence_swallows_and_holding_only_delays() -> None:
    async def run() -> None:
        async with echo_behind() as link:
            ends = await dial(link)
            link.silent = True
            ends[1].write(b"lost")
            assert await nothing_comes(ends)
            later = await dial(link)
            later[1].write(b"heard")
            assert await nothing_comes(later)
            link.silent = False
            ends[1].write(b"behind what was lost")
            assert await nothing_comes(ends)
            ends = later
            assert await asyncio.wait_for(ends[0].readexactly(5), HANG) == b"heard"
            link.held = True
            ends[1].write(b"late")
            assert await nothing_comes(ends)
            link.held = False
            assert await asyncio.wait_for(ends[0].readexactly(4), HANG) == b"late"

    asyncio.run(run())


def test_a_cut_resets_what_is_open_and_nothing_else() -> None:
    async def run() -> None:
        async with echo_behind() as link:
            ends = await dial(link)
            await round_trip(ends, b"x")
            link.cut()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await round_trip(ends, b"y")
            assert await round_trip(await dial(link), b"z") == b"z"

    asyncio.run(run())


def test_outages_come_round_and_a_half_open_one_lasts_for_old_connections() -> None:
    async def run(half_open: bool) -> tuple[bool, bool]:
        profile = replace(Profile("flap", outage=0.2, period=0.6), half_open=half_open)
        async with echo_behind(profile) as link, link.weather():
            ends = await dial(link)
            await round_trip(ends, b"x")
            while not link.held:
                await asyncio.sleep(0.01)
            ends[1].write(b"in the dark")
            while link.held:
                await asyncio.sleep(0.01)
            new = await round_trip(await dial(link), b"new") == b"new"
            return not await nothing_comes(ends), new

    assert asyncio.run(run(False)) == (True, True)
    assert asyncio.run(run(True)) == (False, True)


def test_outages_come_when_they_are_asked_for_and_end_with_the_weather() -> None:
    async def run() -> None:
        async with echo_behind(Profile("cut", outage=60, period=600)) as link:
            ends = await dial(link)
            await round_trip(ends, b"no weather yet")
            for _ in range(2):
                async with link.weather(phase=0.0):
                    while not link.held:
                        await asyncio.sleep(0.01)
                    ends[1].write(b"in the dark")
                    assert await nothing_comes(ends)
                assert await asyncio.wait_for(ends[0].readexactly(11), HANG) == b"in the dark"

    asyncio.run(run())


def test_no_server_behind_the_link_is_a_reset() -> None:
    async def run() -> None:
        async with EmulatedLink(1) as link:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await round_trip(await dial(link), b"x")

    asyncio.run(run())
