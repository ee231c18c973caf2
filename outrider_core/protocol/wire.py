"""Messages between device and verifier: binary WebSocket messages, subprotocol `outrider.v1`.

A message is a MessagePack array `[type, fields...]`; vectors are one little-endian `bin`. Fields are only
ever appended, with defaults; type numbers are never reused. Every bound that does not depend on the model is
checked while decoding. A frame is the message, one byte 0x80, then zeros up to the next size bucket
(ISO/IEC 7816-4 padding), so that frame sizes do not fingerprint prompts.

One session lives on one `stream` (a small number the client picks per connection). The committed sequence
is prompt plus verified tokens; its last token, the *root*, has no key/value rows on the server yet.

    device                                verifier
    HELLO  ------------------------------>
           <------------------------------ WELCOME | ERROR (hashes or arithmetic differ)
    OPEN (token ids, rows it has) -------->
           <------------------------------ OPENED, then FEATURES... (rows the device lacks)
    VERIFY seq (tree) -------------------->
           <------------------------------ VERDICT seq (path, bonus token, rows) | RESYNC | ERROR
    CLOSE -------------------------------->

The device may send VERIFY right after OPEN. A VERIFY repeated with the same seq gets the same bytes back.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.costs import MAX_POINTS
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree, TreeError

SUBPROTOCOL = "outrider.v1"
PROTOCOL_VERSION = 1
#: largest frame the verifier accepts: a 128k-token prompt is 512 KiB
MAX_CLIENT_FRAME = 1 << 20
#: largest frame the device accepts
MAX_SERVER_FRAME = 1 << 20
#: feature rows of one FEATURES message hold at most this many bytes
FEATURE_CHUNK = 60 * 1024

MAX_TOKENS = 1 << 17
STREAMS = 1 << 16

Stream = Annotated[int, Meta(ge=0, lt=STREAMS)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Seq = Annotated[int, Meta(ge=0, lt=2**32)]
Hash = Annotated[str, Meta(max_length=64)]
#: a verifier's arithmetic, such as "torch-float32": printable ASCII; "": unknown
Arithmetic = Annotated[str, Meta(max_length=64, pattern=r"^[ -~]*\Z")]
Ids = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
#: tokens of a step, in hundredths
Hundredths = Annotated[int, Meta(ge=0, lt=10_000)]


class WireError(ValueError):
    """A frame that cannot be understood: truncated, out of range, wrong type, broken padding."""


class _Message(Struct, array_like=True, frozen=True):
    pass


class Hello(_Message, tag=1, frozen=True):
    protocol: Annotated[int, Meta(ge=1, lt=1 << 16)]
    target_hash: Hash  # outrider_core.models.target.Target.model_hash in the bundle
    drafter_hash: Hash
    client: Annotated[str, Meta(max_length=128)] = ""
    arithmetic: Arithmetic = ""  # of the answer's beginning; only a verifier with the same one may continue it


class Welcome(_Message, tag=2, frozen=True):
    protocol: int
    target_hash: Hash
    drafter_hash: Hash
    vocab_size: Count
    max_context: Count  # committed + drafted tokens
    max_nodes: Count  # of one tree
    tree_budget: Count  # nodes that the server would like a tree to have at most, now
    server: Annotated[str, Meta(max_length=128)] = ""
    costs: Annotated[bytes, Meta(max_length=8 * MAX_POINTS)] = b""  # outrider_core.protocol.costs, if known
    constraints: Count = 0  # those it supports: constraint.OBEYS_*; it ignores unsupported ones in an OPEN
    arithmetic: Arithmetic = ""
    stream_tokens: Hundredths = 0  # that a step of its streams brought lately; 0: unknown
    queue_us: Count = 0  # time that a round lately waited for the engine; 0: none, or unknown

    def computes_in(self, arithmetic: str) -> bool:
        """Return whether it may continue an answer begun in `arithmetic`: yes if one of the two is unknown."""
        return not arithmetic or self.arithmetic in ("", arithmetic)


def other_arithmetic(begun: str, here: str) -> str:
    """Say why a verifier that computes in `here` may not continue an answer begun in `begun`."""
    return (
        f"the answer was begun in {begun} arithmetic, and this verifier computes in {here}; "
        "another one at this address may continue it"
    )


class Open(_Message, tag=3, frozen=True):
    """Begin or resume: the verifier needs nothing else to take a session over from another replica."""

    stream: Stream
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]  # random, chosen by the device
    seq: Seq  # the last VERIFY that is settled for the device
    tokens: Ids  # uint32 token ids, prompt and committed
    features_have: Count  # rows 0..features_have-1 need not be sent
    sampling: Sampling
    constraint: Constraint | None = None  # only if the verifier supports it


class Opened(_Message, tag=4, frozen=True):
    stream: Stream
    committed: Count
    cached: Count  # rows of key/value found alive (0 after a restart or an eviction)


class Features(_Message, tag=5, frozen=True):
    stream: Stream
    start: Count  # position of the first row
    rows: bytes  # outrider_core.protocol.rows; newest rows are sent first


class Verify(_Message, tag=6, frozen=True):
    stream: Stream
    seq: Seq
    base_len: Count  # committed tokens above the tree
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_NODES)]  # uint32 per node
    parents: Annotated[bytes, Meta(max_length=MAX_NODES)]  # uint8 per node, 255 = root


class Verdict(_Message, tag=7, frozen=True):
    stream: Stream
    seq: Seq
    base_len: Count  # committed tokens before this verdict
    accepted: Annotated[bytes, Meta(max_length=MAX_NODES)]  # node numbers of the accepted path
    bonus: Count  # the target's own next token
    finish: Annotated[int, Meta(ge=0, lt=16)]  # FINISH_*
    rows: bytes  # rows up to position base_len-1+len(accepted), from base_len-1 or, if some were not sent, earlier
    tree_budget: Count = 0
    queue_us: Count = 0  # time the round waited for the engine
    engine_us: Count = 0  # time of the engine; both are 0 if the same step made the VERDICT before


FINISH_NONE, FINISH_EOS, FINISH_LENGTH = 0, 1, 2


class Resync(_Message, tag=8, frozen=True):
    """The VERIFY was based on another length than the verifier's: OPEN again with the committed tokens."""

    stream: Stream
    committed: Count


class Generate(_Message, tag=9, frozen=True):
    """Let the target decode by itself: VERDICTs with empty paths, one per token (baseline, fallback)."""

    stream: Stream
    seq: Seq
    base_len: Count
    max_new: Annotated[int, Meta(ge=1, lt=MAX_TOKENS)]
    rows: bool = False  # with rows, some at a time, so that the device could draft again


class Cancel(_Message, tag=10, frozen=True):
    """Stop a GENERATE, or drop a waiting VERIFY. The session stays."""

    stream: Stream


class Close(_Message, tag=11, frozen=True):
    """The session is over; the verifier may forget it. (A lost socket is not a CLOSE.)"""

    stream: Stream


class Error(_Message, tag=12, frozen=True):
    code: Annotated[int, Meta(ge=0, lt=256)]  # ERR_*
    text: Annotated[str, Meta(max_length=512)]
    stream: Annotated[int, Meta(ge=-1, lt=STREAMS)] = -1  # -1: the connection
    retry_after_ms: Count = 0


ERR_MALFORMED = 1  # frame not understood; the connection stays open
ERR_MISMATCH = 2  # protocol, target, drafter, or the arithmetic that HELLO asks for differ; the connection is closed
ERR_BOUNDS = 3  # a field is out of the model's range
ERR_UNKNOWN = 4  # no such stream on this connection: OPEN first
ERR_ORDER = 5  # message out of order (before HELLO, a seq that was skipped, a second VERIFY in flight)
ERR_BUSY = 6  # no room now; retry after retry_after_ms
ERR_TOO_LONG = 7  # the context is full
ERR_INTERNAL = 8
ERR_GOING_AWAY = 9  # the verifier stops after what is in progress: OPEN elsewhere, or again after retry_after_ms

ClientMessage = Hello | Open | Verify | Generate | Cancel | Close
ServerMessage = Welcome | Opened | Features | Verdict | Resync | Error

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


def bucket(size: int) -> int:
    """Return the frame size that `size` bytes are padded to: steps of 64 up to 1 KiB, then of 512."""
    step = 64 if size <= 1024 else 512
    return -(-size // step) * step


def encode(message: ClientMessage | ServerMessage) -> bytes:
    """Encode a message as a padded frame."""
    data = _encoder.encode(message) + b"\x80"
    return data.ljust(bucket(len(data)), b"\0")


def _unpad(frame: bytes) -> bytes:
    data = frame.rstrip(b"\0")
    if not data.endswith(b"\x80"):
        raise WireError("frame without padding mark")
    return data[:-1]


def decode_client(frame: bytes) -> ClientMessage:
    """Decode what a device sent. Raises WireError and nothing else, whatever the bytes."""
    try:
        return _client_decoder.decode(_unpad(frame))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a client message: {error}") from None


def decode_server(frame: bytes) -> ServerMessage:
    """Decode what a verifier sent. Raises WireError and nothing else, whatever the bytes."""
    try:
        return _server_decoder.decode(_unpad(frame))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a server message: {error}") from None


def pack_ids(ids: list[int] | tuple[int, ...]) -> bytes:
    return np.asarray(ids, "<u4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Unpack uint32 ids. Raises WireError unless the length is a multiple of four."""
    if len(data) % 4:
        raise WireError(f"{len(data)} bytes are not uint32 ids")
    ids: list[int] = np.frombuffer(data, "<u4").tolist()
    return ids


def pack_tree(tree: TokenTree) -> tuple[bytes, bytes]:
    """Return (tokens, parents) as VERIFY carries them."""
    return pack_ids(tree.tokens), bytes(255 if parent == ROOT else parent for parent in tree.parents)


def unpack_tree(tokens: bytes, parents: bytes) -> TokenTree:
    """Invert `pack_tree`. Raises WireError on anything that is not a tree."""
    try:
        return TokenTree(tuple(unpack_ids(tokens)), tuple(ROOT if p == 255 else p for p in parents))
    except TreeError as error:
        raise WireError(f"not a valid tree: {error}") from None
