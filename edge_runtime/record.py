"""An answer on its way, as JSON that outlives the process."""

from __future__ import annotations

from typing import Any

import msgspec

from edge_runtime.session import Session
from edge_runtime.states import Writer

VERSION = 2


def record_of(session: Session) -> dict[str, Any]:
    """What `restore` needs to go on with the session's answer."""
    return {
        "version": VERSION,
        "prompt": list(session.prompt),
        "committed": session.committed[len(session.prompt) :],
        "provisional": list(session.provisional),
        "writers": [[span.begin, span.end, span.writer] for span in session.text.spans],
        "sampling": msgspec.structs.asdict(session.sampling),
        "max_new": session.max_new,
        "seq": session.requests.seq,
        "stream": session.stream,
        "session": session.session_id.hex(),
    }


def restore(session: Session, record: dict[str, Any]) -> None:
    """Take up a recorded answer in a session that was made with its prompt and settings and has not started.

    Raises ValueError on a record of another version, KeyError or TypeError where a field is missing or wrong.
    """
    if record["version"] != VERSION:
        raise ValueError(f"it has version {record['version']}, and this program reads version {VERSION}")
    session.text.committed += record["committed"]
    session.text.provisional = list(record["provisional"])
    session.text.writers = [Writer(writer) for begin, end, writer in record["writers"] for _ in range(begin, end)]
    if len(session.text.writers) != len(session.text.answer):
        raise ValueError("it does not say of every token who wrote it")
    session.requests.seq = record["seq"]
