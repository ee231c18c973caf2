"""Run by test_packets.py, in a network of its own: `pytest tests/benchmarks/packets_inside.py`."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.links import PROFILES, Profile
from benchmarks.packets import TOKEN, FarVerifier, Laboratory, PacketLink
from edge_runtime.events import Finished, Verified
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from outrider_core.drafting.bundle import open_bundle
from tests.waiting import HANG

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
DEFAULT = Path("build/bundle")


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    with Laboratory() as laboratory:
        yield laboratory


@asynccontextmanager
async def echo_behind(laboratory: Laboratory, profile: Profile | None = None) -> AsyncIterator[PacketLink]:
    """A link to a server that sends back what it gets, over TLS."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    certificate = laboratory.flags[laboratory.flags.index("--ssl-certfile") + 1]
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    listener = laboratory.there(lambda: socket.create_server(("0.0.0.0", 0)))
    server = await asyncio.start_server(serve, sock=listener, ssl=tls)
    async with PacketLink(laboratory, listener.getsockname()[1], profile) as link:
        yield link
    server.close()


async def dial(link: PacketLink) -> Ends:
    connecting = asyncio.open_connection(link.host, link.upstream_port, ssl=link.laboratory.trust)
    return await asyncio.wait_for(connecting, HANG)


async def round_trip(ends: Ends, data: bytes) -> bytes:
    ends[1].write(data)
    return await asyncio.wait_for(ends[0].readexactly(len(data)), HANG)


def run(
    laboratory: Laboratory, test: Callable[[PacketLink, Ends], Awaitable[None]], profile: Profile | None = None
) -> None:
    async def main() -> None:
        async with echo_behind(laboratory, profile) as link:
            await test(link, await dial(link))

    asyncio.run(main())


@pytest.mark.parametrize(
    "profile",
    [replace(PROFILES["wifi"], loss=5), replace(PROFILES["5g"], down=4, up=2), replace(PROFILES["4g"], jitter=50)],
    ids=lambda profile: str(profile.name),
)
def test_bytes_come_out_whole_and_in_order_whatever_the_link(laboratory: Laboratory, profile: Profile) -> None:
    async def test(link: PacketLink, ends: Ends) -> None:
        data = random.Random(0).randbytes(200_000)
        assert await round_trip(ends, data) == data
        assert min(link.up, link.down) > len(data)

    run(laboratory, test, profile)


def test_handshakes_take_their_round_trips(laboratory: Laboratory) -> None:
    """TCP's and TLS 1.3's: two, and none of them is shorter than the link."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with echo_behind(laboratory, Profile("far", rtt=300)) as link:
            began = loop.time()
            await dial(link)
            assert loop.time() - began >= 0.6

    asyncio.run(test())


def test_a_cut_resets_both_ends_and_who_dials_again_gets_through(laboratory: Laboratory) -> None:
    async def test(link: PacketLink, ends: Ends) -> None:
        assert await round_trip(ends, b"before") == b"before"
        link.cut()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(ends[0].read(1), HANG)
        assert link.cuts == 1
        assert await round_trip(await dial(link), b"after") == b"after"

    run(laboratory, test)


def test_what_stands_between_has_forgotten_a_connection_that_is_cut_with_bytes_under_way(
    laboratory: Laboratory,
) -> None:
    """The reset comes too early to be believed; the next packet is answered by another one."""

    async def test(link: PacketLink, ends: Ends) -> None:
        ends[1].write(b"x" * 100_000)
        await asyncio.sleep(0.05)
        link.cut()
        with pytest.raises(ConnectionResetError):
            while await asyncio.wait_for(ends[0].read(1 << 16), HANG):
                pass

    run(laboratory, test, Profile("slow", rtt=100, down=2, up=2))


def test_silence_loses_packets_and_tcp_sends_them_again(laboratory: Laboratory) -> None:
    async def test(link: PacketLink, ends: Ends) -> None:
        link.silent = True
        ends[1].write(b"lost")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ends[0].read(1), 0.5)
        link.silent = False
        assert await asyncio.wait_for(ends[0].readexactly(4), HANG) == b"lost"

    run(laboratory, test)


def test_a_connection_that_was_open_in_a_half_open_outage_never_speaks_again(laboratory: Laboratory) -> None:
    async def test(link: PacketLink, ends: Ends) -> None:
        assert await round_trip(ends, b"before") == b"before"
        link.strand()
        ends[1].write(b"stranded")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ends[0].read(1), 1.0)
        assert await round_trip(await dial(link), b"another") == b"another"

    run(laboratory, test)


@pytest.mark.slow
@pytest.mark.skipif(not (DEFAULT / "manifest.json").is_file(), reason="no build/bundle; run: make test")
def test_an_answer_over_a_satellite_with_tls_is_the_targets(laboratory: Laboratory, tmp_path: Path) -> None:
    """Two links to one verifier: what comes over the satellite is what comes over a perfect one."""
    bundle, question = open_bundle(DEFAULT), [{"role": "user", "content": "Name three rivers."}]
    verifier = FarVerifier(
        laboratory, Path("drafters/smollm2-135m-instruct-moa"), tmp_path / "log",
        "--model", "smollm2-135m-instruct", module="cloud.verifier",
    )  # fmt: skip

    async def answer(profile: Profile | None) -> tuple[list[int], int]:
        options = RuntimeOptions(token=TOKEN, ca_file=laboratory.ca_file)
        async with (
            PacketLink(laboratory, verifier.port, profile) as link,
            EdgeRuntime(bundle, link.address, options) as runtime,
        ):
            async with asyncio.timeout(HANG):
                while not (runtime.link and runtime.link.welcome):
                    await asyncio.sleep(0.01)
            verified = 0
            async for event in runtime.generate(question, max_new_tokens=24):
                verified += len(event.tokens) if isinstance(event, Verified) else 0
            assert isinstance(event, Finished)
            return event.token_ids, verified

    verifier.start()
    try:
        laboratory.there(verifier.wait_ready)
        perfect, far = asyncio.run(answer(None)), asyncio.run(answer(PROFILES["satellite"]))
    finally:
        verifier.stop()
    assert far == perfect
    assert far[1] == len(far[0]) > 0
