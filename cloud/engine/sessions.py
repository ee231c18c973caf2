"""Session records: committed tokens, feature rows and the last reply, outliving sockets and evictions."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from cloud.engine.features import PackedRows
from cloud.engine.kvpool import KVPool
from cloud.engine.masks import FollowedRules
from cloud.engine.request import EngineRequest
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Open, Verdict, Verify

#: seconds that an unused session is remembered
SESSION_SECONDS = 3600.0
#: shorter prefixes than this are computed, neither kept nor copied
LEAST_SHARED = 64


@dataclass(frozen=True)
class SettledRound:
    """The last VERIFY that was answered, its verdict and the tokens it committed: a retry gets the same verdict."""

    request: Verify
    verdict: Verdict
    committed: tuple[int, ...]

    def answers(self, request: Verify) -> bool:
        """Return whether `request` repeats that VERIFY, perhaps on another stream."""
        mine, other = self.request, request
        return (mine.seq, mine.base_len, mine.tokens, mine.parents) == (
            other.seq,
            other.base_len,
            other.tokens,
            other.parents,
        )


@dataclass(eq=False)
class SessionRecord:
    """A conversation. tokens: committed ids, the last is the root; rows: feature rows from position 0 on.

    seq: number of the last VERIFY or GENERATE that has ended. Keys and values are in the pool under the session's id.
    rows_due: the first position whose row has not been sent to the device. account: name of its account. rules: of its
    constraint; followed: the same, for the engine. opening: an OPEN whose feature rows are due. round: a VERIFY or
    GENERATE to be answered.
    """

    id: bytes
    tokens: list[int]
    sampling: Sampling
    seq: int
    rows: PackedRows
    rules: Rules | None = None
    followed: FollowedRules | None = None
    settled: SettledRound | None = None
    rows_due: int = 0
    account: str = ""
    answered: float = 0.0  # when its last verdict was sent (time.perf_counter)
    last_used: float = 0.0
    opening: EngineRequest | None = None
    round: EngineRequest | None = None

    @property
    def requests(self) -> list[EngineRequest]:
        """Return the requests that it has to answer."""
        return [request for request in (self.opening, self.round) if request is not None]

    @property
    def waiting_since(self) -> float:
        """Return when the older of its requests came."""
        return min(request.waiting_since for request in self.requests)

    @property
    def is_drafted(self) -> bool:
        """Return whether a drafter proposes its round's trees."""
        return self.round is not None and self.round.is_drafted


class SessionStore:
    """All records of this process, at most `max_sessions`, forgotten when unused for `ttl` seconds.

    An account with more than an even share of a full store loses its own oldest record first. keep_ended: keys, values
    and feature rows of ended sessions stay for others of their account, while the pool has room for them and for at
    most `ttl` seconds unused; of these too there are at most `max_sessions`. first_row: the first position that has a
    feature row.
    """

    def __init__(
        self,
        pool: KVPool,
        shape: RowShape,
        max_sessions: int,
        ttl: float = SESSION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        keep_ended: bool = False,
        first_row: int = 0,
    ) -> None:
        self._pool, self._shape, self._keep_ended, self._first_row = pool, shape, keep_ended, first_row
        self._max_sessions, self._ttl, self._clock = max_sessions, ttl, clock
        self._sessions: OrderedDict[bytes, SessionRecord] = OrderedDict()  # least recently used first
        self._ended: OrderedDict[bytes, SessionRecord] = OrderedDict()  # the rows of ended sessions, in the same order
        self._names = count()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: bytes) -> SessionRecord | None:
        """Return the record, marked as just used."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._sessions.move_to_end(session_id)
            session.last_used = self._clock()
        return session

    def open(
        self,
        session_id: bytes,
        request: Open,
        tokens: list[int],
        busy: Set[bytes],
        account: str = "",
        rules: Rules | None = None,
    ) -> SessionRecord | None:
        """Begin or resume a session at `tokens`, keeping the rows of the prefix that they share with its record.

        rules: of the answer's constraint, which no other session shares. Returns None if the store is full of `busy`
        sessions.
        """
        session = self.get(session_id)
        if session is None:
            if not self._make_room(busy):
                return None
            rows = PackedRows(self._shape, self._first_row)
            session = SessionRecord(
                session_id, list(tokens), request.sampling, request.seq, rows, rules, account=account
            )
            self._sessions[session.id] = session
            session.last_used, session.rows_due = self._clock(), len(tokens) - 1
            return session
        common = common_prefix(session.tokens, tokens)
        kept = min(common, len(tokens) - 1)
        self._pool.truncate(session.id, kept)
        session.rows.truncate(kept)
        if common < len(tokens) or request.sampling != session.sampling or not _same_rules(rules, session.rules):
            session.settled = None  # the last reply belongs to another text
        session.tokens, session.sampling, session.seq = list(tokens), request.sampling, request.seq
        session.rules, session.rows_due = rules, len(tokens) - 1  # FEATURES carry those before
        return session

    def forget(self, session_id: bytes) -> None:
        """Drop the record and its keys and values, or leave these to others of its account."""
        session = self._sessions.pop(session_id, None)
        used = self._pool.offered(session_id)
        if session is None or not self._keep_ended or used < LEAST_SHARED:
            self._pool.release(session_id)
            return
        name = b"ended" + next(self._names).to_bytes(8)  # no session's id is as short
        self._pool.leave(session_id, name)
        session.rows.truncate(used)
        tokens = session.tokens[: used + 1]
        gone: dict[str, Any] = {"settled": None, "rules": None, "followed": None, "opening": None, "round": None}
        self._ended[name] = replace(session, id=name, tokens=tokens, **gone)
        if len(self._ended) > self._max_sessions:
            oldest = _first_to_go(self._ended.values(), set())
            assert oldest is not None
            del self._ended[oldest.id]
            self._pool.release(oldest.id)

    def of_account(self, account: str) -> Iterator[SessionRecord]:
        """Yield the account's sessions, ended ones first, the least recently used first."""
        every = chain(self._ended.values(), self._sessions.values())
        return (session for session in every if session.account == account)

    def has_ended(self, session: SessionRecord) -> bool:
        """Return whether this is the record of an ended session."""
        return session.id in self._ended

    def touch_ended(self, session: SessionRecord) -> None:
        """Mark an ended session's record as just used."""
        self._ended.move_to_end(session.id)
        session.last_used = self._clock()

    def take_over(self, left: SessionRecord, session: SessionRecord, rows: int, size: int) -> None:
        """Give the first `rows` keys and values of an ended session to another, which needs room for `size`."""
        del self._ended[left.id]
        self._pool.take_over(left.id, session.id, rows, size)

    def quarantine(self, session: SessionRecord) -> None:
        """Forbid copies of the keys and values of sessions that begin like this one, whose logits were not finite."""
        for other in list(self.of_account(session.account)):
            if common_prefix(other.tokens, session.tokens, LEAST_SHARED) == LEAST_SHARED:
                (self._pool.release if self.has_ended(other) else self._pool.quarantine)(other.id)

    def expire(self, busy: Set[bytes]) -> None:
        """Forget sessions unused for `ttl` seconds, except `busy` ones, and ended ones whose rows were evicted."""
        limit = self._clock() - self._ttl
        old = [s.id for s in self._sessions.values() if s.last_used < limit and s.id not in busy]
        gone = [s.id for s in self._ended.values() if s.last_used < limit or not self._pool.used(s.id)]
        for records, ids in ((self._sessions, old), (self._ended, gone)):
            for session_id in ids:
                del records[session_id]
                self._pool.release(session_id)

    def _make_room(self, busy: Set[bytes]) -> bool:
        if len(self._sessions) < self._max_sessions:
            return True
        if (session := _first_to_go(self._sessions.values(), busy)) is not None:
            self.forget(session.id)
        return session is not None


def _first_to_go(sessions: Collection[SessionRecord], busy: Set[bytes]) -> SessionRecord | None:
    """Return the oldest idle session of the account with most sessions; `sessions` begin with the oldest."""
    counts = Counter(session.account for session in sessions)
    idle = (session for session in sessions if session.id not in busy)
    return max(idle, key=lambda session: counts[session.account], default=None)  # max() returns the first of equals


def _same_rules(a: Rules | None, b: Rules | None) -> bool:
    return (a and a.constraint) == (b and b.constraint)
