"""Storm the decoders and a running verifier with broken frames: `python -m tests.fuzz --frames 1000000 --seed 0`.

With `--coverage` libFuzzer looks for frames that reach new lines instead (`pip install atheris` first).
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
import psutil
import structlog

from cloud.server.connection import Connection
from cloud.server.service import Verifier
from cloud.server.stream import Stream
from outrider_core.protocol.constraint import (
    GRAMMAR_JSON_OBJECT,
    GRAMMAR_JSON_SCHEMA,
    GRAMMAR_NONE,
    Constraint,
    Rules,
    pack_bias,
)
from outrider_core.protocol.rows import RowShape, unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import (
    ERR_INTERNAL,
    ERR_MALFORMED,
    ERR_UNKNOWN,
    MAX_CLIENT_FRAME,
    MAX_SERVER_FRAME,
    Cancel,
    ClientMessage,
    Close,
    Error,
    Generate,
    Hello,
    Open,
    Opened,
    Verdict,
    Verify,
    WireError,
    decode_client,
    decode_server,
    encode,
    pack_ids,
    pack_tree,
    unpack_ids,
    unpack_tree,
)
from tests.cloud.drive import HELLO, make_verifier
from tests.protocol.make_vectors import FRAMES_FILE
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG, until

VOCAB = 199
PROMPT = [10, 20, 30, 40, 50]
#: connections of one storm; they share SESSIONS, so that sessions move between them
CONNECTIONS = 3
SESSIONS = [bytes([i]) * 16 for i in range(10)]
ROWS = RowShape(2, 8)
#: behind this many requests to the engine thread it is left to finish them, so that rounds end however busy the machine
PAUSE_EVERY = 8

pack = msgspec.msgpack.encode

INTEGERS = [
    n
    for edge in (0, 16, 64, 128, 255, 1 << 16, 1 << 17, 1 << 31, 1 << 32, 1 << 63, 1 << 64)
    for n in (edge - 1, edge, edge + 1, -edge)
    if -(1 << 63) <= n < 1 << 64
]
NAN, INF = float("nan"), float("inf")
FLOATS = [NAN, INF, -INF, -0.0, 0.5, 1.0, -1.0, 100.0, 100.1, 5e-324, 2.3e-308, 1.8e308, 1.0 - 2**-53]
NODES = [0, 1, 2, 3, 8, 255, 256]
LENGTHS = [0, 1, 3, 4, 15, 16, 17, 64, 65, 128, 129, 255, 256, 1020, 1024]
#: a first byte that promises more than the frame holds: str, bin, array, map and ext of all sizes
HUGE = [
    bytes([kind]) + b"\xff" * size
    for size, kinds in {1: b"\xc4\xc7\xd9", 2: b"\xc5\xc8\xda\xdc\xde", 4: b"\xc6\xc9\xdb\xdd\xdf"}.items()
    for kind in kinds
]
NESTS = [b"\x91", b"\x81\x00", b"\xdd\x00\x00\x00\x01", b"\x92\xc0", b"\x81", b"\xc4"]
TYPE_BYTES = [0x00, 0x7F, 0x80, 0x81, 0x8F, 0x90, 0x91, 0x9F, 0xA0, 0xA1, 0xBF, *range(0xC0, 0xE1), 0xFF]
BAD_TEXT = [b"\xa2\xc3\x28", b"\xa1\x80", b"\xa3\xed\xa0\x80", b"\xa2\xc0\x80", b"\xa4\xf5\x80\x80\x80", b"\xa1\xff"]


class Mutator:
    """An endless supply of frames: some valid, most of them broken in ways that know the format."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.settled: dict[int, tuple[int, int]] = {}  # by stream: last seq and committed tokens
        self.greeted = True  # else HELLO is the thing to say
        self.golden = [bytes.fromhex(row["hex"]) for row in json.loads(FRAMES_FILE.read_text(encoding="utf-8"))]

    def frame(self) -> bytes:
        kind = self.rng.random()
        if kind < 0.3:
            return encode(self.message())
        if kind < 0.65:
            frame = self.padded(self.refielded(self.message()))
        else:
            frame = encode(self.message()) if kind < 0.92 else self.rng.choice(self.golden)
            if self.rng.random() < 0.5:  # half of them keep a valid padding behind broken content
                return self.padded(self.broken(frame.rstrip(b"\0")[:-1]))
            frame = self.broken(frame)
        return frame[:MAX_CLIENT_FRAME]

    def message(self) -> ClientMessage:
        """A message that a device of this model might send; streams and sessions are few, so that they meet.

        Where `settled` knows the stream, most rounds go on from there and reach the engine.
        """
        rng = self.rng
        stream = rng.choice([*self.settled, rng.randrange(4)])
        seq, base_len = rng.choice([0, 1, 1, 2, 3]), rng.choice([5, 5, 6, 7, rng.randrange(130)])
        if stream in self.settled and rng.random() < 0.8:
            seq, base_len = self.settled[stream]
            seq += rng.random() < 0.9  # else the same again
        match rng.randrange(20 if self.settled else 9 if self.greeted else 2):
            case 0:
                return HELLO if rng.random() < 0.3 else Hello(rng.choice([1, 1, 2]), "tiny-target", "old")
            case 1 | 2:
                size = rng.choice([0, 1, 7, 39, 129, 2000])
                tokens = PROMPT if rng.random() < 0.8 else [rng.randrange(VOCAB) for _ in range(size)]
                have = rng.choice([0, 1, 4, 5, 1 << 20])
                number, session = rng.choice([0, 0, 0, seq]), rng.choice(SESSIONS)
                return Open(stream, session, number, pack_ids(tokens), have, self.sampling(), self.constraint())
            case 3:
                return Cancel(stream) if rng.random() < 0.5 else Close(stream)
            case 4 | 5 | 6 | 7:
                return Generate(stream, seq, base_len, rng.choice([1, 1, 2, 3, 9]))
            case _:
                return Verify(stream, seq, base_len, *pack_tree(self.tree()))

    def sampling(self) -> Sampling:
        """Sampling parameters, often at their bounds."""
        pick = self.rng.choice
        if pick([True, False]):
            return Sampling()
        return Sampling(
            pick([0.0, 0.7, 1.0, 100.0, 5e-324, 2.3e-308]),
            pick([0, 1, 40, VOCAB, 2**32 - 1]),
            pick([1.0, 0.9, 1e-9, 5e-324, 1.0 - 2**-53]),
            pick([0.0, 0.05, 1.0, 5e-324]),
            pick([0, 77, 2**32, 2**63 - 1]),
        )

    def constraint(self) -> Constraint | None:
        """None in most cases; else biases and penalties that often name what is not there, or a grammar."""
        pick = self.rng.choice
        if self.rng.random() < 0.8:
            return None
        bias = {
            pick([0, 7, VOCAB - 1, VOCAB, 2**32 - 1]): pick([0.0, 1.5, -100.0, 100.0]) for _ in range(pick([0, 1, 4]))
        }
        grammar = pick([GRAMMAR_NONE] * 6 + [GRAMMAR_JSON_OBJECT, GRAMMAR_JSON_SCHEMA])
        schema = pick(["{}", '{"type": "array"}', "not JSON"]) if grammar == GRAMMAR_JSON_SCHEMA else ""
        penalties = pick([0.0, 0.5, -2.0]), pick([0.0, 2.0])
        return Constraint(pick([0, 5, 5, 1000]), *penalties, *pack_bias(bias), grammar, schema)

    def tree(self) -> TokenTree:
        """A random tree of distinct tokens."""
        rng = self.rng
        size = rng.choice([0, 1, 2, 3, 4, 8, 24, 25, 60])
        tokens = rng.sample(range(VOCAB), size)
        return TokenTree(tuple(tokens), tuple(rng.randrange(ROOT, node) for node in range(size)))

    def refielded(self, message: ClientMessage) -> bytes:
        """The message's array with one to three of its elements broken."""
        parts = [pack(value) for value in msgspec.msgpack.decode(pack(message))]
        lie = 0
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            at = self.rng.randrange(len(parts)) if parts else 0
            match self.rng.randrange(12) if parts else 0:
                case 0:  # often behind the last, where a decoder skips what it does not know
                    parts.insert(self.rng.choice([at, len(parts)]), self.element())
                case 1:
                    del parts[at]
                case 2:
                    parts[at] = bytes([self.rng.choice(TYPE_BYTES)]) + parts[at][1:]
                case 3:
                    parts[at] = self.broken(parts[at])
                case 4:
                    parts[at] = parts[self.rng.randrange(len(parts))]
                case 5:  # the header says another number of elements
                    lie = self.rng.choice([-1, 1, 3])
                case 6 if isinstance(message, Open):
                    fields: list[Any] = [0.7, 5, 0.9, 0.1, 7]
                    fields[self.rng.randrange(5)] = self.rng.choice([*FLOATS, *INTEGERS])
                    parts[-1] = pack(fields)
                case _:
                    parts[at] = self.element()
        count = max(0, len(parts) + lie)
        header = bytes([0x90 + count]) if count < 16 else struct.pack(">BH", 0xDC, count)
        return header + b"".join(parts)

    def element(self) -> bytes:
        """One MessagePack value of any type, at a bound, or broken."""
        rng = self.rng
        match rng.randrange(10):
            case 0 | 1 | 2:
                return pack(rng.choice(INTEGERS))
            case 3:
                return pack(rng.choice(FLOATS))
            case 4:
                return pack("ß" * rng.choice(LENGTHS) if rng.random() < 0.5 else "x" * rng.choice(LENGTHS))
            case 5:
                return pack(rng.randbytes(rng.choice(LENGTHS)))
            case 6:
                return rng.choice(BAD_TEXT)
            case 7:
                return rng.choice(HUGE)
            case 8:
                return self.nest()
            case _:
                ext = msgspec.msgpack.Ext(rng.choice([-1, 0, 1, 127, -128]), rng.randbytes(rng.choice(LENGTHS[:7])))
                return pack(rng.choice([None, True, False, [], {}, {"a": 1}, [0.5] * 5, ext]))

    def nest(self) -> bytes:
        depth = self.rng.choice([2, 8, 100, 2000]) if self.rng.random() < 0.98 else 200_000
        return self.rng.choice(NESTS) * depth + self.rng.choice([b"", b"\xc0", b"\x01"])

    def broken(self, data: bytes) -> bytes:
        """The bytes with one to four faults that know nothing of elements."""
        rng, out = self.rng, bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.randrange(len(out) + 1)
            match rng.randrange(10):
                case 0 if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
                case 1 if at < len(out):
                    out[at] = rng.choice(TYPE_BYTES)
                case 2:
                    out[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 3:
                    del out[at : at + rng.randrange(1, 9)]
                case 4:
                    del out[at:]
                case 5:  # splice: the head of one frame, the tail of another
                    other = rng.choice(self.golden) if rng.random() < 0.5 else encode(self.message())
                    out[at:] = other[rng.randrange(len(other)) :]
                case 6:
                    out[at:at] = out[at : at + rng.randrange(1, 64)]
                case 7:
                    out[at : at + 1] = rng.choice(HUGE)
                case 8 if rng.random() < 0.2:
                    out[at:at] = self.nest()
                case _:
                    out[at : at + rng.randrange(1, 5)] = b"\xff" * rng.randrange(1, 5)
        return bytes(out)

    def padded(self, data: bytes) -> bytes:
        """With the padding a frame needs, or now and then with another."""
        kind = self.rng.random()
        if kind < 0.9:
            return data + b"\x80" + bytes(self.rng.randrange(4))
        if kind < 0.9005:
            return (data + b"\x80").ljust(MAX_CLIENT_FRAME, b"\0")
        return data + self.rng.choice(
            [b"", b"\x80\x80", b"\0\0\x80", b"\x80\0\x01", b"\x81\0", b"\0" * 64, b"\x80" * 64]
        )


def check_decoders(frame: bytes, nodes: int) -> ClientMessage | None:
    """Every decoder takes the frame or raises its own error; returns what a verifier understands, if anything.

    nodes: how many of a tree are read from the bytes, over and over.
    """
    message: ClientMessage | None = None
    with suppress(WireError):
        message = decode_client(frame)
    with suppress(WireError):
        decode_server(frame)
    with suppress(WireError):
        unpack_ids(frame)
    with suppress(WireError):
        data = frame * (1 + 5 * nodes // max(1, len(frame)))
        unpack_tree(data[: 4 * nodes], data[4 * nodes : 5 * nodes])
    with np.errstate(invalid="ignore"), suppress(ValueError):  # scales may be infinite
        unpack_rows(frame, ROWS)
    return message


@dataclass
class Report:
    """What a storm saw. replies: by kind; growth: resident bytes added after the first quarter."""

    frames: int = 0
    understood: int = 0
    submitted: int = 0  # requests that reached the engine thread
    hung_up: int = 0
    seconds: float = 0.0
    slowest: float = 0.0  # seconds, of one Connection.receive
    growth: int = 0
    replies: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.replies.items()))
        return (
            f"{self.frames:,} frames in {self.seconds:.1f} s, {self.understood:,} understood, "
            f"{self.submitted:,} handed to the engine; slowest "
            f"{self.slowest * 1e3:.1f} ms; {self.hung_up:,} connections used up; memory {self.growth / 2**20:+.1f} MiB"
            f"\nreplies: {kinds}"
        )


class Front:
    """Connections of one started verifier, driven without sockets as cloud.app drives them."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        account = verifier.accounts.authenticate(None)
        assert account is not None
        self.account = account
        self.streams: dict[bytes, Stream] = {}
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.submitted = 0
        self.preparing = 0  # constraints handed to their thread; the OPEN is submitted when they are ready
        submit = verifier.submit

        def counted(job: Any) -> None:
            self.submitted += 1
            submit(job)

        verifier.submit = counted  # type: ignore[method-assign]
        prepare = verifier.constraints.prepare

        def prepared(*args: Any) -> Future[Rules]:
            self.preparing += 1
            return prepare(*args)

        verifier.constraints.prepare = prepared  # type: ignore[method-assign]

    def connect(self, *, greet: bool = True) -> Connection:
        connection = Connection(self.verifier, self.account, self.streams, self.posted.put, lambda: None)
        if greet:
            connection.receive(encode(HELLO))
            assert connection.greeted
        return connection

    def deliver(self) -> None:
        """Run what the engine thread has posted."""
        while True:
            try:
                self.posted.get_nowait()()
            except Empty:
                return

    def answers(self, connection: Connection) -> list[Any]:
        """What the connection sends now; every frame must be one that a device understands."""
        messages = []
        while (frame := connection.outbox.next()) is not None:
            assert len(frame) <= MAX_SERVER_FRAME
            messages.append(decode_server(frame))
        return messages

    def receive(self, connection: Connection, frame: bytes, message: ClientMessage | None) -> list[Any]:
        """Hand over one frame; `message` is what it decodes to. It must be answered or acted upon."""
        before = self.answers(connection)
        acted = self.submitted + self.preparing
        connection.receive(frame)
        after = self.answers(connection)
        if message is None:
            assert [(reply.code, reply.stream) for reply in after] == [(ERR_MALFORMED, -1)], frame
        elif not isinstance(message, Cancel | Verify | Generate):  # a CANCEL or a repeated round may need no answer
            assert after or self.submitted + self.preparing > acted, message
        return before + after


class Device:
    """One connection of a storm, remade when it is used up, and what its user knows of the streams."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.connection = front.connect()
        self.settled: dict[int, tuple[int, int]] = {}  # by stream: last seq and committed tokens
        self.opened: dict[int, int] = {}  # by stream: the OPEN's seq

    def note(self, sent: ClientMessage | None, replies: list[Any]) -> None:
        if isinstance(sent, Open):
            self.opened[sent.stream] = sent.seq
        for reply in replies:
            match reply:
                case Opened() if reply.stream in self.opened:
                    self.settled[reply.stream] = (self.opened[reply.stream], reply.committed)
                case Verdict():
                    self.settled[reply.stream] = (reply.seq, reply.base_len + len(reply.accepted) + 1)
                case Error() if reply.code == ERR_UNKNOWN:
                    self.settled.pop(reply.stream, None)  # another device has the session now

    def remake(self, *, greet: bool) -> None:
        self.connection.lost()
        self.connection = self.front.connect(greet=greet)
        self.settled, self.opened = {}, {}


def storm(verifier: Verifier, frames: int, seed: int, tick: Callable[[Report], None] = lambda _: None) -> Report:
    """Send mutated frames to a started verifier, checking after each. tick: called every thousand frames."""
    rng, report = random.Random(seed), Report()
    mutator, front = Mutator(rng), Front(verifier)
    devices = [Device(front) for _ in range(CONNECTIONS)]
    begun, baseline, paused = time.perf_counter(), 0, 0

    for count in range(frames):
        device = rng.choice(devices)
        mutator.settled, mutator.greeted = device.settled, device.connection.greeted
        frame = mutator.frame()
        message = check_decoders(frame, rng.choice(NODES))
        report.understood += message is not None
        sent = time.perf_counter()
        replies = front.receive(device.connection, frame, message)
        report.slowest = max(report.slowest, time.perf_counter() - sent)
        device.note(message, replies)
        for reply in replies:
            name = f"ERROR {reply.code}" if isinstance(reply, Error) else type(reply).__name__.upper()
            report.replies[name] += 1
        if front.submitted >= paused + PAUSE_EVERY:
            assert until(lambda: verifier.idle or not verifier.alive) and verifier.alive, "the engine thread hangs"
            paused = front.submitted
        front.deliver()
        if device.connection.closing is not None or device.connection.backlogged:
            device.remake(greet=rng.random() < 0.5)  # a closed socket, or a device that hangs up because nobody answers
            report.hung_up += 1
        if count == frames // 4:
            baseline = psutil.Process().memory_info().rss
        report.frames = count + 1
        report.seconds = time.perf_counter() - begun
        if report.frames % 1000 == 0:
            tick(report)

    report.growth = psutil.Process().memory_info().rss - baseline
    report.submitted = front.submitted
    for device in devices:
        device.connection.lost()
    assert not front.streams, "sessions are still bound to lost connections"
    assert verifier.alive
    assert not report.replies[f"ERROR {ERR_INTERNAL}"], report
    return report


def written(verifier: Verifier, prompt: list[int], guess: list[int], new: int) -> list[int]:
    """The text a fresh connection gets: one VERIFY of `guess`, then GENERATE up to `new` tokens."""
    front = Front(verifier)
    connection = front.connect()

    def wait(kind: type[Any]) -> Any:
        end = time.monotonic() + HANG
        while time.monotonic() < end:
            front.deliver()
            for message in front.answers(connection):
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, Error), message
            time.sleep(0.001)
        raise AssertionError(f"no {kind.__name__} came")

    connection.receive(encode(Open(0, b"after the storm.", 0, pack_ids(prompt), 1 << 20, Sampling())))
    wait(Opened)
    connection.receive(encode(Verify(0, 1, len(prompt), *pack_tree(TokenTree.chain(guess)))))
    verdict: Verdict = wait(Verdict)
    text = [guess[node] for node in verdict.accepted] + [verdict.bonus]
    while len(text) < new:
        connection.receive(encode(Generate(0, verdict.seq + 1, len(prompt) + len(text), 1)))
        verdict = wait(Verdict)
        text.append(verdict.bonus)
    connection.receive(encode(Close(0)))
    connection.lost()
    return text


def run(frames: int, seed: int, tick: Callable[[Report], None] = lambda _: None) -> Report:
    """A storm on a verifier of its own, which must write the right text afterwards."""
    model = tiny_model("llama", seed=4, vocab=VOCAB)
    truth = plain_decode(model, PROMPT, Sampling(), 8, eos_ids=())
    verifier = make_verifier(model, (), max_sessions=8, kv_tokens=512)
    verifier.start()
    try:
        report = storm(verifier, frames, seed, tick)
        text = written(verifier, PROMPT, truth[:3], len(truth))
        assert text == truth, (text, truth)
    finally:
        verifier.stop()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=40_000, help="mutated frames to send")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", action="store_true", help="guided by coverage, with atheris")
    parser.add_argument("--seconds", type=int, default=60, help="time of --coverage")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))  # errors only

    def tick(report: Report) -> None:
        if report.frames % (-(-arguments.frames // 100_000) * 1000) == 0 and sys.stderr.isatty():
            print(f"\r{report.frames:,} frames, {report.seconds:.0f} s", end="", file=sys.stderr, flush=True)

    if arguments.coverage:
        from tests.fuzz_coverage import explore

        explore(arguments.seconds, arguments.seed)
    else:
        report = run(arguments.frames, arguments.seed, tick)
        print(f"\n{report}\nthe verifier writes the right text")


if __name__ == "__main__":
    main()
