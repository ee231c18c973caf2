"""An answer in progress, as JSON that outlives the process."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from edge_runtime.arguments import checked_sampling, checked_stops
from edge_runtime.session.session import Session
from edge_runtime.session.states import Writer
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.wire import Arithmetic, Seq, Stream

VERSION = 1

Token = Annotated[int, Meta(ge=0)]


class _Record(Struct, kw_only=True):
    """The JSON of `record_of`. writers: begin, end and writer of runs of the answer's tokens.

    arithmetic: of the verified ones; "" if unknown. constraint: hexadecimal; "" for none.
    """

    prompt: Annotated[list[Token], Meta(min_length=1)]
    committed: list[Token]
    provisional: list[Token]
    writers: list[tuple[int, int, Writer]]
    sampling: dict[str, float]
    max_new: Annotated[int, Meta(ge=1)]
    seq: Seq
    stream: Stream
    session: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    constraint: Annotated[str, Meta(pattern="^[0-9a-f]*$")]
    arithmetic: Arithmetic


def record_of(session: Session) -> dict[str, Any]:
    """Return the data that `restore` needs to continue the session's answer."""
    constraint = session.constraint
    return {
        "version": VERSION,
        "prompt": list(session.prompt),
        "committed": session.committed[len(session.prompt) :],
        "provisional": list(session.provisional),
        "writers": [[span.begin, span.end, span.writer] for span in session.text.spans],
        "sampling": msgspec.structs.asdict(session.sampling),
        "max_new": session.max_new,
        "seq": session.verifier.seq,
        "stream": session.stream,
        "session": session.session_id.hex(),
        "constraint": msgspec.msgpack.encode(constraint).hex() if constraint else "",
        "arithmetic": session.verifier.pinned,
    }


def read_record(record: dict[str, Any], target: str, vocab_size: int) -> list[str]:
    """Return the stop strings in a record of an answer by the target with that hash.

    Raises ValueError on anything else.
    """
    try:
        if record["target"] != target:
            raise ValueError("it is of another target than this bundle's; ask the question again")
        check_record(record, vocab_size)
        return checked_stops(record["stop"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a record of an answer of this bundle: {error}") from None


def check_record(record: dict[str, Any], vocab_size: int) -> None:
    """Raise ValueError on anything but a record of this version whose tokens are ids below `vocab_size`.

    KeyError and TypeError if it is not even a JSON object with a version, or its sampling has other names.
    """
    if record["version"] != VERSION:
        raise ValueError(f"it has version {record['version']}, and this program reads version {VERSION}")
    try:
        read = msgspec.convert(record, _Record)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    checked_sampling(**record["sampling"])
    constraint = constraint_of(record)
    if constraint and max(constraint.bias, default=0) >= vocab_size:
        raise ValueError(f"token ids must be below {vocab_size}")
    answer, told = read.committed + read.provisional, 0
    if max(read.prompt + answer) >= vocab_size:
        raise ValueError(f"token ids must be below {vocab_size}")
    for begin, end, _ in read.writers:
        if begin != told or end <= begin:
            break
        told = end
    if told != len(answer):
        raise ValueError("it does not name the writer of every token")


def constraint_of(record: dict[str, Any]) -> Constraint | None:
    """Return the recorded answer's constraint. Raises ValueError if it is damaged."""
    text = record["constraint"]
    try:
        return msgspec.msgpack.decode(bytes.fromhex(text), type=Constraint) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"its constraint is damaged: {error}") from None


def restore(session: Session, record: dict[str, Any]) -> None:
    """Restore a recorded answer, which passed `check_record`, in a session with its prompt and settings.

    The session must not have started.
    """
    session.text.committed += record["committed"]
    session.text.provisional = list(record["provisional"])
    session.text.writers = [Writer(writer) for begin, end, writer in record["writers"] for _ in range(begin, end)]
    session.verifier.seq = record["seq"]
    session.verifier.pinned = record["arithmetic"]
