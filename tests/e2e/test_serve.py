"""The device's own OpenAI-style endpoint: the target's text, what is unverified beside it, and who may not ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.links import EmulatedLink
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from export.bundle.verifier_process import free_port
from outrider.cli.serve import MOST_SOCKETS, Endpoint
from outrider.cli.serve import run as run_endpoint
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from outrider_core.serving import bind
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, PATIENCE, make_verifier, oracle
from tests.tiers import first
from tests.waiting import HANG, until

Folders = tuple[Path, Path, Path]
QUESTION = "w5 w9 w11"
MESSAGES = [{"role": "user", "content": QUESTION}]


def request(bundle: Bundle, **more: Any) -> dict[str, Any]:
    return {"model": bundle.manifest.target, "messages": MESSAGES, "max_tokens": MAX_NEW, "temperature": 0, **more}


@asynccontextmanager
async def client_of(
    bundle: Bundle, server: str | None, patience: Patience = PATIENCE, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with EdgeRuntime(
        bundle, server, RuntimeOptions(patience=patience, threads=1), pinned=Pinned(mode="tree")
    ) as runtime:
        transport = httpx.ASGITransport(Endpoint(runtime, **options).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8766/v1", timeout=HANG) as client:
            yield client


def truth(folders: Folders, bundle: Bundle, sampling: Sampling = Sampling()) -> tuple[str, list[int]]:  # noqa: B008
    ids = oracle(folders, bundle.render_chat(MESSAGES), sampling)
    return bundle.tokenizer.decode(ids, skip_special_tokens=True), ids


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def content(parts: list[dict[str, Any]]) -> str:
    return "".join(part["choices"][0]["delta"].get("content", "") for part in parts if part["choices"])


def asked(folders: Folders, bundle: Bundle, work: Callable[[httpx.AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    async def run(address: str) -> Any:
        async with client_of(bundle, address, **options) as client:
            return await work(client)

    with serve(make_verifier(folders)) as address:
        return asyncio.run(run(address))


def test_the_answer_is_the_targets_whole_and_streamed(folders: Folders, bundle: Bundle) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for more, sampling in (({}, Sampling()), ({"temperature": 0.8, "seed": 5}, Sampling(0.8, seed=5))):
            text, ids = truth(folders, bundle, sampling)
            body = (await client.post("/chat/completions", json=request(bundle, **more))).json()
            assert body["choices"][0]["message"]["content"] == text
            assert body["usage"]["completion_tokens"] == len(ids)
            tokens_by = {"target": len(ids)}
            assert body["outrider"] == {"state": "verified", "unverified": False, "tokens_by": tokens_by}
            streamed = request(bundle, stream=True, stream_options={"include_usage": True}, **more)
            parts = chunks(await client.post("/chat/completions", json=streamed))
            assert content(parts) == text
            for usage in (parts[-1]["usage"], body["usage"]):
                assert usage.pop("outrider").keys() == {"drafted_tokens", "accepted_tokens"}  # which time decides
            assert parts[-1]["usage"] == body["usage"] and parts[-1]["choices"] == []
            assert parts[-2]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"]

    asked(folders, bundle, work)


def test_the_oldest_messages_are_dropped_where_the_context_is_full(folders: Folders, bundle: Bundle) -> None:
    long = [{"role": ("user", "assistant")[i % 2], "content": "w9 " * 60} for i in range(8)]

    async def work(client: httpx.AsyncClient) -> None:
        asked = request(bundle, messages=[*long, *MESSAGES])
        body = (await client.post("/chat/completions", json=asked)).json()
        dropped = body["outrider"]["dropped_messages"]
        assert dropped in (6, 8) and body["usage"]["prompt_tokens"] < bundle.manifest.max_context - MAX_NEW
        parts = chunks(await client.post("/chat/completions", json={**asked, "stream": True}))
        assert parts[-1]["outrider"]["dropped_messages"] in (6, 8)
        for turns in range(1, 9):  # as a chat grows, an answer has the room that it asks for, each time
            grown = request(bundle, messages=[*long[-2 * turns :], *MESSAGES], max_tokens=100)
            tokens = (await client.post("/chat/completions", json=grown)).json()["usage"]["prompt_tokens"]
            assert tokens <= bundle.manifest.max_context - min(100, bundle.manifest.max_context // 2)
        too_long = request(bundle, messages=[{"role": "user", "content": "w9 " * 300}])
        refused = await client.post("/chat/completions", json=too_long)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"

    asked(folders, bundle, work)


def test_in_an_outage_unverified_text_travels_beside_the_content(folders: Folders, bundle: Bundle) -> None:
    text, _ = truth(folders, bundle)

    async def run(address: str) -> list[dict[str, Any]]:
        async with EmulatedLink(int(address.rsplit(":", 1)[1])) as link, client_of(bundle, link.address) as client:
            link.silent = True

            async def heal() -> None:
                await asyncio.sleep(1.5)
                link.silent = False
                link.cut()

            healing = asyncio.create_task(heal())
            answer = await client.post("/chat/completions", json=request(bundle, stream=True))
            await healing
            return chunks(answer)

    with serve(make_verifier(folders)) as address:
        parts = asyncio.run(run(address))
    assert content(parts) == text
    marks = [part["outrider"] for part in parts if "outrider" in part]
    alone = [mark for mark in marks if mark.get("state") == "alone" and mark["provisional"]]
    assert alone and {mark["writer"] for mark in alone} == {"drafter"}
    assert marks[-1]["unverified"] is False and set(marks[-1]["tokens_by"]) == {"target"}


@pytest.mark.parametrize("unverified", ["end", "never"])
def test_an_answer_that_ends_without_the_verifier_says_so(bundle: Bundle, unverified: Any) -> None:
    async def run() -> tuple[httpx.Response, list[dict[str, Any]]]:
        async with client_of(bundle, None, unverified=unverified) as client:
            whole = await client.post("/chat/completions", json=request(bundle))
            return whole, chunks(await client.post("/chat/completions", json=request(bundle, stream=True)))

    whole, parts = asyncio.run(run())
    if unverified == "never":  # nothing of it may be content, so it is not an answer
        assert whole.status_code == 503 and whole.json() == parts[-1]
        assert whole.json()["error"]["code"] == "verifier_unreachable" and not content(parts[:-1])
        return
    body = whole.json()
    text = body["choices"][0]["message"]["content"]
    assert content(parts) == text and text
    assert body["outrider"]["unverified"] and parts[-1]["outrider"]["unverified"]
    assert body["usage"]["completion_tokens"] > 0
    assert body["choices"][0]["finish_reason"] == parts[-1]["choices"][0]["finish_reason"]


def test_requests_take_turns_and_too_many_are_refused(
    folders: Folders, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.serve.MOST_WAITING", 3)
    text, _ = truth(folders, bundle)

    async def work(client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.post("/chat/completions", json=request(bundle)) for _ in range(5)))
        good = [answer for answer in answers if answer.status_code == 200]
        assert len(good) == 3 and all(a.json()["choices"][0]["message"]["content"] == text for a in good)
        assert all(a.headers["retry-after"] for a in answers if a.status_code == 429)

    asked(folders, bundle, work)


def test_health_says_whether_there_is_a_link(folders: Folders, bundle: Bundle) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await client.post("/chat/completions", json=request(bundle))
        assert (await client.get("http://127.0.0.1:8766/healthz")).json() == {"status": "ok", "link": True}

    asked(folders, bundle, work)


def test_pages_strange_names_and_strangers_may_not_ask(folders: Folders, bundle: Bundle) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        page = {"origin": "https://evil.example"}
        assert (await client.get("/models", headers=page)).status_code == 403
        assert (await client.get("/models", headers={"host": "evil.example:8766"})).status_code == 403
        assert (await client.get("/models", headers={"origin": "http://app.example"})).status_code == 200

    async def with_key(client: httpx.AsyncClient) -> None:
        assert (await client.get("/models")).status_code == 401
        assert (await client.get("/models", headers={"authorization": "Bearer no"})).status_code == 401
        assert (await client.get("/models", headers={"authorization": "Bearer ja, süß".encode()})).status_code == 200

    asked(folders, bundle, work, origins=["http://app.example"])
    asked(folders, bundle, with_key, key="ja, süß")


def test_a_page_that_is_allowed_gets_what_its_browser_asks_for(folders: Folders, bundle: Bundle) -> None:
    page, evil = {"origin": "http://app.example"}, {"origin": "https://evil.example"}
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}

    async def work(client: httpx.AsyncClient) -> None:
        asked = await client.options("/chat/completions", headers={**page, **wanted})  # a browser sends no key with it
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == page["origin"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert {"authorization", "content-type"} <= set(asked.headers["access-control-allow-headers"].split(","))
        key = {"authorization": "Bearer yes"}
        for stream in (False, True):
            answer = await client.post(
                "/chat/completions", json=request(bundle, stream=stream), headers={**page, **key}
            )
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page["origin"]
            assert answer.headers["vary"] == "Origin"
        refused = await client.post("/chat/completions", json=request(bundle), headers=page)  # its text can be read
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == page["origin"]
        for status, stranger in ((400, await client.options("/models", headers={**evil, **wanted})),
                                 (403, await client.get("/models", headers={**evil, **key}))):  # fmt: skip
            assert stranger.status_code == status and "access-control-allow-origin" not in stranger.headers
        assert "access-control-allow-origin" not in (await client.get("/models", headers=key)).headers

    asked(folders, bundle, work, origins=[page["origin"]], key="yes")


@asynccontextmanager
async def listening(bundle: Bundle, server: str | None, model: str = "", **options: Any) -> AsyncIterator[int]:
    """The port of a real endpoint; `serve`'s own uvicorn. model: another name for it than the bundle's."""
    runtime = EdgeRuntime(bundle, server, RuntimeOptions(patience=PATIENCE, threads=1), pinned=Pinned(mode="tree"))
    bound = bind("127.0.0.1", 0)
    port = bound[0].getsockname()[1]
    endpoint = Endpoint(runtime, **options)
    endpoint.model = model or endpoint.model
    running = asyncio.create_task(run_endpoint(endpoint, bound, ""))
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except OSError:
            assert not running.done()
            await asyncio.sleep(0.05)
    try:
        yield port
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_idle_sockets_of_strangers_do_not_lock_the_owner_out(bundle: Bundle) -> None:
    """More of them than there is room for, some with half a request; the owner's is newer, and is served."""

    async def run() -> None:
        async with listening(bundle, None, key="yes") as port:
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST_SOCKETS)]
            for _, writer in strangers[::2]:
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
            url, key = f"http://127.0.0.1:{port}/v1/models", {"authorization": "Bearer yes"}
            async with httpx.AsyncClient() as client:
                for _ in range(5):
                    assert (await client.get(url, headers=key)).status_code == 200
            ended = [reader for reader, _ in strangers[:MOST_SOCKETS]]
            for reader in ended:
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), HANG) == b""
            for _, writer in strangers:
                writer.close()

    asyncio.run(run())


def test_a_burst_of_sockets_leaves_no_more_than_may_be_open(bundle: Bundle) -> None:
    """Those of one turn of the loop: what is cut is not gone before the next one comes."""

    async def run() -> None:
        async with listening(bundle, None) as port:
            strangers = []
            for _ in range(5 * MOST_SOCKETS):
                stranger = socket.socket()
                stranger.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    stranger.connect(("127.0.0.1", port))
                strangers.append(stranger)
            url = f"http://127.0.0.1:{port}/v1/models"
            async with httpx.AsyncClient() as client:  # behind all of them
                assert (await client.get(url)).status_code == 200
            await asyncio.sleep(0.5)
            held = 0
            for stranger in strangers:
                try:
                    held += stranger.recv(1) != b""
                except BlockingIOError:
                    held += 1
                except OSError:
                    pass  # cut
                stranger.close()
            assert held <= MOST_SOCKETS

    asyncio.run(run())


@pytest.mark.parametrize("first", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
@pytest.mark.parametrize("then", [b"", b"GET /v1/mod", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: 1"])
def test_a_socket_that_asks_nothing_or_half_is_cut(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, first: bytes, then: bytes
) -> None:
    monkeypatch.setattr("outrider.cli.serve.HEAD_SECONDS", 0.4)
    monkeypatch.setattr("outrider_core.http_protocol.KEEP_ALIVE", 0.4)

    async def run() -> None:
        async with listening(bundle, None) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first + then)
            with contextlib.suppress(ConnectionResetError):
                said = await asyncio.wait_for(reader.read(), HANG)
                assert said.count(b"HTTP/1.1 200") == bool(first)
            writer.close()

    asyncio.run(run())


def test_a_refused_body_is_not_waited_for(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's, and dripped indefinitely."""
    monkeypatch.setattr("outrider_core.http_protocol.LAST_READ", 0.5)

    async def run() -> None:
        async with listening(bundle, None, key="yes") as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            said = await asyncio.wait_for(reader.read(), HANG)
            assert said.startswith(b"HTTP/1.1 401")
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("patient", first(1, [True, False]))
def test_who_reads_nothing_keeps_nobody_waiting(
    folders: Folders, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """The next answer's turn comes when the first is written, not when it is read; and its client is let go."""
    monkeypatch.setattr("outrider.cli.serve.READ_SECONDS", 1000.0 if patient else 0.3)
    text, _ = truth(folders, bundle)
    name = "tiny" * 100_000  # stands in every event, so that they soon fill all buffers on the way
    body = json.dumps(request(bundle, model=name, stream=True)).encode()

    async def run(address: str) -> None:
        async with listening(bundle, address, model=name) as port:
            first = socket.socket()
            first.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            first.connect(("127.0.0.1", port))
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            )
            await asyncio.to_thread(first.sendall, head + body)
            assert await asyncio.to_thread(first.recv, 12, socket.MSG_PEEK) == b"HTTP/1.1 200"
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with httpx.AsyncClient(timeout=HANG) as client:
                answer = await client.post(url, json=request(bundle, model=name))
            assert answer.json()["choices"][0]["message"]["content"] == text
            await asyncio.sleep(1.0)
            said = bytearray()
            with contextlib.suppress(ConnectionResetError), contextlib.closing(first):
                while b"[DONE]" not in said[-100:] and (chunk := await asyncio.to_thread(first.recv, 1 << 20)):
                    said += chunk
            assert (b"[DONE]" in said) == patient

    with serve(make_verifier(folders)) as address:
        asyncio.run(run(address))


def test_a_client_that_hangs_up_frees_the_runtime(folders: Folders, bundle: Bundle) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.post("/chat/completions", json=request(bundle))
        body = (await client.post("/chat/completions", json=request(bundle))).json()
        assert body["choices"][0]["message"]["content"] == truth(folders, bundle)[0]

    asked(folders, bundle, work)


def test_the_command_serves_and_ends_with_a_signal(folders: Folders, bundle: Bundle) -> None:
    port = free_port()
    with serve(make_verifier(folders)) as address:
        command = [
            sys.executable,
            "-m",
            "edge_runtime",
            "serve",
            "--bundle",
            str(folders[2]),
            "--server",
            address,
            "--port",
            str(port),
            "--threads",
            "1",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OUTRIDER_API_KEY": ""})
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + HANG
            while True:
                try:
                    if httpx.get(f"{url}/healthz", timeout=1).json()["link"]:
                        break
                except httpx.TransportError:
                    pass
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.1)
            answer = httpx.post(f"{url}/v1/chat/completions", json=request(bundle), timeout=HANG)
            assert answer.json()["choices"][0]["message"]["content"] == truth(folders, bundle)[0]
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=HANG)
            assert process.returncode in (0, 130) and f"http://127.0.0.1:{port}/v1".encode() in said
            assert b"Traceback" not in said
        finally:
            process.kill()


@contextlib.contextmanager
def command(bundle: Path, server: str, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`outrider serve` as a process, and its URL."""
    words = [sys.executable, "-m", "outrider", "serve", "--bundle", str(bundle), "--server", server, "--port", "0"]
    environment = {**os.environ, "OUTRIDER_API_KEY": ""}
    process = subprocess.Popen([*words, "--threads", "1", *flags], stderr=subprocess.PIPE, env=environment)
    try:
        assert process.stderr is not None
        while b"http://" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        yield process, line.decode().split()[-1]
    finally:
        process.kill()
        process.communicate()


def answering(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool(httpx.get(f"{url.removesuffix('/v1')}/healthz", timeout=HANG).json()["link"])
    return False


@pytest.mark.parametrize("number", first(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_ends_it_while_answers_wait(
    folders: Folders, bundle: Bundle, number: signal.Signals, tmp_path: Path
) -> None:
    """One answer whose verifier says nothing, others behind it, one connection that is only kept."""
    with ExitStack() as stack:
        dumb = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # takes what is sent, and says nothing
        address = f"127.0.0.1:{dumb.getsockname()[1]}"
        process, url = stack.enter_context(command(folders[2], address, "--policy", "cloud-only"))
        kept, pool = stack.enter_context(httpx.Client()), stack.enter_context(ThreadPoolExecutor(3))
        while True:
            with contextlib.suppress(httpx.TransportError):
                kept.get(f"{url}/models", timeout=HANG)
                break
        ask = partial(httpx.post, f"{url}/chat/completions", json=request(bundle), timeout=HANG)
        asked = [pool.submit(ask) for _ in range(3)]
        time.sleep(1)  # they may be there by now; what follows holds in any case
        process.send_signal(number)
        answers = [each.exception() or each.result() for each in asked]
        assert process.wait(HANG) == 0
        assert all(isinstance(each, httpx.TransportError) or each.status_code == 503 for each in answers)
        assert process.stderr is not None and b"Traceback" not in process.stderr.read()


def test_a_second_signal_ends_it_at_once(folders: Folders, bundle: Bundle) -> None:
    with ExitStack() as stack:
        dumb = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{dumb.getsockname()[1]}"
        process, url = stack.enter_context(command(folders[2], address, "--policy", "cloud-only"))
        place = urlsplit(url)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((place.hostname, place.port)).close()
                break
        peer = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=HANG))
        body = json.dumps(request(bundle)).encode()
        peer.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body))
        peer.sendall(body)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        # -SIGTERM: it was about to end by the first one, and Python took no signals any more
        assert process.wait(HANG) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)


def test_the_verifier_is_told_when_it_ends(folders: Folders, bundle: Bundle) -> None:
    verifier = make_verifier(folders)
    with serve(verifier) as address, command(folders[2], address) as (process, url):
        assert until(lambda: answering(url))
        answer = httpx.post(f"{url}/chat/completions", json=request(bundle), timeout=HANG)
        assert answer.status_code == 200 and len(verifier.sessions) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) == 0
        assert until(lambda: len(verifier.sessions) == 0)


def test_a_long_conversation_is_fitted_beside_the_event_loop(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is, the endpoint answers others; who hangs up meanwhile leaves no trace."""

    async def run() -> None:
        begun, goes_on = threading.Event(), threading.Event()
        fit = EdgeRuntime.fit_messages

        def slowly(*arguments: Any, **options: Any) -> Any:
            begun.set()
            assert goes_on.wait(HANG)
            return fit(*arguments, **options)

        monkeypatch.setattr(EdgeRuntime, "fit_messages", slowly)
        async with listening(bundle, None) as port, httpx.AsyncClient(timeout=HANG) as client:
            url = f"http://127.0.0.1:{port}/v1"
            asked = [
                asyncio.create_task(client.post(f"{url}/chat/completions", json=request(bundle))) for _ in range(2)
            ]
            assert await asyncio.to_thread(begun.wait, HANG)
            assert (await client.get(f"{url}/models")).status_code == 200
            asked[1].cancel()
            goes_on.set()
            assert (await asked[0]).status_code == 200
            assert (await client.post(f"{url}/chat/completions", json=request(bundle))).status_code == 200

    asyncio.run(run())


def test_an_alias_is_served_and_listed(bundle: Bundle) -> None:
    async def run() -> None:
        async with client_of(bundle, None, aliases=["gpt-4o"]) as client:
            assert [card["id"] for card in (await client.get("/models")).json()["data"]] == [
                bundle.manifest.target,
                "gpt-4o",
            ]
            assert (await client.get("/models/gpt-4o")).json()["id"] == "gpt-4o"
            answer = await client.post("/chat/completions", json={**request(bundle), "model": "gpt-4o"})
            assert answer.status_code == 200 and answer.json()["model"] == bundle.manifest.target
            answer = await client.post("/chat/completions", json={**request(bundle), "model": "gpt-5"})
            assert answer.status_code == 404

    asyncio.run(run())


def test_an_open_address_wants_a_key(folders: Folders) -> None:
    command = [sys.executable, "-m", "edge_runtime", "serve", "--bundle", str(folders[2]), "--host", "0.0.0.0"]
    ended = subprocess.run(command, capture_output=True, timeout=HANG, env={**os.environ, "OUTRIDER_API_KEY": ""})
    assert ended.returncode == 1 and b"--api-key" in ended.stderr


@pytest.mark.parametrize("writer", ["cloud-only", "prefer-cloud"])
def test_an_answer_that_waits_in_vain_holds_up_nobody(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, writer: Any
) -> None:
    """It would wait 300 s for its verifier. Once another request is there it ends, as what it is."""
    monkeypatch.setattr("outrider.cli.serve.STALLED_SECONDS", 0.2)
    policy = Policy(writer=writer, offline="pause", min_confidence=1.0)  # the drafter pauses after a few tokens

    async def run() -> tuple[httpx.Response, httpx.Response]:
        server = f"127.0.0.1:{free_port()}"  # where nobody is
        options = RuntimeOptions(policy=policy, patience=Patience(connect=0.1), threads=1)
        async with EdgeRuntime(bundle, server, options) as runtime:
            transport = httpx.ASGITransport(Endpoint(runtime).app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1", timeout=HANG) as client:
                unending = {"logit_bias": {str(token): -100 for token in bundle.manifest.eos_ids}, "max_tokens": 40}
                asked = [request(bundle, **unending), request(bundle, stream=True, **unending)]
                first = asyncio.create_task(client.post("/chat/completions", json=asked[0]))
                while runtime.record() is None:
                    await asyncio.sleep(0.01)
                second = asyncio.create_task(client.post("/chat/completions", json=asked[1]))
                await asyncio.wait([first], timeout=HANG)
                while runtime.record() is None:
                    await asyncio.sleep(0.01)
                third = asyncio.create_task(client.post("/chat/completions", json=asked[0]))
                await asyncio.wait([second], timeout=HANG)
                third.cancel()
                await asyncio.gather(third, return_exceptions=True)
                return first.result(), second.result()

    whole, streamed = asyncio.run(run())
    assert whole.status_code == 503 and whole.headers["retry-after"]
    error = whole.json()["error"]
    assert error["code"] == "verifier_unreachable" and "refused" in error["message"].lower()
    if streamed.status_code == 200:
        parts = chunks(streamed)
        assert parts[-1]["error"]["code"] == "verifier_unreachable"
        assert all(part["choices"][0]["finish_reason"] is None for part in parts[:-1])
    else:
        assert streamed.status_code == 503


def test_a_link_lost_for_good_is_no_answer_that_is_long_enough(folders: Folders, bundle: Bundle) -> None:
    """Where the target alone may write: what it has written is not told as complete."""
    policy = Policy(writer="cloud-only")

    async def run(address: str) -> httpx.Response:
        async with EmulatedLink(int(address.rsplit(":", 1)[1]), delay=0.02) as link:
            options = RuntimeOptions(policy=policy, patience=Patience(connect=5.0, offline=5.0), threads=1)
            async with EdgeRuntime(bundle, link.address, options, pinned=Pinned(mode="tree")) as runtime:
                transport = httpx.ASGITransport(Endpoint(runtime).app)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://127.0.0.1/v1", timeout=HANG
                ) as client:
                    unending = {"logit_bias": {str(token): -100 for token in bundle.manifest.eos_ids}}
                    body = request(bundle, max_tokens=150, **unending)  # 40 ms a round
                    asked = asyncio.create_task(client.post("/chat/completions", json=body))
                    while not ((record := runtime.record()) and record["committed"]):
                        assert not asked.done(), asked.result().text
                        await asyncio.sleep(0.005)
                    link.upstream_port = 1
                    link.cut()
                    return await asked

    with serve(make_verifier(folders)) as address:
        answer = asyncio.run(run(address))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "verifier_unreachable"
