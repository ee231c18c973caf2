"""SessionStore: common prefixes, time to live, least recently used first; and PackedRows."""

from __future__ import annotations

import numpy as np

from cloud.engine.features import PackedRows
from cloud.engine.kvpool import KVPool
from cloud.engine.sessions import SessionStore, SettledRound
from outrider_core.protocol.rows import RowShape, pack_rows, unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Open, Verdict, Verify, pack_ids

SHAPE = RowShape(2, 4)
GREEDY = Sampling()
IDS = [bytes([i]) * 16 for i in range(4)]


def make_store(max_sessions: int = 2, ttl: float = 10.0) -> tuple[SessionStore, KVPool, list[float]]:
    pool = KVPool(1024, lambda sources, targets: None)
    now = [0.0]
    return SessionStore(pool, SHAPE, max_sessions, ttl, lambda: now[0]), pool, now


def request(session: bytes, tokens: list[int], seq: int = 0, sampling: Sampling = GREEDY) -> Open:
    return Open(0, session, seq, pack_ids(tokens), 0, sampling)


def test_reopen_keeps_the_common_prefix() -> None:
    store, pool, _ = make_store()
    session = store.open(IDS[0], request(IDS[0], [1, 2, 3, 4, 5]), [1, 2, 3, 4, 5], set())
    assert session is not None
    pool.reserve(IDS[0], 5, set())
    pool.extent(IDS[0]).used = 4
    session.rows.append(pack_rows(np.ones((4, 2, 2, 4), np.float32)))
    again = store.open(IDS[0], request(IDS[0], [1, 2, 3, 9, 9, 9], 4), [1, 2, 3, 9, 9, 9], set())
    assert again is session and (session.seq, session.tokens) == (4, [1, 2, 3, 9, 9, 9])
    assert pool.used(IDS[0]) == len(session.rows) == 3
    store.open(IDS[0], request(IDS[0], [1, 2]), [1, 2], set())
    assert pool.used(IDS[0]) == len(session.rows) == 1  # the root has none


def test_reopen_keeps_the_last_reply_only_for_the_same_text() -> None:
    store, _, _ = make_store()
    verify = Verify(0, 1, 2, b"", b"")
    settled = SettledRound(verify, Verdict(0, 1, 2, b"", 7, 0, b""), (7,))
    for tokens, sampling, kept in (
        ([1, 2], Sampling(), True),
        ([1, 2, 7], Sampling(), True),
        ([1, 3], Sampling(), False),
        ([1, 2, 7, 8], Sampling(), False),
        ([1, 2], Sampling(temperature=1.0), False),
    ):
        session = store.open(IDS[0], request(IDS[0], [1, 2, 7]), [1, 2, 7], set())
        assert session is not None
        session.settled = settled
        store.open(IDS[0], request(IDS[0], tokens, 0, sampling), tokens, set())
        assert (session.settled is settled) == kept
        store.forget(IDS[0])


def test_room_and_time_to_live() -> None:
    store, pool, now = make_store()
    for index, session_id in enumerate(IDS[:2]):
        now[0] = float(index)
        assert store.open(session_id, request(session_id, [1]), [1], set())
    store.get(IDS[0])
    pool.reserve(IDS[1], 1, set())
    assert store.open(IDS[2], request(IDS[2], [1]), [1], {IDS[0], IDS[1]}) is None
    assert store.open(IDS[2], request(IDS[2], [1]), [1], set()) and store.get(IDS[1]) is None  # the least recently used
    assert pool.owners() == []
    now[0] = 10.5
    store.expire(set())
    assert len(store) == 2
    now[0] = 11.5
    store.expire({IDS[0]})
    assert len(store) == 1 and store.get(IDS[0]) is not None


def test_feature_rows_are_kept_as_packed() -> None:
    values = np.random.default_rng(0).normal(size=(9, 2, 2, 4)).astype(np.float32)
    rows = PackedRows(SHAPE)
    rows.append(pack_rows(values[:4]))
    rows.append(pack_rows(values[4:]))
    assert rows.block(0, 9) == pack_rows(values)
    assert rows.block(3, 6) == pack_rows(values[3:6])
    part = rows.copy(2, 7)
    rows.truncate(4)
    assert (len(rows), rows.stop, part.start, part.stop) == (4, 4, 2, 7)
    part.truncate(5)
    assert part.block(2, 5) == pack_rows(values[2:5])
    rows.append(pack_rows(values[4:5]))
    np.testing.assert_array_equal(unpack_rows(rows.block(0, 5), SHAPE), unpack_rows(pack_rows(values[:5]), SHAPE))
