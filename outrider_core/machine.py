"""Describe this machine and its load: processor, cores, memory, caches, bandwidth."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CACHES, LEAST_BUFFER, MOST_BUFFER = 8, 256 << 20, 1 << 30
PASSES, ROUNDS = 2, 5
#: assumed if the system does not report it
DEFAULT_CACHE = 32 << 20


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the name of this machine's processor."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    return next((x.partition(":")[2].strip() for x in lines if x.startswith(("model name", "Hardware"))), name)


def describe_machine() -> str:
    """Return processor, usable cores, system and architecture, for the title of a table of measurements."""
    cores = available_cores()
    count = "1 core" if cores == 1 else f"{cores} cores"
    return f"{processor_name()}, {count}, {platform.system()} {platform.machine()}"


def memory_mb() -> tuple[float | None, float | None]:
    """Return resident memory of this process in MB: (now, highest so far); (None, None) if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines) if name[:2] == "Vm"}
        return kib["VmRSS"] * 1024 / 1e6, kib["VmHWM"] * 1024 / 1e6
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return peak, peak


def busy_seconds() -> float | None:
    """Return the processor seconds that the whole machine has used since it started, or None if unknown."""
    try:
        user, nice, system, _, _, interrupts, soft, stolen, *_ = Path("/proc/stat").read_text().split()[1:]
        return sum(map(int, (user, nice, system, interrupts, soft, stolen))) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


class Others:
    """Measures the processor use of other processes from its creation on."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), busy_seconds(), time.process_time()

    def cores(self) -> float | None:
        """Return the processor cores they used on average so far, or None if unknown."""
        busy, seconds = busy_seconds(), time.perf_counter() - self._began
        if busy is None or self._busy is None:
            return None
        return max(0.0, (busy - self._busy - (time.process_time() - self._own)) / seconds)


def last_level_cache() -> int | None:
    """Return the bytes of the first core's largest cache, or None if unknown."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text))
        except (OSError, ValueError):
            continue
    return max(sizes, default=None)


def _read_int64(buffer: NDArray[np.float64]) -> object:
    return np.add.reduce(buffer.view(np.int64))


def _read_float64(buffer: NDArray[np.float64]) -> object:
    return np.einsum("i->", buffer)


READS: tuple[Callable[[NDArray[np.float64]], object], ...] = (_read_int64, _read_float64)


def read_bandwidth(threads: int, total: int | None = None, rounds: int = ROUNDS) -> float:
    """Measure the memory read bandwidth of `threads` threads together in GB/s (1 GB = 10^9 bytes).

    total: bytes of all buffers together; None: CACHES times the last-level cache, within bounds. Each thread fills its
    own float64 buffer and reads it PASSES times from a common start, with numpy reductions that keep no result in
    memory and release the GIL. Two of them are tried because which is faster depends on the machine: the int64 sum of
    the buffer's bits, and einsum's float64 sum (numpy's own float64 sum adds pairwise and reads at half the rate). The
    time runs from the first start to the last end; the best of `rounds` rounds of each counts. A hand-written AVX-512
    loop on a server read an eighth more with one thread (so a floor computed from this is as much too high) and the
    same with two.
    """
    if total is None:
        total = min(max(CACHES * (last_level_cache() or DEFAULT_CACHE), LEAST_BUFFER), MOST_BUFFER)
    values = max(1, total // 8 // threads)
    buffers = [np.empty(values) for _ in range(threads)]
    start = threading.Barrier(threads)
    spans = np.zeros((rounds * len(READS), threads, 2))

    def work(thread: int) -> None:
        buffer = buffers[thread]
        buffer.fill(1.0)  # by the thread that reads it, so that the pages lie near its core
        for trial in range(len(spans)):
            read = READS[trial % len(READS)]
            start.wait()
            spans[trial, thread, 0] = time.perf_counter()
            for _ in range(PASSES):
                read(buffer)
            spans[trial, thread, 1] = time.perf_counter()

    workers = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = spans[:, :, 1].max(1) - spans[:, :, 0].min(1)
    return float(PASSES * values * threads * 8 / seconds.min() / 1e9)
