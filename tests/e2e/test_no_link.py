"""Every way in which a verifier is unreachable: the user's message, and that the answer is finished."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from rich.text import Text

from benchmarks.links import EmulatedLink
from edge_runtime.events import Event, Finished, LinkState
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from outrider.cli.doctor import examine
from outrider.cli.terminal import Screen
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, make_verifier, oracle
from tests.edge_runtime.test_login_pages import answering
from tests.tiers import first
from tests.waiting import HANG

PROMPT = [20, 21, 22]
Folders = tuple[Path, Path, Path]
PAGE = {"Content-Type": "text/html", "Content-Length": "13"}
NOW = datetime.now(UTC)
PLAIN = {"Content-Type": "text/plain"}


@contextmanager
def tls_server(authority: trustme.CA, **certificate: Any) -> Iterator[str]:
    """host:port of something that speaks TLS and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1", **certificate).configure_cert(context)
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)

    server = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def http(status: int, headers: dict[str, str], body: bytes) -> Iterator[str]:
    with answering(status, headers | {"Content-Length": str(len(body))}, body) as (address, _):
        yield address


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def expired(authority: trustme.CA) -> AbstractContextManager[str]:
    return tls_server(authority, not_before=NOW - timedelta(days=9), not_after=NOW - timedelta(days=1))


#: name -> (what stands at the address, scheme, what the user is told, what the doctor is to say)
FAULTS: dict[str, tuple[Callable[[trustme.CA], AbstractContextManager[str]], str, str, str]] = {
    "login page": (lambda ca: http(200, PAGE, b"<html></html>"), "ws", "a web page came in place", "sign in"),
    "no such name": (lambda ca: nullcontext("nowhere.invalid:80"), "ws", "not known", "check the name"),
    "refused port": (lambda ca: nullcontext("127.0.0.1:1"), "ws", "Connection refused", "check host and port"),
    "expired certificate": (expired, "wss", "certificate has expired", "clock"),
    "unknown authority": (lambda ca: tls_server(trustme.CA()), "wss", "certificate is not trusted", "--ca-file"),
    "wrong path": (lambda ca: http(404, PLAIN, b"nothing here"), "ws", "nothing here", "path and the port"),
    "wrong token": (lambda ca: http(401, PLAIN, b"this token is unknown"), "ws", "this token is unknown", "--token"),
    "TLS asked in plain text": (lambda ca: tls_server(ca), "ws", "", "wss://"),
    "plain text asked in TLS": (lambda ca: http(200, PLAIN, b"hello"), "wss", "", "ws://"),
}


def told(events: list[Event]) -> str:
    return "\n".join(event.detail for event in events if isinstance(event, LinkState) and event.state == "alone")


@pytest.mark.parametrize("fault", first(5, FAULTS))
def test_the_answer_is_finished_alone_and_says_why(
    fault: str, bundle: Bundle, folders: Folders, authority: trustme.CA, tmp_path: Path
) -> None:
    make, scheme, reason, advice = FAULTS[fault]
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    options: dict[str, Any] = {"ca_file": tmp_path / "ca.pem"} if scheme == "wss" else {}

    async def run(address: str) -> tuple[list[Event], str]:
        patience = Patience(connect=0.3, offline=1.0)
        policy = Policy(offline_rate=100.0)
        async with EdgeRuntime(
            bundle, address, RuntimeOptions(policy=policy, patience=patience, threads=1, **options)
        ) as runtime:
            screen, events = Screen(runtime, False), list[Event]()
            badge = Text()
            async for event in runtime.generate(PROMPT, max_new_tokens=8):
                screen.show(event)
                badge = screen.status()
                events.append(event)
            assert runtime.link_error
            return events, badge.plain

    with make(authority) as address:
        events, badge = asyncio.run(run(f"{scheme}://{address}"))
        findings = asyncio.run(examine(folders[2], f"{scheme}://{address}", threads=1, **options))
    last = events[-1]
    assert isinstance(last, Finished) and last.reason == "length" and len(last.token_ids) == 8 and last.provisional
    assert last.detail and reason in last.detail and reason in told(events) and "Errno" not in last.detail
    assert badge.startswith("◑ on its own (") and (not reason or reason in badge)
    bad = [finding for finding in findings if finding.level == "bad"]
    assert len(bad) == 1 and advice in bad[0].advice, bad


def test_once_the_way_is_free_the_answer_is_the_targets(folders: Folders, bundle: Bundle) -> None:
    """A login page stands at the address, then one that wants another token, then the verifier."""

    async def run(page: str, stranger: str, verifier: str) -> list[Event]:
        ports = {"web page": stranger, "who are you": verifier}
        patience = Patience(open=0.6, connect=0.2, silence=1.0, offline=60.0)
        events = list[Event]()
        async with (
            EmulatedLink(port_of(page)) as link,
            EdgeRuntime(bundle, link.address, RuntimeOptions(patience=patience, threads=1)) as runtime,
        ):
            async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
                events.append(event)
                for reason, after in ports.items():
                    if isinstance(event, LinkState) and reason in event.detail:
                        link.upstream_port = port_of(after)
        return events

    with (
        serve(make_verifier(folders)) as address,
        http(200, PAGE, b"<html></html>") as page,
        http(401, PLAIN, b"who are you") as stranger,
    ):
        events = asyncio.run(run(page, stranger, address))
    last = events[-1]
    assert isinstance(last, Finished) and last.token_ids == oracle(folders, PROMPT, Sampling())
    assert last.reason in ("stop", "length") and last.detail == ""
    shown = [event.detail for event in events if isinstance(event, LinkState)]
    assert any("web page" in detail for detail in shown) and any("who are you" in detail for detail in shown)


def test_a_link_that_was_idle_is_there_for_the_next_answer(folders: Folders, bundle: Bundle) -> None:
    async def run(address: str) -> None:
        async with EdgeRuntime(bundle, address, RuntimeOptions(threads=1, idle=0.05)) as runtime:
            for _ in range(2):
                events = [event async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW)]
                assert isinstance(events[-1], Finished)
                assert events[-1].token_ids == oracle(folders, PROMPT, Sampling())
                async with asyncio.timeout(HANG):
                    while runtime.link and runtime.link.welcome:
                        await asyncio.sleep(0.01)
                assert runtime.link_error == ""
            runtime.network_changed()  # which is no reason to dial
            await asyncio.sleep(0.3)
            assert runtime.link and runtime.link.welcome is None
            waiting = asyncio.create_task(runtime.wait_for_link())
            async with asyncio.timeout(HANG):
                while not runtime.link.welcome:
                    await asyncio.sleep(0.001)
            await waiting

    with serve(make_verifier(folders)) as address:
        asyncio.run(run(address))


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])
