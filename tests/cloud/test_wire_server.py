"""The verifier over real sockets: handshake, order, limits, retries, resume, slow and hostile devices."""

from __future__ import annotations

import os
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any

import httpx
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from cloud.engine.features import PackedRows
from cloud.server.accounts import Accounts
from cloud.server.connection import MAX_BACKLOG, MAX_MALFORMED, MAX_STREAMS, Connection
from cloud.server.outbox import Outbox
from cloud.server.service import Verifier
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import (
    ERR_BOUNDS,
    ERR_BUSY,
    ERR_INTERNAL,
    ERR_MALFORMED,
    ERR_MISMATCH,
    ERR_ORDER,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    FEATURE_CHUNK,
    MAX_CLIENT_FRAME,
    Cancel,
    ClientMessage,
    Close,
    Error,
    Features,
    Generate,
    Hello,
    Open,
    Opened,
    Resync,
    Verdict,
    Verify,
    WireError,
    decode_client,
    decode_server,
    encode,
    pack_ids,
    pack_tree,
)
from tests.cloud.drive import DRAFTER_HASH, Client, assert_rows, make_verifier, serve
from tests.tiers import first
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG, until

VOCAB = 199
MODEL = tiny_model("llama", seed=4, vocab=VOCAB)
PROMPT = [10, 20, 30, 40, 50]
TRUTH = plain_decode(MODEL, PROMPT, Sampling(), 40, eos_ids=())


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return make_verifier(MODEL, (), kv_tokens=2048)


@pytest.fixture(scope="module")
def address(verifier: Verifier) -> Iterator[str]:
    with serve(verifier) as address:
        yield address


def assert_served(address: str) -> None:
    """Another device gets the right text."""
    with Client(address) as client:
        client.open(PROMPT)
        verdict = client.verify(1, 5, TokenTree.chain(TRUTH[:3]))
        assert (list(verdict.accepted), verdict.bonus) == ([0, 1, 2], TRUTH[3])


def closed_with(client: Client) -> int:
    """Close code, once what was sent before it is read."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            client.socket.recv(timeout=HANG)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


def test_health(address: str) -> None:
    for path, text in (("healthz", "alive\n"), ("readyz", "ready\n")):
        answer = httpx.get(f"http://{address}/{path}")
        assert (answer.status_code, answer.text) == (200, text)
        assert "server" not in answer.headers
    assert httpx.get(f"http://{address}/else").status_code == 404


def test_not_ready_while_draining() -> None:
    verifier = make_verifier(MODEL, ())
    with serve(verifier) as address:
        verifier.drain()
        assert httpx.get(f"http://{address}/readyz").status_code == 503
        assert httpx.get(f"http://{address}/healthz").status_code == 200
        with pytest.raises(InvalidStatus) as refused:
            Client(address)
        assert refused.value.response.status_code == 503


@pytest.mark.parametrize("protocols", [None, ["outrider.v2"], ["graphql-ws", "x"]])
def test_other_subprotocols_are_refused(address: str, protocols: Any) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{address}/v1/verify", subprotocols=protocols)
    assert refused.value.response.status_code == 400
    assert b"outrider.v1" in (refused.value.response.body or b"")


def test_welcome(address: str, verifier: Verifier) -> None:
    with Client(address) as client:
        assert client.welcome.vocab_size == VOCAB
        assert (client.welcome.max_context, client.welcome.max_nodes) == (128, 24)
        assert (client.welcome.target_hash, client.welcome.drafter_hash) == ("tiny-target", DRAFTER_HASH)
        assert client.socket.subprotocol == "outrider.v1"
        client.send(Hello(1, "tiny-target", DRAFTER_HASH))
        assert client.receive(Error).code == ERR_ORDER


@pytest.mark.parametrize(
    ("hello", "names"),
    [
        (Hello(2, "tiny-target", DRAFTER_HASH), ("2", "1")),
        (Hello(1, "other", DRAFTER_HASH), ("other", "tiny-target")),
        (Hello(1, "tiny-target", "old"), ("old", DRAFTER_HASH)),
    ],
)
def test_handshake_mismatch(address: str, hello: Hello, names: tuple[str, str]) -> None:
    client = Client(address, None)
    client.send(hello)
    error = client.receive(Error)
    assert error.code == ERR_MISMATCH and all(name in error.text for name in names)
    assert error.text.endswith("use a bundle made for this verifier, or export this one again")
    assert closed_with(client) == 4001
    assert_served(address)


def test_an_answer_begun_in_another_arithmetic_is_refused(address: str, verifier: Verifier) -> None:
    assert verifier.arithmetic == "torch-float64"
    hello = Hello(1, "tiny-target", DRAFTER_HASH, arithmetic="torch-float64")
    for asked in (hello, msgspec.structs.replace(hello, arithmetic="")):
        with Client(address, asked) as client:
            assert client.welcome.arithmetic == "torch-float64"
    other = Client(address, None)
    other.send(msgspec.structs.replace(hello, arithmetic="onnx-8-v6"))
    error = other.receive(Error)
    assert error.code == ERR_MISMATCH and "bundle" not in error.text
    assert error.text.startswith("the answer was begun in onnx-8-v6 arithmetic, and this verifier computes in torch-")
    assert closed_with(other) == 4001
    assert_served(address)


def test_no_hello(address: str) -> None:
    rude = Client(address, None)
    rude.send(Cancel(0))
    assert rude.receive(Error).code == ERR_ORDER
    assert closed_with(rude) == 1008
    with serve(make_verifier(MODEL, ()), hello_seconds=1.0) as hurried:
        assert closed_with(Client(hurried, None)) == 1008


def test_text_frame_closes(address: str) -> None:
    client = Client(address)
    client.socket.send("hello")
    assert closed_with(client) == 1003
    assert_served(address)


def test_oversized_frame_closes(address: str) -> None:
    client = Client(address)
    client.socket.send(bytes(MAX_CLIENT_FRAME + 1))
    assert closed_with(client) == 1009
    assert_served(address)


def test_malformed_frames_are_answered_then_closed(address: str) -> None:
    client = Client(address)
    for index in range(MAX_MALFORMED):
        client.socket.send(bytes([index]) * 20)
        assert client.receive(Error).code == ERR_MALFORMED
        if index == 50:
            client.open(PROMPT)
            assert client.verify(1, 5, TokenTree()).bonus == TRUTH[0]
    assert closed_with(client) == 1008
    assert_served(address)


def test_bounds(address: str) -> None:
    session = os.urandom(16)
    chain = TokenTree.chain
    cases: list[tuple[ClientMessage, int]] = [
        (Open(1, session, 0, b"", 0, Sampling()), ERR_BOUNDS),
        (Open(1, session, 0, pack_ids([5, VOCAB]), 0, Sampling()), ERR_BOUNDS),
        (Open(1, session, 0, pack_ids([2**32 - 1]), 0, Sampling()), ERR_BOUNDS),
        (Open(1, session, 0, pack_ids([5] * 129), 0, Sampling()), ERR_TOO_LONG),
        (Open(1, session, 0, b"12345", 0, Sampling()), ERR_MALFORMED),
        (Verify(1, 1, 5, *pack_tree(chain([5]))), ERR_UNKNOWN),
        (Generate(1, 1, 5, 5), ERR_UNKNOWN),
        (Cancel(1), ERR_UNKNOWN),
        (Close(1), ERR_UNKNOWN),
        (Verify(0, 1, 5, *pack_tree(chain([5, VOCAB]))), ERR_BOUNDS),
        (Verify(0, 1, 5, *pack_tree(chain(range(25)))), ERR_BOUNDS),
        (Verify(0, 1, 120, *pack_tree(chain(range(9)))), ERR_TOO_LONG),
        (Verify(0, 1, 5, pack_ids([5, 6]), b"\xff"), ERR_MALFORMED),
        (Verify(0, 1, 5, pack_ids([5, 6]), b"\x01\xff"), ERR_MALFORMED),
        (Verify(0, 1, 5, pack_ids([5, 5]), b"\xff\xff"), ERR_MALFORMED),
        (Verify(0, 2, 5, *pack_tree(chain([5]))), ERR_ORDER),
        (Verify(0, 0, 5, *pack_tree(chain([5]))), ERR_ORDER),
        (Generate(0, 7, 5, 5), ERR_ORDER),
    ]
    with Client(address) as client:
        client.open(PROMPT)
        for message, code in cases:
            client.send(message)
            error = client.receive(Error)
            assert error.code == code, (message, error)
            assert len(error.text) > 10
        client.send(Verify(0, 1, 6, *pack_tree(chain([5]))))
        assert client.receive(Resync) == Resync(0, 5)
        assert client.verify(1, 5, chain(TRUTH[:2])).bonus == TRUTH[2]  # and the session is unharmed


def test_context_full(address: str) -> None:
    with Client(address) as client:
        assert client.open([5] * 128).committed == 128
        client.send(Verify(0, 1, 128, b"", b""))
        assert client.receive(Error).code == ERR_TOO_LONG
        client.send(Generate(0, 1, 128, 4))
        assert client.receive(Error).code == ERR_TOO_LONG
        client.open([5] * 126)
        assert len(client.generate(1, 126, 50)) == 2


def test_stream_limit(address: str) -> None:
    with Client(address) as client:
        for stream in range(MAX_STREAMS):
            client.open(PROMPT, stream)
        client.send(Open(99, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling()))
        error = client.receive(Error)
        assert (error.code, error.stream) == (ERR_BUSY, 99)
        client.send(Close(3))
        client.open(PROMPT, 99)
        for stream in (0, 99, 15):
            assert client.verify(1, 5, TokenTree.chain(TRUTH[:1]), stream).bonus == TRUTH[1]


def test_retry_gets_the_same_bytes(address: str) -> None:
    session = os.urandom(16)
    request = Verify(0, 1, 5, *pack_tree(TokenTree.chain(TRUTH[:2])))
    with Client(address) as client:
        client.open(PROMPT, session=session)
        client.send(request)
        first = client.frame()
        assert isinstance(decode_server(first), Verdict)
        client.send(request)
        assert client.frame() == first
        # the same number for another tree is not a retry
        client.send(Verify(0, 1, 5, *pack_tree(TokenTree.chain([1]))))
        assert client.receive(Error).code == ERR_ORDER
    with Client(address) as client:  # the device never saw the verdict
        assert client.open(PROMPT, session=session).cached == 4
        client.send(request)
        assert client.frame() == first
        verdict = client.verify(2, 8, TokenTree.chain(TRUTH[3:5]))
        assert (list(verdict.accepted), verdict.bonus) == ([0, 1], TRUTH[5])
    with Client(address) as client:  # an older state, another tree under the same number: verified anew
        client.open(PROMPT, session=session)
        verdict = client.verify(1, 5, TokenTree.chain([*TRUTH[:1], 1]))
        assert (list(verdict.accepted), verdict.bonus) == ([0], TRUTH[1])
    with Client(address) as client:  # same length and tree, but another text: the old reply must not come back
        other = [10, 20, 30, 40, 51]
        client.open(other, session=session)
        client.send(Verify(0, 1, 5, *pack_tree(TokenTree.chain([*TRUTH[:1], 1]))))
        verdict = client.receive(Verdict)
        assert verdict.bonus == plain_decode(MODEL, other, Sampling(), 1, eos_ids=())[0] != TRUTH[1]


def test_resume_with_fewer_rows_and_other_text(address: str, verifier: Verifier) -> None:
    session = os.urandom(16)
    with Client(address) as client:
        client.open(PROMPT, session=session)
        client.verify(1, 5, TokenTree.chain(TRUTH[:4]))
    tokens = PROMPT + TRUTH[:5]
    with Client(address) as client:
        opened = client.open(tokens, session=session, seq=1, have=2)
        assert (opened.committed, opened.cached) == (10, 9)
        features = client.receive(Features)
        assert features.start == 2
        assert_rows(MODEL, verifier, tokens, 2, features.rows)
        edited = [*tokens[:7], 100, 101]
        assert client.open(edited, session=session, seq=1, have=0).cached == 7
        assert_rows(MODEL, verifier, edited, 0, client.receive(Features).rows)
        assert client.verify(2, 9, TokenTree()).bonus == plain_decode(MODEL, edited, Sampling(), 1)[0]


def test_session_moves_to_the_connection_that_opened_it_last(address: str) -> None:
    session = os.urandom(16)
    with Client(address) as old, Client(address) as new:
        old.open(PROMPT, session=session, have=0)
        old.receive(Features)
        assert new.open(PROMPT, stream=7, session=session).cached == 4
        old.send(Verify(0, 1, 5, b"", b""))
        assert old.receive(Error).code == ERR_UNKNOWN
        assert new.verify(1, 5, TokenTree(), stream=7).bonus == TRUTH[0]


def test_closed_session_is_forgotten(address: str) -> None:
    session = os.urandom(16)
    with Client(address) as client:
        client.open(PROMPT, session=session, have=0)
        client.receive(Features)
        assert client.open(PROMPT, session=session).cached == 4
        client.send(Close(0))
        assert client.open(PROMPT, session=session).cached == 0


def test_verify_right_behind_open(address: str, verifier: Verifier) -> None:
    prompt = [(7 * i) % 190 + 4 for i in range(90)]  # six prefill chunks
    truth = plain_decode(MODEL, prompt, Sampling(), 4, eos_ids=())
    with Client(address) as client:
        client.send(Open(0, os.urandom(16), 0, pack_ids(prompt), 0, Sampling()))
        client.send(Verify(0, 1, 90, *pack_tree(TokenTree.chain(truth[:2]))))
        kinds = {type(message): message for message in (client.any() for _ in range(3))}
        assert kinds.keys() == {Opened, Verdict, Features}
        assert kinds[Verdict].bonus == truth[2]  # type: ignore[union-attr]
        assert_rows(MODEL, verifier, prompt, 0, kinds[Features].rows)  # type: ignore[union-attr]
        assert len(kinds[Features].rows) == 89 * verifier.features.shape.nbytes  # type: ignore[union-attr]


def test_generate_cancel_and_go_on(address: str) -> None:
    with Client(address) as client:
        client.open(PROMPT)
        assert client.generate(1, 5, 6) == TRUTH[:6]
        client.send(Generate(0, 2, 11, 110))
        first = client.receive(Verdict)
        assert first.bonus == TRUTH[6]
        client.send(Verify(0, 3, 12, b"", b""))  # refused while tokens stream
        while isinstance(message := client.any(), Verdict):
            pass
        assert isinstance(message, Error) and message.code == ERR_ORDER
        client.send(Cancel(0))
        got = [*PROMPT, *TRUTH[:7]]
        client.send(Open(0, os.urandom(16), 9, pack_ids(got), 1 << 20, Sampling()))
        while not isinstance(message := client.any(), Opened):
            assert isinstance(message, Verdict)
        assert client.verify(10, 12, TokenTree.chain(TRUTH[7:9])).bonus == TRUTH[9]


def test_cancelled_seq_counts_as_used(address: str) -> None:
    with Client(address) as client:
        client.open(PROMPT)
        client.send(Generate(0, 1, 5, 100))
        client.send(Cancel(0))
        client.send(Verify(0, 2, 5, b"", b""))
        while not isinstance(message := client.any(), Resync):
            assert isinstance(message, Verdict)
            if message.seq == 2:  # the GENERATE was dropped before its first step
                assert message.bonus == TRUTH[0]
                return
        assert message.committed > 5


def test_many_clients_at_once(address: str) -> None:
    faults: list[BaseException] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 30))]
        sampling = Sampling(temperature=rng.choice([0.0, 0.9]), seed=seed)
        truth = plain_decode(MODEL, prompt, sampling, 30, eos_ids=())
        try:
            with Client(address) as client:
                client.open(prompt, sampling=sampling)
                got: list[int] = []
                for seq in range(1, 8):
                    guess = truth[len(got) : len(got) + rng.randrange(4)]
                    verdict = client.verify(seq, len(prompt) + len(got), TokenTree.chain(guess))
                    assert len(verdict.accepted) == len(guess)
                    got += [*guess, verdict.bonus]
                assert got == truth[: len(got)]
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert not faults, faults


def test_a_failed_step_is_answered_and_the_engine_goes_on(
    address: str, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(address) as client:
        client.open(PROMPT, have=1 << 20)
        client.verify(1, 5, TokenTree())
        with monkeypatch.context() as patch:
            patch.setattr(verifier.engine, "_compact", lambda *_: 1 / 0)
            client.send(Verify(0, 2, 6, b"", b""))
            assert client.receive(Error).code == ERR_INTERNAL
        assert client.verify(2, 6, TokenTree.chain(TRUTH[1:3])).bonus == TRUTH[3]
    assert httpx.get(f"http://{address}/healthz").status_code == 200


def test_lost_socket_keeps_the_session(address: str) -> None:
    session = os.urandom(16)
    client = Client(address)
    client.open(PROMPT, session=session)
    client.verify(1, 5, TokenTree.chain(TRUTH[:3]))
    client.send(Generate(0, 2, 9, 100))
    client.socket.socket.close()  # no closing handshake
    with Client(address) as client:
        assert client.open(PROMPT + TRUTH[:4], session=session, seq=2).cached == 8
        assert client.generate(3, 9, 5) == TRUTH[4:9]


def test_outbox_sends_messages_before_rows_and_newest_rows_first() -> None:
    shape = RowShape(1, 1000)
    rows = PackedRows(shape)
    count = 100
    rows.append(b"".join([bytes(4) * count, *(bytes([i]) * 1000 for i in range(count))]))
    outbox = Outbox()
    outbox.put_features(3, rows.copy(10, count))
    first = decode_server(outbox.next() or b"")
    assert isinstance(first, Features) and len(first.rows) <= FEATURE_CHUNK
    outbox.put(Resync(3, 1))
    assert decode_server(outbox.next() or b"") == Resync(3, 1)
    got = [first]
    while frame := outbox.next():
        message = decode_server(frame)
        assert isinstance(message, Features)
        got.append(message)
    assert got[0].start + len(got[0].rows) // shape.nbytes == count and got[-1].start == 10
    for newer, older in pairwise(got):
        assert older.start + len(older.rows) // shape.nbytes == newer.start
    for message in got:
        n = len(message.rows) // shape.nbytes
        assert message.rows[4 * n :: 1000] == bytes(range(message.start, message.start + n))


def mutated(rng: random.Random, frames: list[bytes]) -> bytes:
    """A valid frame with a few bytes changed, cut, doubled, or fields replaced by others of any type."""
    frame = bytearray(rng.choice(frames))
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    elif kind == 1:
        del frame[rng.randrange(len(frame)) :]
    elif kind == 2:
        at = rng.randrange(len(frame))
        frame[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 3:
        bombs = [b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x91" * 2000, rng.randbytes(30)]
        frame = bytearray(rng.choice(bombs) + b"\x80")
    else:
        fields = msgspec.msgpack.decode(bytes(frame).rstrip(b"\0")[:-1])
        if len(fields) > 1:
            numbers: list[Any] = [0, 1, -1, 2**31, 2**63, 0.5, float("nan")]
            others: list[Any] = ["x", None, [], b"", rng.randbytes(16), b"\xff" * 8, [0.5] * 5]
            fields[rng.randrange(1, len(fields))] = rng.choice(numbers + others)
        frame = bytearray(msgspec.msgpack.encode(fields) + b"\x80")
    return bytes(frame)


def valid_frames(session: bytes) -> list[bytes]:
    return [
        encode(message)
        for message in (
            Hello(1, "tiny-target", DRAFTER_HASH),
            Open(0, session, 0, pack_ids(PROMPT), 0, Sampling()),
            Open(1, bytes(16), 3, pack_ids(PROMPT * 3), 4, Sampling(0.7, 40, 0.9, 0.1, 77)),
            Verify(0, 1, 5, *pack_tree(TokenTree.chain(TRUTH[:4]))),
            Verify(1, 4, 15, *pack_tree(TokenTree((5, 6, 7, 8), (-1, 0, 0, -1)))),
            Generate(0, 1, 5, 3),
            Generate(1, 4, 15, 3),
            Cancel(0),
            Close(1),
        )
    ]


@pytest.mark.parametrize("frames_sent", first(1, [3_000, 12_000]))
def test_mutated_frames_in_process(frames_sent: int) -> None:
    """Only WireError leaves the decoder, only messages leave the handler, and memory stays flat."""
    rng = random.Random(2024)
    frames = valid_frames(os.urandom(16))
    verifier = make_verifier(MODEL, (), max_sessions=6, kv_tokens=1024)
    verifier.start()
    posted: SimpleQueue[Any] = SimpleQueue()
    streams: dict[bytes, Any] = {}
    seen: dict[str, int] = {}

    def drain(connection: Connection) -> None:
        while True:
            try:
                posted.get_nowait()()
            except Empty:
                break
        while (frame := connection.outbox.next()) is not None:
            message = decode_server(frame)
            name = f"error {message.code}" if isinstance(message, Error) else type(message).__name__
            seen[name] = seen.get(name, 0) + 1

    def fresh() -> Connection:
        connection = Connection(verifier, Accounts().authenticate(None), streams, posted.put, lambda: None)
        connection.receive(frames[0])
        assert connection.greeted
        return connection

    connection = fresh()
    tracemalloc.start()
    baseline = 0
    for count in range(frames_sent):
        frame = mutated(rng, frames) if rng.random() < 0.8 else rng.choice(frames[1:])
        with suppress(WireError):
            decode_client(frame)
        connection.receive(frame)
        if count % 20 == 0:
            time.sleep(0.002)  # let the engine thread have its turn
        drain(connection)
        if connection.closing is not None:
            connection.lost()
            connection = fresh()
        if count == frames_sent // 3:
            baseline = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - baseline
    tracemalloc.stop()
    connection.lost()
    assert not streams
    assert verifier.alive
    verifier.stop()
    assert grown < 1 << 20, grown
    assert f"error {ERR_INTERNAL}" not in seen
    wanted = {"Opened", "Verdict", "Features", "Resync", *(f"error {code}" for code in (1, 3, 4, 5))}
    assert wanted <= seen.keys(), seen


def test_mutated_frames_over_the_socket_do_not_disturb_others(address: str) -> None:
    rng = random.Random(7)
    stop = threading.Event()
    rounds: list[int] = []
    faults: list[BaseException] = []

    def good_client() -> None:
        try:
            while not stop.is_set():
                assert_served(address)
                rounds.append(1)
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=good_client)
    thread.start()
    try:
        frames = valid_frames(os.urandom(16))
        closed = 0
        for _ in range(6):
            client = Client(address)
            try:
                for _ in range(150):
                    client.socket.send(mutated(rng, frames))
                while True:
                    decode_server(client.socket.recv(timeout=3))  # type: ignore[arg-type]
            except ConnectionClosed as error:
                assert error.rcvd is not None and error.rcvd.code == 1008, error
                closed += 1
            except TimeoutError:  # all answered, fewer than a hundred of them as malformed
                client.socket.close()
        until(lambda: rounds or not thread.is_alive())
    finally:
        stop.set()
        thread.join(HANG)
    assert closed >= 1
    assert not faults and rounds
    assert_served(address)


def test_flood_of_opens_stays_bounded(address: str, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine is busy, one connection can queue a bounded number of requests only."""
    step, waiting = verifier.engine.step, list[int]()

    def slow_step(segments: Any) -> Any:
        time.sleep(0.3)
        waiting.append(verifier.batcher._queue.qsize())
        return step(segments)

    with Client(address) as client, monkeypatch.context() as patch:
        patch.setattr(verifier.engine, "step", slow_step)
        frame = encode(Open(0, os.urandom(16), 0, pack_ids(PROMPT * 20), 1 << 20, Sampling()))
        for _ in range(300):
            client.socket.send(frame)
        assert client.receive(Opened).committed == 100
        assert until(lambda: sum(waiting) >= 30)
    assert 10 < max(waiting) <= MAX_BACKLOG + 1
    assert_served(address)


def test_slow_reader_does_not_disturb_others(address: str) -> None:
    """Its frames wait on its side of the socket; what the server holds for it stays small."""
    with Client(address) as slow:
        slow.open(PROMPT)
        for index in range(3000):
            slow.send(Verify(9, 1, 5, b"", b""))  # each is answered with an ERROR that nobody reads
            if index == 500:
                assert_served(address)
        assert_served(address)
        for _ in range(3000):
            assert slow.receive(Error).code == ERR_UNKNOWN
        assert slow.verify(1, 5, TokenTree()).bonus == TRUTH[0]
