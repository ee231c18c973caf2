"""A device behind a proxy: the environment names it, the verifier is reached through it, and its refusals are shown."""

from __future__ import annotations

import asyncio
import contextlib
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edge_runtime.events import Finished
from edge_runtime.link.address import in_clear_text, proxy_of
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.ending import COMPLETE
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, PATIENCE, make_verifier, oracle

PROMPT = [20, 21, 22]
Folders = tuple[Path, Path, Path]
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "WS_PROXY", "WSS_PROXY")


@asynccontextmanager
async def proxy(
    upstream: int, status: bytes = b"200 OK", credentials: str | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """(port of a proxy that takes every CONNECT to `upstream`, the request lines that came).

    credentials: "user:password" that it asks for.
    """
    asked: list[bytes] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        asked.append(first)
        basic = b"Proxy-Authorization: Basic " + b64encode((credentials or "").encode())
        answer = b"407 Proxy Authentication Required" if credentials and basic not in head else status
        writer.write(b"HTTP/1.1 " + answer + b"\r\n\r\n")
        if answer.startswith(b"200"):
            there, back = await asyncio.open_connection("127.0.0.1", upstream)
            await asyncio.gather(pipe(reader, back), pipe(there, writer))
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        server.close()


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


async def ask(bundle: Bundle, address: str, patience: Patience) -> Finished:
    policy = Policy(offline_rate=100.0)
    async with EdgeRuntime(bundle, address, RuntimeOptions(patience=patience, policy=policy, threads=1)) as runtime:
        *_, last = [event async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW)]
    assert isinstance(last, Finished)
    return last


@pytest.mark.parametrize("user", ["", "user:pass word@"])
def test_a_verifier_behind_a_proxy_answers(
    folders: Folders, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """Its name is known to the proxy alone."""

    async def run(port: int) -> Finished:
        async with proxy(port, credentials=user.rstrip("@") or None) as (through, asked):
            address = f"http://{user.replace(' ', '%20')}127.0.0.1:{through}"
            monkeypatch.setenv("HTTP_PROXY", address)
            assert proxy_of("verifier.invalid:8765") == address
            last = await ask(bundle, "verifier.invalid:8765", PATIENCE)
            assert set(asked) == {b"CONNECT verifier.invalid:8765 HTTP/1.1"}
            return last

    with serve(make_verifier(folders)) as address:
        last = asyncio.run(run(int(address.rsplit(":", 1)[1])))
    assert last.token_ids == oracle(folders, PROMPT, Sampling())


def test_this_machine_and_excepted_hosts_are_asked_directly(
    folders: Folders, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "verifier.invalid")
    assert proxy_of("127.0.0.1:1") is proxy_of("verifier.invalid:8765") is None and proxy_of("other.invalid")
    with serve(make_verifier(folders)) as address:
        assert asyncio.run(ask(bundle, address, PATIENCE)).token_ids == oracle(folders, PROMPT, Sampling())


@pytest.mark.parametrize(
    ("named", "status", "reason"),
    [
        ("http://127.0.0.1:{port}", b"407 Proxy Authentication Required", "407"),
        ("socks5://127.0.0.1:{port}", b"", "socks"),
        ("ftp://127.0.0.1:{port}", b"", "ftp"),
    ],
)
def test_a_proxy_that_does_not_do_is_the_reason(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, named: str, status: bytes, reason: str
) -> None:
    async def run() -> Finished:
        async with proxy(1, status) as (port, _):
            monkeypatch.setenv("HTTP_PROXY", named.format(port=port))
            return await ask(bundle, "verifier.invalid:8765", Patience(connect=0.3, offline=0.5))

    last = asyncio.run(run())
    assert last.reason in COMPLETE and last.provisional and reason in last.detail.lower()


def test_what_can_be_read_on_its_way() -> None:
    assert [in_clear_text(server) for server in ("127.0.0.1:1", "[::1]:1", "ws://localhost", "wss://there")] == [
        False
    ] * 4
    assert all(in_clear_text(server) for server in ("there:1", "ws://192.0.2.1", "http://there"))
