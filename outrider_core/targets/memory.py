"""Keep a process's memory low."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

#: of mallopt(3), and their bytes here: a larger block is the system's again once it is freed, and so is a larger rest
M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 8 << 20
M_TRIM_THRESHOLD, LARGE_REST = -1, 16 << 20


def untouched(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return zeros that take memory page by page as they are written.

    Numpy's own zeros ask the kernel for pages of 2 MB, of each of which a pool writes only a few rows.
    """
    count = math.prod(shape)
    if sys.platform == "win32":
        memory = mmap.mmap(-1, 4 * count)
    else:
        lazily = getattr(mmap, "MAP_NORESERVE", 0)  # pools may be larger than the memory, of which they take little
        memory = mmap.mmap(-1, 4 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | lazily)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32, count).reshape(shape)


def give_back() -> None:
    """Return freed memory to the system; otherwise glibc keeps it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def return_large_blocks() -> None:
    """Let glibc return large blocks to the system as they are freed. Only for a process that is a verifier.

    It would take them from heaps otherwise, and up to 64 MB at the end of a thread's heap are nothing that `give_back`
    returns.
    """
    if sys.platform == "linux":
        tune = getattr(ctypes.CDLL(None), "mallopt", None)
        if tune is not None:
            tune(M_MMAP_THRESHOLD, LARGE_BLOCK)
            tune(M_TRIM_THRESHOLD, LARGE_REST)
