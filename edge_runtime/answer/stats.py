"""Collects the figures of one answer while it grows."""

from __future__ import annotations

import time

from edge_runtime.events import AnswerStats
from edge_runtime.link.transport import VerifierLink
from edge_runtime.session.session import Session

#: what a session counts itself
COUNTED = (
    "rounds",
    "nodes",
    "chains",
    "calls",
    "streamed",
    "wait_seconds",
    "engine_seconds",
    "ahead_rounds",
    "ahead_hits",
    "ahead_used",
    "provisional",
    "understudy",
    "kept",
    "rolled_back",
    "adopted",
    "stalls",
    "pauses",
    "opens",
)


class Figures:
    """Times and bytes of one answer, and at its end all of its figures."""

    def __init__(self, session: Session, link: VerifierLink | None) -> None:
        self._session, self._link = session, link
        self._began = time.monotonic()
        self._up, self._down = (link.traffic.up, link.traffic.down) if link else (0, 0)
        self._stalled_at: float | None = None
        self._stats = AnswerStats()

    def committed(self) -> None:
        """The target's tokens are there."""
        if not self._stats.first_token_seconds:
            self._stats.first_token_seconds = time.monotonic() - self._began

    def drafted(self, seconds: float) -> None:
        """A tree or a token came `seconds` after it was asked for."""
        self._stats.first_draft_seconds = self._stats.first_draft_seconds or seconds
        self._stats.draft_seconds += seconds

    def drafted_ahead(self, nodes: int, seconds: float) -> None:
        """`nodes` were expanded while a verdict was awaited."""
        self._stats.ahead_nodes += nodes
        self._stats.ahead_seconds += seconds

    def stalled(self, due: float) -> None:
        """A verdict that was due at `due` did not come."""
        self._stalled_at = due

    def wrote(self) -> None:
        """A provisional token is shown."""
        if self._stalled_at is not None:
            self._stats.stall_seconds.append(time.monotonic() - self._stalled_at)
        self._stalled_at = None

    def resumed(self) -> None:
        """The target answers again."""
        self._stalled_at = None

    def end(self) -> AnswerStats:
        """All figures, when the answer has ended."""
        session, stats = self._session, self._stats
        for name in COUNTED:
            setattr(stats, name, getattr(session.stats, name))
        stats.tokens = len(session.committed) - len(session.prompt) - stats.adopted
        stats.tau = (session.stats.accepted + stats.rounds) / stats.rounds if stats.rounds else 0.0
        stats.seconds = time.monotonic() - self._began
        stats.tokens_per_second = stats.tokens / stats.seconds
        if self._link:
            stats.bytes_up = self._link.traffic.up - self._up
            stats.bytes_down = self._link.traffic.down - self._down
        return stats
