"""KVPool against a model of it: owners keep what they wrote, extents never overlap."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engine import kvpool
from cloud.engine.kvpool import KVPool
from cloud.torch_engine.kvstore import KVStore
from tests.device import DEVICE

pytestmark = pytest.mark.gpu

ROWS = 40
OWNERS = [bytes([i]) * 16 for i in range(5)]


@pytest.fixture(autouse=True)
def small_granule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpool, "GRANULE", 4)


class Pool(KVPool):
    """A pool with the store it keeps books of."""

    def __init__(self, rows: int) -> None:
        self.store = KVStore(2, rows, 1, 2, torch.float64, DEVICE)
        super().__init__(rows, self.store.move)


def make_pool(rows: int = ROWS) -> Pool:
    return Pool(rows)


def write(pool: Pool, owner: bytes, count: int, stamp: int) -> list[int]:
    """Fill `count` rows behind the used ones with new stamps."""
    extent = pool.extent(owner)
    stamps = list(range(stamp, stamp + count))
    rows = slice(extent.base + extent.used, extent.base + extent.used + count)
    for keys, values in zip(pool.store.keys, pool.store.values, strict=True):
        keys[rows] = torch.tensor(stamps, dtype=torch.float64)[:, None, None]
        values[rows] = -keys[rows]
    extent.used += count
    return stamps


operations = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "grow", "truncate", "release"]),
        st.sampled_from(OWNERS),
        st.integers(0, 14),
        st.sets(st.sampled_from(OWNERS), max_size=3),
    ),
    max_size=40,
)


@given(operations)
@settings(max_examples=150, deadline=None)
def test_owners_keep_what_they_wrote(steps: list[tuple[str, bytes, int, set[bytes]]]) -> None:
    pool, content, stamp = make_pool(), dict[bytes, list[int]](), 1
    for action, owner, count, keep in steps:
        if action == "release":
            pool.release(owner)
            content.pop(owner, None)
        elif action == "truncate":
            pool.truncate(owner, count)
            content[owner] = content.get(owner, [])[:count]
        else:
            held = {other for other in keep if other in pool.owners()}
            rows = pool.used(owner) + count
            granted = pool.reserve(owner, rows, keep)
            assert held <= set(pool.owners())
            if not granted:
                assert rows > ROWS or held - {owner}  # only what must be kept can be in the way
                assert pool.used(owner) == len(content.get(owner, []))
            else:
                assert pool.extent(owner).size >= rows
                content[owner] = content.get(owner, []) + write(pool, owner, count, stamp)
                stamp += count
        extents = sorted((pool.extent(o).base, pool.extent(o).size) for o in pool.owners())
        assert all(base + size <= after for (base, size), (after, _) in pairwise(extents))
        assert not extents or extents[-1][0] + extents[-1][1] <= ROWS
        content = {o: c for o, c in content.items() if o in pool.owners()}
        for other, stamps in content.items():
            extent = pool.extent(other)
            assert extent.used == len(stamps)
            assert pool.store.keys[1][extent.base : extent.base + extent.used, 0, 1].tolist() == stamps
            assert (-pool.store.values[0][extent.base : extent.base + extent.used, 0, 0]).tolist() == stamps


def test_least_recently_used_goes_first() -> None:
    pool = make_pool(12)
    for owner in OWNERS[:3]:
        assert pool.reserve(owner, 4, set())
    assert pool.reserve(OWNERS[0], 1, set())  # a touch
    assert pool.reserve(OWNERS[3], 4, set())
    assert pool.owners() == [OWNERS[2], OWNERS[0], OWNERS[3]]


def test_kept_owners_are_not_evicted() -> None:
    pool = make_pool(8)
    assert pool.reserve(OWNERS[0], 4, set()) and pool.reserve(OWNERS[1], 4, set())
    assert not pool.reserve(OWNERS[2], 4, {OWNERS[0], OWNERS[1]})
    assert not pool.reserve(OWNERS[0], 8, {OWNERS[1]}) and pool.extent(OWNERS[0]).size == 4
    assert pool.reserve(OWNERS[2], 4, {OWNERS[0]}) and pool.owners() == [OWNERS[0], OWNERS[2]]


def test_one_owner_can_always_have_the_whole_pool() -> None:
    pool = make_pool(40)
    for owner in OWNERS[:4]:
        assert pool.reserve(owner, 8, set())
    write(pool, OWNERS[1], 8, 1)
    assert pool.reserve(OWNERS[1], 40, set())  # moves over itself
    base = pool.extent(OWNERS[1]).base
    assert pool.owners() == [OWNERS[1]] and pool.store.keys[0][base : base + 8, 0, 0].tolist() == [*range(1, 9)]


def test_move_reads_before_it_writes() -> None:
    pool = make_pool()
    for keys in pool.store.keys:
        keys[:40, 0, 0] = torch.arange(40.0, dtype=torch.float64)
    pool.move([3, 5, 8], [2, 3, 5])
    assert pool.store.keys[0][:9, 0, 0].tolist() == [0, 1, 3, 5, 4, 8, 6, 7, 8]
    assert pool.store.keys[1][:9, 0, 0].tolist() == [0, 1, 3, 5, 4, 8, 6, 7, 8]
