"""Frames: round trips, sizes, tolerance to other versions, bounds, and any bytes at all."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_core.protocol.constraint import (
    GRAMMAR_JSON_OBJECT,
    GRAMMAR_JSON_SCHEMA,
    GRAMMAR_TOOLS,
    MAX_SCHEMA,
    Constraint,
    pack_bias,
)
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree
from outrider_core.protocol.wire import (
    MAX_CLIENT_FRAME,
    MAX_TOKENS,
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
    ServerMessage,
    Verdict,
    Verify,
    Welcome,
    WireError,
    bucket,
    decode_client,
    decode_server,
    encode,
    pack_ids,
    pack_tree,
    unpack_ids,
    unpack_tree,
)
from tests.protocol.make_vectors import (
    ENDINGS_FILE,
    FRAMES_FILE,
    ending_vectors,
    fields_of,
    frame_vectors,
    golden_messages,
    message_of,
)

Message = ClientMessage | ServerMessage

stream, count, seq = (st.integers(0, high - 1) for high in (2**16, 2**31, 2**32))
text64, text128, text512 = (st.text(max_size=size) for size in (64, 128, 512))
arithmetic = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=64)
blob = st.binary(max_size=300)
sampling = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)
bias = st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32), max_size=5).map(pack_bias)
grammar = st.sampled_from([(0, ""), (GRAMMAR_JSON_OBJECT, "")]) | st.text(min_size=1, max_size=40).map(
    lambda schema: (GRAMMAR_TOOLS if len(schema) % 2 else GRAMMAR_JSON_SCHEMA, schema)
)
constraint = st.builds(
    lambda begin, frequency, presence, biases, rest: Constraint(begin, frequency, presence, *biases, *rest),
    count, st.floats(-2, 2), st.floats(-2, 2), bias, grammar,
)  # fmt: skip
session_id = st.binary(min_size=16, max_size=16)
CLIENT = [
    st.builds(Hello, st.integers(1, 2**16 - 1), text64, text64, text128, arithmetic),
    st.builds(
        Open,
        stream,
        session_id,
        seq,
        st.lists(st.integers(0, 2**32 - 1)).map(pack_ids),
        count,
        sampling,
        st.none() | constraint,
    ),
    st.builds(Verify, stream, seq, count, st.binary(max_size=4 * MAX_NODES), st.binary(max_size=MAX_NODES)),
    st.builds(Generate, stream, seq, count, st.integers(1, MAX_TOKENS - 1)),
    st.builds(Cancel, stream),
    st.builds(Close, stream),
]
SERVER = [
    st.builds(
        lambda told, *fields: Welcome(*fields, *told),
        st.tuples(st.integers(0, 9_999), count),
        st.integers(0, 2**63),
        text64,
        text64,
        count,
        count,
        count,
        count,
        text128,
        blob,
        count,
        arithmetic,
    ),
    st.builds(Opened, stream, count, count),
    st.builds(Features, stream, count, blob),
    st.builds(
        Verdict, stream, seq, count, st.binary(max_size=MAX_NODES), count, st.integers(0, 15), blob, count, count, count
    ),
    st.builds(Resync, stream, count),
    st.builds(Error, st.integers(0, 255), text512, st.integers(-1, 2**16 - 1), count),
]


def raw(message: Message) -> list[Any]:
    """The message's array, `[type, fields...]`."""
    values: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return values


def framed(values: Any) -> bytes:
    """A frame of any MessagePack value, without the checks of the message types."""
    return msgspec.msgpack.encode(values) + b"\x80"


def decoder_of(message: Message) -> Callable[[bytes], Message]:
    return decode_client if isinstance(message, get_args(ClientMessage)) else decode_server


def test_every_message_type_is_generated() -> None:
    names = {type(message).__name__ for message in golden_messages().values()}
    assert names == {kind.__name__ for kind in (*get_args(ClientMessage), *get_args(ServerMessage))}
    assert len(CLIENT) == len(get_args(ClientMessage)) and len(SERVER) == len(get_args(ServerMessage))


@given(st.one_of(CLIENT))
def test_client_round_trip(message: ClientMessage) -> None:
    assert decode_client(encode(message)) == message


@given(st.one_of(SERVER))
def test_server_round_trip(message: ServerMessage) -> None:
    assert decode_server(encode(message)) == message


@given(st.one_of(CLIENT))
def test_server_decoder_refuses_client_messages(message: ClientMessage) -> None:
    with pytest.raises(WireError):
        decode_server(encode(message))


@given(st.one_of(SERVER))
def test_client_decoder_refuses_server_messages(message: ServerMessage) -> None:
    with pytest.raises(WireError):
        decode_client(encode(message))


def test_close_byte_for_byte() -> None:
    assert encode(Close(5)) == b"\x92\x0b\x05\x80" + bytes(60)


# sizes


@pytest.mark.parametrize(("number", "length"), [(0, 0), (1, 100), (2**32 - 1, 2**31 - 1)])
def test_verify_of_64_nodes_takes_at_most_400_bytes_on_the_wire(number: int, length: int) -> None:
    tokens, parents = pack_tree(TokenTree(tuple(range(151_000, 151_064)), (ROOT, *range(63))))
    frame = encode(Verify(2**16 - 1, number, length, tokens, parents))
    websocket = 8  # 2 bytes, 2 of extended length for 126..65535, 4 of mask
    assert 126 <= len(frame) <= 65535
    assert len(frame) + websocket <= 400


def test_a_full_prompt_fits_the_largest_client_frame() -> None:
    frame = encode(Open(0, bytes(16), 0, bytes(4 * MAX_TOKENS), 0, Sampling()))
    assert len(frame) <= MAX_CLIENT_FRAME


@given(st.one_of(CLIENT + SERVER))
def test_frame_length_is_a_bucket(message: Message) -> None:
    size = len(encode(message))
    assert size == bucket(size)


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 1536), (1536, 1536), (1537, 2048)]
)
def test_bucket_steps(size: int, expected: int) -> None:
    assert bucket(size) == expected


@given(st.integers(1, 40), st.integers(1, 40))
def test_prompts_of_similar_length_have_one_frame_size(first: int, second: int) -> None:
    sizes = {len(encode(Open(0, bytes(16), 0, bytes(4 * (400 + n)), 0, Sampling()))) for n in (first, second)}
    assert max(sizes) - min(sizes) in (0, 512)


# other versions

WITH_DEFAULTS = [
    (Hello(1, "t", "d"), 2),
    (Welcome(1, "t", "d", 5, 6, 7, 8), 6),
    (Open(1, bytes(16), 2, b"", 3, Sampling()), 1),
    (Verdict(1, 2, 3, b"", 4, 0, b"rows"), 3),
    (Generate(1, 2, 3, 4), 1),
    (Error(1, "text"), 2),
]


@pytest.mark.parametrize(("message", "defaults"), WITH_DEFAULTS)
def test_older_message_without_trailing_fields(message: Message, defaults: int) -> None:
    assert decoder_of(message)(framed(raw(message)[:-defaults])) == message


@pytest.mark.parametrize(("message", "defaults"), WITH_DEFAULTS)
def test_message_without_a_required_field_is_refused(message: Message, defaults: int) -> None:
    with pytest.raises(WireError):
        decoder_of(message)(framed(raw(message)[: -defaults - 1]))


@pytest.mark.parametrize("message", golden_messages().values(), ids=golden_messages())
@pytest.mark.parametrize("extra", [7, b"bytes", "text", [1, [2, {"a": None}]]], ids=["int", "bin", "str", "nested"])
def test_newer_message_with_an_unknown_field(message: Message, extra: Any) -> None:
    assert decoder_of(message)(framed([*raw(message), extra])) == message


def test_older_and_newer_sampling_inside_open() -> None:
    values = raw(Open(1, bytes(16), 2, b"", 3, Sampling(0.5, 7)))
    for sampling_fields in ([0.5, 7], [0.5, 7, 1.0, 0.0, 0, "newer"]):
        message = decode_client(framed([*values[:-2], sampling_fields]))
        assert isinstance(message, Open) and message.sampling == Sampling(0.5, 7)


# bounds

HELLO, WELCOME = [1, 1, "t", "d", "c", "a"], [2, 1, "t", "d", 1, 1, 1, 1, "s", b"", 0, "a", 100, 5]
OPEN = [3, 1, bytes(16), 0, b"", 0, [0.5, 1, 0.9, 0.1, 3]]
CONSTRAINED = [*OPEN, [0, 0.5, -0.5, bytes(4), bytes(4), 2, "{}"]]
VERIFY, VERDICT = [6, 1, 2, 3, b"", b""], [7, 1, 2, 3, b"", 4, 0, b"", 1, 1, 1]
NAN, INF = float("nan"), float("inf")
#: what would break a line of a log, or say something to a terminal
BAD_ARITHMETIC = ["x" * 65, "onnx\n", "\x1b[2J", "größer", "\0", "\x7f", b"onnx", 8, None]
OUT_OF_BOUNDS = [
    (HELLO, {1: 0}), (HELLO, {1: 2**16}), (HELLO, {2: "x" * 65}), (HELLO, {3: "x" * 65}), (HELLO, {4: "x" * 129}),
    (WELCOME, {4: -1}), (WELCOME, {5: 2**31}), (WELCOME, {6: -1}), (WELCOME, {7: 2**31}), (WELCOME, {8: "x" * 129}),
    *((HELLO, {5: text}) for text in BAD_ARITHMETIC), *((WELCOME, {11: text}) for text in BAD_ARITHMETIC),
    (WELCOME, {12: -1}), (WELCOME, {12: 10_000}), (WELCOME, {12: 1.5}), (WELCOME, {12: None}),
    (WELCOME, {13: -1}), (WELCOME, {13: 2**31}), (WELCOME, {13: "5"}),
    (OPEN, {1: -1}), (OPEN, {1: 2**16}), (OPEN, {2: bytes(15)}), (OPEN, {2: bytes(17)}), (OPEN, {2: b""}),
    (OPEN, {3: -1}), (OPEN, {3: 2**32}), (OPEN, {4: bytes(4 * MAX_TOKENS + 1)}), (OPEN, {5: -1}), (OPEN, {5: 2**31}),
    (OPEN, {6: [NAN]}), (OPEN, {6: [INF]}), (OPEN, {6: [-0.1]}), (OPEN, {6: [100.5]}), (OPEN, {6: ["1"]}),
    (OPEN, {6: [1.0, -1]}), (OPEN, {6: [1.0, 2**32]}), (OPEN, {6: [1.0, 1.5]}),
    (OPEN, {6: [1.0, 0, 0.0]}), (OPEN, {6: [1.0, 0, 1.1]}), (OPEN, {6: [1.0, 0, NAN]}), (OPEN, {6: [1.0, 0, -INF]}),
    (OPEN, {6: [1.0, 0, 1.0, -0.1]}), (OPEN, {6: [1.0, 0, 1.0, 1.1]}), (OPEN, {6: [1.0, 0, 1.0, NAN]}),
    (CONSTRAINED, {7: [-1]}), (CONSTRAINED, {7: []}), (CONSTRAINED, {7: [0, 2.5]}), (CONSTRAINED, {7: [0, 0, NAN]}),
    (CONSTRAINED, {7: [0, 0, 0, bytes(4)]}), (CONSTRAINED, {7: [0, 0, 0, b"", b"", 3]}), (CONSTRAINED, {7: 1}),
    (CONSTRAINED, {7: [0, 0, 0, b"", b"", 2, "x" * (MAX_SCHEMA + 1)]}),
    (OPEN, {6: [1.0, 0, 1.0, 0.0, -1]}), (OPEN, {6: [1.0, 0, 1.0, 0.0, 2**63]}), (OPEN, {6: None}),
    (VERIFY, {1: 2**16}), (VERIFY, {2: 2**32}), (VERIFY, {3: -1}), (VERIFY, {4: bytes(4 * MAX_NODES + 1)}),
    (VERIFY, {5: bytes(MAX_NODES + 1)}), (VERIFY, {4: "text"}), (VERIFY, {1: 1.5}), (VERIFY, {1: None}),
    (VERDICT, {1: -1}), (VERDICT, {3: 2**31}), (VERDICT, {4: bytes(MAX_NODES + 1)}), (VERDICT, {5: -1}),
    (VERDICT, {6: 16}), (VERDICT, {6: -1}), (VERDICT, {8: -1}), (VERDICT, {9: 2**31}), (VERDICT, {10: -1}),
    ([4, 1, 1, 1], {3: -1}), ([5, 1, 1, b""], {2: 2**31}), ([8, 1, 1], {2: -1}),
    ([9, 1, 1, 1, 1], {4: 0}), ([9, 1, 1, 1, 1], {4: MAX_TOKENS}), ([10, 1], {1: -1}), ([11, 1], {1: 2**16}),
    ([12, 1, "t", -1, 0], {1: 256}), ([12, 1, "t", -1, 0], {2: "x" * 513}), ([12, 1, "t", -1, 0], {3: -2}),
    ([12, 1, "t", -1, 0], {4: -1}), ([11, 1], {0: 0}), ([11, 1], {0: 13}), ([11, 1], {0: "11"}),
]  # fmt: skip


def decode_any(values: list[Any]) -> Message:
    return (decode_client if values[0] in (1, 3, 6, 9, 10, 11) else decode_server)(framed(values))


@pytest.mark.parametrize(("values", "change"), OUT_OF_BOUNDS)
def test_field_out_of_bounds_is_refused(values: list[Any], change: dict[int, Any]) -> None:
    decode_any(values)  # what the change is applied to is valid
    changed = [change.get(i, value) for i, value in enumerate(values)]
    with pytest.raises(WireError):
        decode_any(changed)


@pytest.mark.parametrize("frame", [b"", b"\x00" * 64, b"\x92\x0b\x05", b"\x92\x0b\x05" + bytes(61), b"\x80"])
def test_frame_with_broken_padding_is_refused(frame: bytes) -> None:
    for decode in (decode_client, decode_server):
        with pytest.raises(WireError):
            decode(frame)


# any bytes


def hostile() -> list[bytes]:
    """Frames that claim lengths they do not have, or nest without end."""
    nested = [b"\x93\x0b\x01" + opener * 300_000 for opener in (b"\x91", b"\x81\xa1a", b"\xdc\x00\x01")]
    claims = [b"\xc6", b"\xdb", b"\xdd", b"\xdf", b"\xc9"]  # bin, str, array, map, ext with 32-bit lengths
    first = [claim + b"\xff\xff\xff\xff" + b"\x0b\x01" for claim in claims]
    inside = [b"\x93\x0b\x01" + claim + b"\xff\xff\xff\xff\x01" for claim in claims]
    ids = [b"\x97\x03\x01\xc4\x10" + bytes(16) + b"\x00\xc6\xff\xff\xff\xf0" + bytes(64)]
    return [data + b"\x80" for data in [*nested, *first, *inside, *ids]]


def mutate(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(5):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[rng.randrange(len(data))] = rng.choice((0x00, 0x80, 0xC1, 0xC6, 0xDB, 0xDD, 0xDF, 0xFF))
            case 2:
                at = rng.randint(0, len(data))
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                del data[rng.randint(0, len(data)) :]
                data += b"\x80"  # so that the message behind the padding is what is broken
            case 4:
                data = bytearray(rng.randbytes(rng.randint(0, 80)) + rng.choice((b"", b"\x80")))
    return bytes(data)


def test_mutated_frames_raise_wire_error_or_decode_in_flat_memory() -> None:
    rng = random.Random(20)
    frames = [encode(message) for message in golden_messages().values()]
    mutated = [mutate(rng, rng.choice(frames)) for _ in range(12_000)] + hostile()
    refused = {decode_client: 0, decode_server: 0}
    tracemalloc.start()
    for frame in mutated:
        for decode in (decode_client, decode_server):
            try:
                decode(frame)
            except WireError:
                refused[decode] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # most are broken, and some of the others decode: the mutations reach past the padding
    assert all(len(mutated) / 2 < n < len(mutated) - 100 for n in refused.values()), refused
    assert peak < 4 * 300_000 + 500_000  # a few copies of the largest frame, whatever lengths are claimed


@pytest.mark.parametrize("frame", hostile(), ids=range(len(hostile())))
def test_hostile_frame_is_refused(frame: bytes) -> None:
    for decode in (decode_client, decode_server):
        with pytest.raises(WireError):
            decode(frame)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_wire_error(data: bytes) -> None:
    for decode in (decode_client, decode_server):
        try:
            message = decode(data + b"\x80")
        except WireError:
            continue
        assert isinstance(message, get_args(Message))


# ids and trees


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_round_trip(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4097])
def test_ids_of_a_broken_length_are_refused(length: int) -> None:
    with pytest.raises(WireError):
        unpack_ids(bytes(length))


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        (pack_ids([1, 2]), bytes([255])),
        (pack_ids([1]), bytes([0])),
        (pack_ids([1, 2]), bytes([255, 1])),
        (pack_ids([1, 1]), bytes([255, 255])),
        (pack_ids([1, 2]), bytes([1, 255])),
        (b"\x01\x00\x00", bytes([255])),
        (bytes(1024), bytes(range(256))),
    ],
    ids=["lengths", "own parent", "later parent", "twin", "cycle", "broken ids", "too many"],
)
def test_vectors_that_are_no_tree_are_refused(tokens: bytes, parents: bytes) -> None:
    with pytest.raises(WireError):
        unpack_tree(tokens, parents)


# vectors


def test_golden_frames_are_current() -> None:
    assert json.loads(FRAMES_FILE.read_text(encoding="utf-8")) == frame_vectors()


def test_golden_endings_are_current() -> None:
    assert json.loads(ENDINGS_FILE.read_text(encoding="utf-8")) == ending_vectors()


@pytest.mark.parametrize("row", json.loads(FRAMES_FILE.read_text(encoding="utf-8")), ids=lambda row: row["name"])
def test_golden_frame(row: dict[str, Any]) -> None:
    frame, message = bytes.fromhex(row["hex"]), message_of(row["fields"])
    assert encode(message) == frame
    assert fields_of(decoder_of(message)(frame)) == row["fields"]
