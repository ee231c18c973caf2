"""Each bound of the resource model is hit while another client works on: it gets right answers all the time."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import trustme
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cloud.auth import main as make_token
from cloud.engine import fair_worker
from cloud.engine.fair_worker import FairWorker
from cloud.server.accounts import Accounts
from cloud.server.limits import Gate
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.telemetry.metrics import Metrics
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.http_protocol import HttpProtocol
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_BOUNDS, ERR_BUSY, ERR_TOO_LONG, Error, Open, pack_ids
from tests.cloud.drive import Client, make_verifier, serve
from tests.cloud.running import Running, running, save_folder
from tests.tiny import plain_decode, tiny_model, tiny_tokenizer
from tests.waiting import HANG, until

MODEL = tiny_model()
PROMPT = [5, 6, 7]
TRUTH = plain_decode(MODEL, PROMPT, Sampling(), 40, eos_ids=())
REQUEST_SECONDS = "cloud.server.limits.REQUEST_SECONDS"
HALF = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Half: "
WHOLE = HALF + b"y\r\n\r\n"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 3, "temperature": 0}


class House:
    """A verifier that serves; `tokens` by name of the account."""

    def __init__(self, verifier: Verifier, address: str, tokens: dict[str, str]) -> None:
        self.verifier, self.address, self.tokens = verifier, address, tokens

    def client(self, name: str) -> Client:
        return Client(self.address, token=self.tokens[name])

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=HANG, source_address=(source, 0))

    def post(self, name: str, ask: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        return httpx.post(f"http://{self.address}/v1/chat/completions", json=ask, headers=headers, timeout=HANG)

    def refused(self, reason: str) -> float:
        value = self.verifier.metrics.registry.get_sample_value("outrider:refused_total", {"reason": reason})
        return value or 0.0

    @contextmanager
    def other_client_at_work(self) -> Iterator[None]:
        """Rounds of another token, before, during and after what the test does: each must be right."""
        stop, rounds, faults = threading.Event(), list[int](), list[BaseException]()

        def work() -> None:
            try:
                while not stop.is_set() or len(rounds) < 3:
                    with self.client("other") as client:
                        client.open(PROMPT)
                        for seq, at in enumerate(range(0, 12, 3), 1):
                            verdict = client.verify(seq, 3 + at, TokenTree.chain(TRUTH[at : at + 2]))
                            assert list(verdict.accepted) == [0, 1] and verdict.bonus == TRUTH[at + 2]
                    assert httpx.get(f"http://{self.address}/healthz", timeout=HANG).status_code == 200
                    rounds.append(1)
            except BaseException as error:
                faults.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(HANG)
        assert not faults, faults
        assert len(rounds) >= 3


@contextmanager
def house(folder: Path, *limits: str, capsys: pytest.CaptureFixture[str], **settings: Any) -> Iterator[House]:
    tokens = {}
    for name in ("bad", "other"):
        make_token([str(folder / "tokens"), name, *(limits if name == "bad" else [])])
        tokens[name] = capsys.readouterr().out.strip()
    verifier = make_verifier(MODEL, (), kv_tokens=4096)
    verifier.accounts = Accounts(folder / "tokens")
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tiny_tokenizer()), "tiny"
    with serve(verifier, **settings) as address:
        yield House(verifier, address, tokens)


def ends(peer: socket.socket) -> bytes:
    """What the server says until it cuts the socket."""
    said = bytearray()
    with suppress(ConnectionError):
        while got := peer.recv(65536):
            said += got
    return bytes(said)


def drip(peer: socket.socket) -> None:
    """A byte every 50 ms until the socket is cut."""
    end = time.monotonic() + HANG
    with suppress(OSError):
        while time.monotonic() < end:
            peer.sendall(b"y")
            time.sleep(0.05)
        raise AssertionError("the socket was not cut")


@pytest.mark.parametrize("before", [b"", WHOLE, WHOLE * 3])
def test_half_a_request_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str], before: bytes) -> None:
    """Also a second one, and also when it goes on, a byte at a time."""
    with house(tmp_path, capsys=capsys, request_seconds=1.0) as at, at.other_client_at_work():
        with at.connect() as silent, at.connect() as slow:
            for peer in (silent, slow):
                peer.sendall(before + HALF)
            drip(slow)
            ends(silent)
        assert at.refused("slow_request") >= 2


def test_a_body_dripped_behind_its_refusal_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_core.http_protocol.LAST_READ", 0.5)
    with house(tmp_path, capsys=capsys) as at, at.other_client_at_work():
        for path in (b"v1/chat/completions", b"healthz", b"nowhere"):
            with at.connect() as peer:
                peer.sendall(b"POST /" + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
                assert peer.recv(12) in (b"HTTP/1.1 401", b"HTTP/1.1 404", b"HTTP/1.1 405")
                drip(peer)
        assert at.refused("slow_request") == 3


def test_a_refused_body_that_comes_in_time_keeps_the_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with house(tmp_path, capsys=capsys) as at, httpx.Client(base_url=f"http://{at.address}") as client:
        for _ in range(3):
            assert client.post("/v1/chat/completions", content=b"x" * 300_000).status_code == 401
        assert client.get("/healthz").status_code == 200


def test_a_reply_that_nobody_reads_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud.server.limits.UNREAD", 0.5)
    with house(tmp_path, capsys=capsys) as at, at.other_client_at_work():
        with at.connect() as peer, suppress(ConnectionError):
            while not at.refused("unread"):
                peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        assert at.refused("unread") == 1


def test_sockets_of_one_address_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """WebSockets count too; a closed one makes room."""
    with house(tmp_path, capsys=capsys, sockets_per_address=6) as at, at.other_client_at_work():
        peers = [at.connect("127.0.0.2") for _ in range(9)]
        assert until(lambda: at.refused("address_sockets") == 3)
        peers[0].close()
        assert until(lambda: at.verifier.metrics.registry.get_sample_value("outrider:sockets") in (5.0, 6.0, 7.0))
        with at.connect("127.0.0.2") as again:
            again.sendall(WHOLE)
            assert again.recv(15) == b"HTTP/1.1 200 OK"
        for peer in peers:
            peer.close()


def test_a_connection_that_is_only_kept_makes_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one whose client has asked nothing for longest; one that asks, or has yet to, stays."""
    with house(tmp_path, capsys=capsys, sockets_per_address=3) as at, at.other_client_at_work():
        peers = [at.connect("127.0.0.2") for _ in range(3)]
        for peer in (peers[1], peers[0]):
            peer.sendall(WHOLE)
            while b"alive" not in peer.recv(65536):
                pass
        peers[2].sendall(HALF)
        peers.append(at.connect("127.0.0.2"))
        peers[3].sendall(WHOLE)
        assert peers[3].recv(15) == b"HTTP/1.1 200 OK"
        assert ends(peers[1]) == b""  # the others are there
        for peer, more in ((peers[0], WHOLE), (peers[2], b"y\r\n\r\n")):
            peer.sendall(more)
            assert peer.recv(15) == b"HTTP/1.1 200 OK"
        assert at.refused("address_sockets") == 0
        for peer in peers:
            peer.close()


def test_connections_of_one_token_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with house(tmp_path, "--sessions", "2", capsys=capsys, max_connections=7) as at, at.other_client_at_work():
        clients = [at.client("bad") for _ in range(4)]  # twice its sessions
        with pytest.raises(InvalidStatus) as refused:
            at.client("bad")
        assert refused.value.response.status_code == 429 and at.refused("account_connections") == 1
        clients.pop().socket.close()
        assert until(lambda: all(account.connections < 4 for account in at.verifier.accounts))
        at.client("bad").socket.close()
        for client in clients:
            client.socket.close()
    assert until(lambda: not any(account.connections for account in at.verifier.accounts))


def test_a_message_that_does_not_end_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a frame, a frame that comes a byte at a time, and fragments without an end."""
    with house(tmp_path, capsys=capsys, message_seconds=1.0) as at, at.other_client_at_work():
        for index in range(3):
            client = at.client("bad")
            raw = client.socket.socket
            raw.sendall(bytes([0x02 if index == 2 else 0x82, 0xFF, *(1 << 20).to_bytes(8, "big"), 0, 0, 0, 0]) + b"x")
            if index:
                drip(raw)
            with pytest.raises(ConnectionClosed) as closed:
                client.socket.recv(timeout=HANG)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        assert at.refused("slow_message") == 3
    assert not any(account.waiting for account in at.verifier.accounts)


def test_bytes_that_wait_for_their_messages_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On all connections of a token together."""
    half = bytes([0x82, 0xFF, *(1 << 20).to_bytes(8, "big"), 0, 0, 0, 0]) + bytes(60_000)
    with house(tmp_path, "--waiting", "200000", capsys=capsys) as at, at.other_client_at_work():
        clients = [at.client("bad") for _ in range(10)]
        for client in clients:
            with suppress(ConnectionError):
                client.socket.socket.sendall(half)
        assert until(lambda: at.refused("waiting_bytes") == 7)
        assert max(account.waiting for account in at.verifier.accounts) <= 200_000
        for client in clients:
            client.socket.socket.close()
        assert until(lambda: not any(account.waiting for account in at.verifier.accounts))


def test_prompts_are_charged_before_they_are_tokenised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {**ASK, "messages": [{"role": "user", "content": "w5 " * 100_000}]}
    with house(tmp_path, "--prefill", "100", capsys=capsys) as at, at.other_client_at_work():
        first, second = at.post("bad", long), at.post("bad", long)
        assert first.status_code == 400 and first.json()["error"]["code"] == "context_length_exceeded"
        assert second.status_code == 429 and int(second.headers["retry-after"]) >= 0
        assert at.post("other", ASK).status_code == 200
        assert (at.refused("too_long"), at.refused("rate")) == (1, 1)


def test_prompts_that_wait_to_be_tokenised_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They count as sessions from the first byte of the body on."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: 9999\r\n\r\n{"
    with house(tmp_path, "--sessions", "3", capsys=capsys) as at, at.other_client_at_work():
        peers = [at.connect() for _ in range(3)]
        for peer in peers:
            peer.sendall(head % at.tokens["bad"].encode())
        assert until(lambda: sum(account.streams for account in at.verifier.accounts if account.name == "bad") == 3)
        assert at.post("bad", ASK).status_code == 429 and at.refused("sessions") == 1
        assert at.post("other", ASK).status_code == 200
        for peer in peers:
            peer.close()
        assert until(lambda: not any(account.streams for account in at.verifier.accounts if account.name == "bad"))
        assert at.post("bad", ASK).status_code == 200


def test_an_open_is_charged_before_its_tokens_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = pack_ids([1 << 30] * 100)
    with (
        house(tmp_path, "--prefill", "10", capsys=capsys) as at,
        at.other_client_at_work(),
        at.client("bad") as client,
    ):
        codes = []
        for tokens in (pack_ids([5] * 129), foreign, foreign):
            client.send(Open(0, os.urandom(16), 0, tokens, 0, Sampling()))
            codes.append(client.receive(Error).code)
        assert codes == [ERR_TOO_LONG, ERR_BOUNDS, ERR_BUSY]


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    """A home has 2^64 addresses; and IPv4 that comes through an IPv6 socket is what it is elsewhere."""
    gate = Gate(Settings(host="::", insecure=True, sockets_per_address=3), Metrics())
    home = [f"2001:db8:7:7::{each:x}" for each in range(1, 6)]
    mapped = ["::ffff:192.0.2.7", "192.0.2.7", "::ffff:192.0.2.7", "192.0.2.7"]

    def enters(address: str) -> bool:
        return gate.enter(cast(HttpProtocol, SimpleNamespace(address=address, connections=())))

    entered = [enters(address) for address in (*home, *mapped)]
    assert entered == [True, True, True, False, False, True, True, True, False]
    gate.leave(home[4])  # whichever of them goes
    assert enters(home[3])
    for address in (*home[:3], *mapped[:3]):
        gate.leave(address)
    assert not gate._sockets


class Panic(BaseException):
    """As pyo3 raises where a tokenizer's Rust panics."""


def panics() -> None:
    raise Panic


def test_accounts_take_turns_at_the_tokenizer() -> None:
    done: list[str] = []

    async def run() -> None:
        worker = FairWorker("test")
        begun = threading.Event()
        first = asyncio.create_task(worker.run("bad", begun.wait))
        calls = [worker.run("bad", lambda: done.append("bad")) for _ in range(5)]
        calls += [worker.run("other", lambda: done.append("other")) for _ in range(2)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        await asyncio.sleep(0)  # what it waits for is cancelled too
        begun.set()
        await asyncio.gather(first, *tasks, return_exceptions=True)
        with pytest.raises(ZeroDivisionError):
            await worker.run("bad", lambda: 1 // 0)
        assert await worker.run("bad", lambda: 7) == 7
        with pytest.raises(RuntimeError, match="Panic"):
            await asyncio.wait_for(worker.run("bad", panics), HANG)
        assert await worker.run("bad", lambda: 8) == 8

    asyncio.run(run())
    assert done == ["other", "bad", "other", "bad", "bad", "bad"]


def test_a_call_that_comes_while_memory_is_given_back_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back once no call waits; one that comes during that waits for no other to wake its worker."""
    giving, let = threading.Event(), threading.Event()

    def give_back() -> None:
        giving.set()
        assert let.wait(HANG)

    monkeypatch.setattr(fair_worker, "give_back", give_back)
    monkeypatch.setattr(fair_worker, "LONG_SECONDS", 0.0)

    async def run() -> None:
        worker = FairWorker("test")
        await worker.run("a", lambda: threading.Event().wait(0.001))
        assert await asyncio.to_thread(giving.wait, HANG)
        late = asyncio.create_task(worker.run("a", lambda: 7))
        await asyncio.sleep(0)  # it is queued
        let.set()
        assert await asyncio.wait_for(late, 20) == 7

    asyncio.run(run())


def test_calls_from_many_threads_all_end() -> None:
    worker, results = FairWorker("test"), list[list[int]]()

    def ask(account: int) -> None:
        results.append([worker.submit(str(account), partial(int, n)).result(HANG) for n in range(200)])

    threads = [threading.Thread(target=ask, args=(account,)) for account in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(range(200))] * 8
    worker.close()


def test_a_worker_that_closes_leaves_no_caller_waiting() -> None:
    worker, begun, let = FairWorker("test"), threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return let.wait(HANG)

    running = worker.submit("a", wait)
    assert begun.wait(HANG)
    waiting = [worker.submit(account, lambda: 7) for account in "aab"]
    worker.close()
    let.set()
    assert running.result(HANG) is True
    assert all(future.cancelled() for future in (*waiting, worker.submit("a", lambda: 7)))


def test_strangers_cannot_take_all_descriptors(tmp_path: Path) -> None:
    """A process with few descriptors, and a stranger with more sockets than that, each with half a request."""
    folder = save_folder(tmp_path)
    with running(folder, "--sockets-per-address", "20", constants={REQUEST_SECONDS: 2}) as server:
        open_now = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (open_now + 60, open_now + 60))
        host, port = server.address.split(":")
        peers = []
        for index in range(200):
            peer = socket.create_connection((host, int(port)), timeout=HANG, source_address=("127.0.0.2", 0))
            with suppress(ConnectionError):
                peer.sendall(HALF)
            peers.append(peer)
            if index % 20 == 0:
                assert httpx.get(f"http://{server.address}/healthz", timeout=HANG).status_code == 200
        with server.client() as client:
            client.open([5, 6, 7])
        text = httpx.get(f"http://{server.address}/metrics").text
        assert "process_open_fds" in text and "process_resident_memory_bytes" in text
        for peer in peers:
            peer.close()


def hello_of_tls() -> bytes:
    """What a client says first."""
    context, out = ssl.create_default_context(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    return out.read()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, ssl.SSLContext]]:
    """A verifier that takes 20 sockets of an address and gives each five seconds, and a context that trusts it."""
    folder = save_folder(tmp_path_factory.mktemp("tls"))
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(folder / "chain.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    flags = ["--ssl-certfile", str(folder / "chain.pem"), "--ssl-keyfile", str(folder / "key.pem")]
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with running(folder, *flags, "--sockets-per-address", "20", constants={REQUEST_SECONDS: 5}) as server:
        yield server, trusting


@pytest.mark.parametrize(
    "begin",
    [b"", hello_of_tls()[:1], hello_of_tls()[:100], hello_of_tls(), WHOLE],
    ids=["nothing", "a byte", "half a hello", "a hello", "no TLS"],
)
def test_sockets_that_never_finish_a_tls_handshake_are_bounded(
    tls: tuple[Running, ssl.SSLContext], begin: bytes
) -> None:
    """Counted by address before the handshake, and cut; others are served meanwhile."""
    server, trusting = tls
    host, port = server.address.split(":")

    def metric(name: str) -> float:
        lines = httpx.get(f"https://{server.address}/metrics", verify=trusting, timeout=HANG).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    refused = 'outrider:refused_total{reason="address_sockets"}'
    before, peers = metric(refused), list[socket.socket]()
    for _ in range(60):
        peers.append(socket.create_connection((host, int(port)), timeout=HANG, source_address=("127.0.0.2", 0)))
        with suppress(ConnectionError):
            peers[-1].sendall(begin)
    if begin != WHOLE:  # which is refused as it comes
        assert until(lambda: metric(refused) - before >= 20)
    for peer in peers:
        ends(peer)
        peer.close()
    assert until(lambda: metric("outrider:sockets ") <= 2)


def test_what_comes_with_the_end_of_a_handshake_is_read(tls: tuple[Running, ssl.SSLContext]) -> None:
    server, trusting = tls
    host, port = server.address.split(":")
    for _ in range(5):
        came, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting.wrap_bio(came, out, server_hostname=host)
        with socket.create_connection((host, int(port)), timeout=HANG) as raw:
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    raw.sendall(out.read())
                    assert came.write(raw.recv(65536)) > 0
            client.write(WHOLE)
            raw.sendall(out.read())  # both in one segment
            said = b""
            while b"alive" not in said:
                assert came.write(raw.recv(65536)) > 0
                with suppress(ssl.SSLWantReadError):
                    while True:
                        said += client.read(65536)
            assert said.startswith(b"HTTP/1.1 200 OK")
