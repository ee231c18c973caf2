"""Read the headers of a 64-bit shared library."""

from __future__ import annotations

import struct
from dataclasses import dataclass

AARCH64, X86_64 = 183, 62
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5


@dataclass(frozen=True)
class Library:
    """machine: ELF's number; pages: the least alignment of a loaded segment; needed: libraries, as the loader looks."""

    machine: int
    pages: int
    needed: tuple[str, ...]


def read(data: bytes) -> Library:
    """Raises AssertionError on anything but a little-endian 64-bit shared library."""
    assert data[:6] == b"\x7fELF\x02\x01"
    kind, machine, _, _, headers, _, _, _, size, count = struct.unpack_from("<HHIQQQIHHH", data, 16)
    assert kind == 3
    segments = [struct.unpack_from("<IIQQQQQQ", data, headers + size * index) for index in range(count)]
    loads = [segment for segment in segments if segment[0] == PT_LOAD]

    def offset(address: int) -> int:
        (load,) = [load for load in loads if load[3] <= address < load[3] + load[5]]
        return address - load[3] + load[2]

    (dynamic,) = [segment for segment in segments if segment[0] == PT_DYNAMIC]
    entries = [struct.unpack_from("<QQ", data, at) for at in range(dynamic[2], dynamic[2] + dynamic[5], 16)]
    entries = entries[: [tag for tag, _ in entries].index(DT_NULL)]
    names = offset(dict(entries)[DT_STRTAB])
    needed = [data[names + at : data.index(0, names + at)].decode() for tag, at in entries if tag == DT_NEEDED]
    return Library(machine, min(load[7] for load in loads), tuple(needed))
