"""Frames that wait to be sent on one connection."""

from __future__ import annotations

from collections import deque

from cloud.engine.features import PackedRows
from outrider_core.protocol.wire import FEATURE_CHUNK, Features, ServerMessage, encode

#: while more frames than this wait for a slow reader, nothing is read from it
MAX_WAITING = 8


class Outbox:
    """Frames to send: messages first; feature rows, newest first, one chunk at a time when no message waits."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._features: dict[int, PackedRows] = {}  # per stream, rows still to be sent

    def put(self, message: ServerMessage) -> None:
        """Queue a message."""
        self._messages.append(encode(message))

    def put_features(self, stream: int, rows: PackedRows) -> None:
        """Queue rows, replacing those that the stream still has to send."""
        if len(rows):
            self._features[stream] = rows

    def forget_features(self, stream: int) -> None:
        """Drop the rows that the stream still has to send."""
        self._features.pop(stream, None)

    @property
    def crowded(self) -> bool:
        """Return whether the device reads too slowly."""
        return len(self._messages) > MAX_WAITING

    def next(self) -> bytes | None:
        """Return the next frame to send, or None."""
        if self._messages:
            return self._messages.popleft()
        if not self._features:
            return None
        stream = next(iter(self._features))
        rows = self._features.pop(stream)
        start = max(rows.start, rows.stop - FEATURE_CHUNK // rows.shape.nbytes)
        block = rows.block(start, rows.stop)
        rows.truncate(start)
        self.put_features(stream, rows)  # after the other streams'
        return encode(Features(stream, start, block))
