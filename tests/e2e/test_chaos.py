"""A real verifier process that is killed, ended and flooded while devices work: no wrong token, no leak."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import Close as CloseFrame

from export.bundle.verifier_process import VerifierProcess
from outrider_core.models.drafter_files import load_drafter
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import (
    ERR_BUSY,
    ERR_GOING_AWAY,
    ERR_UNKNOWN,
    Close,
    Error,
    Features,
    Hello,
    Open,
    Opened,
    Resync,
    Verdict,
    Verify,
    encode,
    pack_ids,
    pack_tree,
)
from tests.cloud.drive import Client, expected_path, make_verifier, random_tree, serve
from tests.tiny import plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

VOCAB = 199
NEW = 60
SPARE = 8
MODEL = tiny_model(dtype=torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    model = tiny_model(dtype=torch.float64)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    (folder / "hash").write_text(save_tiny_target(folder / "target", model))
    save_tiny_drafter(folder / "drafter", model, (folder / "hash").read_text())
    return folder


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[VerifierProcess]:
    """A pool of four extents of 256 rows: fewer than there are devices."""
    server = VerifierProcess(
        folder / "drafter", tmp_path / "log", "--model", str(folder / "target"), "--dtype", "float64", "--threads", "1",
        "--max-model-len", "192", "--max-nodes", "64", "--kv-tokens", "1024",
        "--set", "cloud.engine.scheduler.PREFILL_CHUNK=32", module="tests.cloud.tuned_verifier",
    )  # fmt: skip
    server.start()
    server.wait_ready()
    yield server
    server.kill()


def hello(folder: Path) -> Hello:
    return Hello(1, (folder / "hash").read_text(), load_drafter(folder / "drafter")[2])


class Device(threading.Thread):
    """Decodes one text through whatever happens to the server. `wrong` says what was not as plain decoding has it."""

    def __init__(self, address: str, greeting: Hello, seed: int) -> None:
        super().__init__(daemon=True)
        self.rng = random.Random(seed)
        self.address, self.greeting, self.session = address, greeting, os.urandom(16)
        self.sampling = Sampling(temperature=(0.0, 0.7, 1.0)[seed % 3], seed=seed)
        self.prompt = [self.rng.randrange(4, VOCAB) for _ in range(self.rng.choice([3, 20, 70]))]
        self.truth = plain_decode(MODEL, self.prompt, self.sampling, NEW + SPARE, eos_ids=())
        self.done, self.seq, self.connects = 0, 0, 0
        self.wrong: list[str] = []
        self.close_codes: list[int] = []

    def run(self) -> None:
        while self.done < NEW and not self.wrong:
            self.connects += 1
            try:
                with Client(self.address, self.greeting) as client:
                    self._serve(client)
            except ConnectionClosed as closed:
                self.close_codes += [frame.code for frame in (closed.rcvd,) if isinstance(frame, CloseFrame)]
            except (OSError, InvalidHandshake, TimeoutError, EOFError):
                pass
            time.sleep(self.rng.uniform(0.02, 0.1))

    def _serve(self, client: Client) -> None:
        """Rounds until the text is done or the server says that this connection is of no more use."""
        tokens = self.prompt + self.truth[: self.done]
        have = max(0, len(tokens) - 2)
        client.send(Open(0, self.session, self.seq, pack_ids(tokens), have, self.sampling))
        while self.done < NEW:
            ahead = self.truth[self.done :]
            tree = random_tree(self.rng, ahead[:6], VOCAB)
            client.send(Verify(0, self.seq + 1, len(self.prompt) + self.done, *pack_tree(tree)))
            verdict = self._verdict(client)
            if verdict is None:
                return
            path = list(verdict.accepted)
            emitted = [tree.tokens[node] for node in path] + [verdict.bonus]
            if emitted != ahead[: len(emitted)] or path != expected_path(tree, ahead)[: len(path)]:
                self.wrong.append(f"{emitted} where {ahead[: len(emitted)]} follows {self.done} tokens")
                return
            self.seq, self.done = verdict.seq, self.done + len(emitted)
            time.sleep(self.rng.uniform(0, 0.02))
        client.send(Close(0))

    def _verdict(self, client: Client) -> Verdict | None:
        while True:
            message = client.any()
            match message:
                case Verdict():
                    return message
                case Opened() | Features():
                    continue
                case Error(code=code) if code == ERR_GOING_AWAY:
                    continue  # what is under way is still answered, then the socket is closed
                case Error(code=code) if code in (ERR_BUSY, ERR_UNKNOWN):
                    return None
                case Resync():
                    return None
                case _:
                    self.wrong.append(str(message))
                    return None


def finish(devices: list[Device]) -> None:
    for device in devices:
        device.join(HANG)
        assert not device.is_alive(), (device.done, device.connects)
        assert device.wrong == [] and device.done >= NEW


def metric(server: VerifierProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=HANG) as answer:
        text = answer.read().decode()
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"outrider:{name} "))


def started(server: VerifierProcess, folder: Path, count: int) -> list[Device]:
    devices = [Device(server.address, hello(folder), seed) for seed in range(count)]
    for device in devices:
        device.start()
    return devices


@pytest.mark.slow
def test_kill_and_restart(server: VerifierProcess, folder: Path) -> None:
    devices = started(server, folder, 7)
    for _ in range(2):
        while sum(device.done for device in devices) < 20 + 7 * 5:
            time.sleep(0.01)
        server.kill()
        time.sleep(0.2)
        server.start()
        server.wait_ready()
    finish(devices)
    assert any(device.connects > 1 for device in devices)


@pytest.mark.slow
def test_end_under_load(server: VerifierProcess, folder: Path) -> None:
    """SIGTERM while all are busy: every round under way is answered, sockets close with 1012, status 0."""
    devices = started(server, folder, 7)
    while min(device.done for device in devices) < 5:
        time.sleep(0.01)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG) == 0
    server.start()
    server.wait_ready()
    finish(devices)
    codes = [code for device in devices for code in device.close_codes]
    assert codes and set(codes) == {1012}
    assert "Traceback" not in server.log.read_text()


def flood(address: str, greeting: Hello, stop: threading.Event) -> None:
    """VERIFYs as fast as the socket takes them."""
    while not stop.is_set():
        with suppress(Exception), Client(address, greeting) as client:
            client.open([5, 6, 7])
            frame = encode(Verify(0, 1, 3, *pack_tree(TokenTree.chain([9] * 1))))
            while not stop.is_set():
                client.socket.send(frame)


def big(address: str, greeting: Hello, stop: threading.Event) -> None:
    """A valid tree of the largest size, again and again."""
    while not stop.is_set():
        with suppress(Exception), Client(address, greeting) as client:
            length, seq = 3, 0
            client.open([5, 6, 7])
            while not stop.is_set() and length < 180:
                seq += 1
                tree = TokenTree(tuple(range(10, 74)), (-1,) * 64)
                client.send(Verify(0, seq, length, *pack_tree(tree)))
                verdict = client.receive(Verdict)
                length += len(verdict.accepted) + 1


def half_open(address: str, greeting: Hello, stop: threading.Event) -> None:
    """Sockets that connect, and some that greet, and then never say or read anything again."""
    host, port = address.split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(5)]
    clients = [Client(address, greeting) for _ in range(5)]
    for client in clients:
        client.send(Open(0, os.urandom(16), 0, pack_ids([5] * 60), 0, Sampling()))
    stop.wait()
    for each in sockets:
        each.close()
    for client in clients:
        client.socket.socket.close()


@pytest.mark.slow
def test_hostile_company(server: VerifierProcess, folder: Path) -> None:
    """Floods, largest trees, half-open sockets and a pool too small for all: right texts, nothing left over."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=kind, args=(server.address, hello(folder), stop), daemon=True)
        for kind in (flood, big, half_open)
    ]
    for thread in threads:
        thread.start()
    devices = started(server, folder, 7)
    finish(devices)
    assert metric(server, "num_preemptions_total") > 0
    stop.set()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    deadline = time.monotonic() + HANG
    while metric(server, "connections") or metric(server, "num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "Traceback" not in server.log.read_text()


def test_silent_sockets_are_dropped() -> None:
    """One that answers no ping and reads nothing is gone after the ping timeout, with all that was meant for it."""
    model = tiny_model()
    verifier = make_verifier(model, (), kv_tokens=2048)
    with serve(verifier, uvicorn_options={"ws_ping_interval": 0.2, "ws_ping_timeout": 0.3}) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(
                b"GET /v1/verify HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Protocol: outrider.v1\r\n\r\n"
            )
            deadline = time.monotonic() + HANG
            seen = 0.0
            while True:
                now = verifier.metrics.registry.get_sample_value("outrider:connections") or 0.0
                seen = max(seen, now)
                if seen and not now:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.02)
