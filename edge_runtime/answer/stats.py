"""Collects the statistics of one answer while it grows."""

from __future__ import annotations

import time
from dataclasses import replace

from edge_runtime.events import AnswerStats
from edge_runtime.link.transport import VerifierLink
from edge_runtime.session.stats import SessionStats


class StatsRecorder:
    """Times and bytes of one answer, and at its end its complete statistics."""

    def __init__(self, link: VerifierLink | None) -> None:
        self._stats, self._link = AnswerStats(), link
        self._began = time.monotonic()
        self._up, self._down = (link.traffic.up, link.traffic.down) if link else (0, 0)
        self._stalled_at: float | None = None

    def committed(self) -> None:
        """Note tokens of the target."""
        if not self._stats.first_token_seconds:
            self._stats.first_token_seconds = time.monotonic() - self._began

    def drafted(self, seconds: float) -> None:
        """Note a tree or a token that came `seconds` after its request."""
        self._stats.first_draft_seconds = self._stats.first_draft_seconds or seconds
        self._stats.draft_seconds += seconds

    def drafted_ahead(self, nodes: int, seconds: float) -> None:
        """Note that `nodes` were expanded while a verdict was awaited."""
        self._stats.ahead_nodes += nodes
        self._stats.ahead_seconds += seconds

    def stalled(self, due: float) -> None:
        """Note a verdict that was due at `due` and did not come."""
        self._stalled_at = due

    def wrote(self) -> None:
        """Note that a provisional token is shown."""
        if self._stalled_at is not None:
            self._stats.stall_seconds.append(time.monotonic() - self._stalled_at)
        self._stalled_at = None

    def resumed(self) -> None:
        """Note that the target answers again."""
        self._stalled_at = None

    def end(self, counted: SessionStats, tokens: int) -> AnswerStats:
        """Return the statistics of the ended answer. counted: by its session. tokens: the target's and adopted ones."""
        stats = replace(self._stats, **vars(counted))
        stats.tokens = tokens - stats.adopted
        stats.tau = (stats.accepted + stats.rounds) / stats.rounds if stats.rounds else 0.0
        stats.seconds = time.monotonic() - self._began
        stats.tokens_per_second = stats.tokens / stats.seconds
        if self._link:
            stats.bytes_up = self._link.traffic.up - self._up
            stats.bytes_down = self._link.traffic.down - self._down
        return stats
