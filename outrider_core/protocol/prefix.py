"""Common prefixes of texts."""

from __future__ import annotations

#: tokens compared at once: Python compares slices of lists without a loop
_BLOCK = 64


def common_prefix(a: list[int], b: list[int], limit: int = 1 << 62) -> int:
    """Return the length of the longest common prefix of two texts, in tokens, at most `limit`."""
    end = min(len(a), len(b), limit)
    for start in range(0, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        if a[start:stop] != b[start:stop]:
            return next(at for at in range(start, stop) if a[at] != b[at])
    return end
