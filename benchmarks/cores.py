"""Separate cores for the verifier and for the device beside it, as if each were on a machine of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Cores:
    """Cores for the verifier and the device; empty: the system decides."""

    verifier: frozenset[int] = frozenset()
    device: frozenset[int] = frozenset()

    @classmethod
    def halves(cls) -> Cores:
        """Return half of this process's cores for each, if the system reports them and there are two."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        half = len(cores) // 2
        return cls(frozenset(cores[:half]), frozenset(cores[half:])) if half else cls()

    def __str__(self) -> str:
        return f"{len(self.device)} for the device, {len(self.verifier)} for the verifier" if self.device else "shared"

    @contextmanager
    def of(self, cores: frozenset[int]) -> Iterator[None]:
        """Run threads and processes started in this context on `cores`."""
        before = os.sched_getaffinity(0) if cores else set()
        try:
            if cores:
                os.sched_setaffinity(0, cores)
            yield
        finally:
            if before:
                os.sched_setaffinity(0, before)
