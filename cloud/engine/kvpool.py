"""Key/value rows of all sessions, each session in one contiguous extent."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

#: extents are whole multiples of this many rows, so that most steps need no growth
GRANULE = 128


@dataclass
class Extent:
    """Rows base..base+size-1, which belong to one owner; the first `used` hold its committed prefix.

    left: by a session that has ended, so that others of its account may copy them. quarantined: no session may.
    """

    base: int
    size: int
    used: int = 0
    account: str = ""
    left: bool = False
    quarantined: bool = False


class KVPool:
    """Gives each owner one contiguous extent of the store's rows.

    An owner is a session, by its id. Contiguous extents give attention plain views of the store. When rows run short,
    the least recently used extents are evicted; their owners keep token ids and run them through the target again. A
    row is read only after its owner has written it, so no owner sees rows of another.
    """

    def __init__(self, rows: int, move: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        self.rows = rows
        self.evictions = 0
        self.moved = 0  # rows copied over rows
        self._move = move
        self._extents: OrderedDict[bytes, Extent] = OrderedDict()  # least recently used first

    def used(self, owner: bytes) -> int:
        """Return the rows of the owner's prefix that are in the pool, 0 after an eviction."""
        extent = self._extents.get(owner)
        return extent.used if extent else 0

    def offered(self, owner: bytes) -> int:
        """Return the rows of the owner's prefix that others may copy."""
        extent = self._extents.get(owner)
        return extent.used if extent and not extent.quarantined else 0

    def quarantine(self, owner: bytes) -> None:
        """Forbid copies of the rows that the owner has now."""
        if extent := self._extents.get(owner):
            extent.quarantined = True

    def extent(self, owner: bytes) -> Extent:
        """Return the owner's extent. Raises KeyError unless `reserve` came first."""
        return self._extents[owner]

    def owners(self) -> list[bytes]:
        """Return the owners of live extents, least recently used first."""
        return list(self._extents)

    def reserve(self, owner: bytes, rows: int, keep: Set[bytes], account: str = "") -> bool:
        """Make the owner's extent at least `rows` long, evicting extents of owners outside `keep`.

        Extents left by ended sessions are evicted first, then extents of the account with most rows, of these the least
        recently used. The owner's used rows move with its extent. Returns False, with nothing evicted or changed, if
        even all of them would free too little.
        """
        extent = self._extents.get(owner)
        if extent is None or extent.size < rows:
            need = self._rounded(rows)
            if max((end - begin for begin, end in self._gaps({*keep} - {owner})), default=0) < need:
                return False
            while (base := self._place(owner, need)) is None:
                self.evictions += not self._extents.pop(self._victim(owner, keep)).left
            if extent is None:
                extent = self._extents[owner] = Extent(base, need, account=account)
            else:
                if base != extent.base:
                    old, new = range(extent.base, extent.base + extent.used), range(base, base + extent.used)
                    self.move(old, new)
                extent.base, extent.size = base, need
        self._extents.move_to_end(owner)
        return True

    def _victim(self, owner: bytes, keep: Set[bytes]) -> bytes:
        held = Counter[str]()
        for extent in self._extents.values():
            held[extent.account] += extent.size
        others = [other for other in self._extents if other != owner and other not in keep]

        def weight(other: bytes) -> tuple[bool, int]:
            extent = self._extents[other]
            return extent.left, held[extent.account]

        return max(others, key=weight)  # the first of equals, as max() returns it

    def fits(self, owner: bytes, rows: int) -> bool:
        """Return whether `reserve` would evict no session."""
        return self._place(owner, self._rounded(rows)) is not None

    def leave(self, owner: bytes, name: bytes) -> None:
        """Note that the owner has ended; its rows stay under another name until copied, taken over or evicted."""
        extent = self._extents[name] = self._extents.pop(owner)
        extent.left = True

    def take_over(self, name: bytes, owner: bytes, rows: int, size: int) -> None:
        """Make the first `rows` rows left under that name the owner's extent, in place of its own.

        Rows beyond `size` are free at once.
        """
        self.release(owner)
        extent = self._extents[owner] = self._extents.pop(name)
        extent.left, extent.used, extent.size = False, rows, min(extent.size, self._rounded(size))

    def copy(self, source: bytes, owner: bytes, rows: int) -> None:
        """Copy the first `rows` rows of another's prefix to the owner, for which `reserve` has made room."""
        old, new = self._extents[source], self._extents[owner]
        self.move(range(old.base + new.used, old.base + rows), range(new.base + new.used, new.base + rows))
        new.used = rows
        self._extents.move_to_end(source)
        self._extents.move_to_end(owner)

    def truncate(self, owner: bytes, rows: int) -> None:
        """Forget all but the first `rows` rows."""
        if extent := self._extents.get(owner):
            extent.used = min(extent.used, rows)

    def release(self, owner: bytes) -> None:
        """Forget the owner's extent, if it has one."""
        self._extents.pop(owner, None)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over rows; see `cloud.engine.runner.ModelRunner.move`."""
        if len(sources):
            self.moved += len(sources)
            self._move(sources, targets)

    @property
    def rows_used(self) -> int:
        """Number of rows in the pool with committed prefixes."""
        return sum(extent.used for extent in self._extents.values() if not extent.left)

    def _rounded(self, rows: int) -> int:
        return min(-(-max(rows, 1) // GRANULE) * GRANULE, max(rows, self.rows))

    def _place(self, owner: bytes, size: int) -> int | None:
        """Return the first of `size` free rows, the owner's own counted as free; its present extent if enough."""
        gaps = list(self._gaps(self._extents.keys() - {owner}))
        extent = self._extents.get(owner)
        if extent and any(begin <= extent.base and extent.base + size <= end for begin, end in gaps):
            return extent.base
        return next((begin for begin, end in gaps if end - begin >= size), None)

    def _gaps(self, owners: Set[bytes]) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the gaps between the extents of these owners."""
        begin = 0
        extents = (extent for owner, extent in self._extents.items() if owner in owners)
        for extent in sorted(extents, key=lambda extent: extent.base):
            if begin < extent.base:
                yield begin, extent.base
            begin = extent.base + extent.size
        if begin < self.rows:
            yield begin, self.rows
