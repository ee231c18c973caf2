"""Shared prefixes: run the common beginning of an account's sessions once, and copy keys and values to the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence, Set
from functools import cache

from cloud.engine.kvpool import KVPool
from cloud.engine.sessions import LEAST_SHARED, SessionRecord, SessionStore
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.prefix import common_prefix

#: rows copied between two steps, all accounts together, as other sessions wait meanwhile; one prefix of each account
#: may be longer
COPIED_ROWS = 1024
_TOKEN_BYTES = array("I").itemsize


class Prefixes:
    """Copies keys and values to sessions from another session of their account with the same tokens.

    The copy equals what the session would have computed: keys and values depend on the tokens up to theirs alone.
    Nothing is ever written to another session's rows, and nothing is shared across accounts.
    """

    def __init__(self, pool: KVPool, store: SessionStore, metrics: Metrics) -> None:
        self._pool, self._store, self._metrics = pool, store, metrics

    def share(self, waiting: Sequence[SessionRecord], maskless: Set[SessionRecord] = frozenset()) -> set[SessionRecord]:
        """Copy to sessions that wait for a step, the oldest claim on the pool first.

        Returns the sessions that skip the next step: a session with an older claim computes what they lack, or enough
        was copied for now. The first of `waiting` that is not `maskless` is never among them. maskless: sessions that
        skip the step in any case.
        """
        held, running, later = set[bytes](), list[SessionRecord](), set[SessionRecord]()
        accounts = {session.account for session in waiting}
        room = dict.fromkeys(accounts, max(1, COPIED_ROWS // max(1, len(accounts))))
        packed, others = cache(_packed), cache(lambda account: list(self._store.of_account(account)))
        for session in waiting:
            held.add(session.id)
            if session in maskless:
                continue
            if any(self._runs_for(other, session, packed) for other in running):
                later.add(session)
                continue
            source, rows = self._source(session, others(session.account))
            if source is not None and room[session.account] <= 0:
                later.add(session)
                continue
            if source is not None:
                room[session.account] -= self._take(source, session, rows, held)
            if self._pool.used(session.id) < self._end(session):
                running.append(session)
        return later

    def _end(self, session: SessionRecord) -> int:
        """Return the number of tokens that must run before the root can."""
        return len(session.tokens) - 1

    def _runs_for(self, other: SessionRecord, session: SessionRecord, packed: Callable[[SessionRecord], bytes]) -> bool:
        """Return whether `other` will soon run enough of the tokens that `session` lacks."""
        count = max(self._pool.used(session.id) + LEAST_SHARED, self._pool.used(other.id) + 1)
        if other.account != session.account or count > min(self._end(other), self._end(session)):
            return False
        if other.tokens[count - 1] != session.tokens[count - 1]:
            return False  # nearly all pairs that differ do so here
        return packed(other).startswith(packed(session)[: count * _TOKEN_BYTES])

    def _source(self, session: SessionRecord, others: Sequence[SessionRecord]) -> tuple[SessionRecord | None, int]:
        """Return the session to copy from and how many rows, including those that the session has itself."""
        source, rows, end = None, self._pool.used(session.id) + LEAST_SHARED - 1, self._end(session)
        if rows >= end:
            return None, 0  # it lacks too few
        for other in others:
            if other is session or len(other.tokens) <= rows or other.tokens[rows] != session.tokens[rows]:
                continue  # so of many with the same prefix only one is compared
            there = min(self._pool.offered(other.id), end)
            if there > rows and (common := common_prefix(other.tokens, session.tokens, there)) > rows:
                source, rows = other, common
                if rows == end:
                    break
        return source, rows

    def _take(self, source: SessionRecord, session: SessionRecord, rows: int, held: Set[bytes]) -> int:
        """Copy rows of keys and values, and feature rows, as far as there is room. Returns how many rows it copied.

        Rows of an ended session are taken over instead if hardly any of them are lost by that, or if a copy would cost
        other sessions their rows.
        """
        before, size = self._pool.used(session.id), len(session.tokens)
        ended, copied = self._store.has_ended(source), 0
        if ended and (self._pool.used(source.id) - rows < LEAST_SHARED or not self._pool.fits(session.id, size)):
            self._store.take_over(source, session, rows, size)
        elif self._pool.reserve(session.id, size, held | {source.id}, session.account):
            self._pool.copy(source.id, session.id, rows)
            copied = rows - before
            if ended:
                self._store.touch_ended(source)
        else:
            return 0
        have, stop = session.rows.stop, min(rows, source.rows.stop)
        if stop > have:
            session.rows.append(source.rows.block(have, stop))
        self._metrics.prefix_hits.inc(rows - before)
        self._metrics.prefix_reuses.inc()
        return copied


def _packed(session: SessionRecord) -> bytes:
    """Return the session's tokens as bytes, which are compared fast."""
    return array("I", session.tokens).tobytes()
