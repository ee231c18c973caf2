"""The description of a machine: memory, other processes, bandwidth."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider_core import machine


@pytest.mark.parametrize("threads", [1, 3])
def test_bandwidth_reads_every_buffer_once_a_pass(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(machine, "READS", (lambda buffer: read.append(buffer.nbytes),))
    assert machine.read_bandwidth(threads, total=3 << 20, rounds=2) > 0
    assert read == [(3 << 20) // threads] * (threads * 2 * machine.PASSES)


def test_bandwidth_reads_all_values() -> None:
    values = np.arange(1.0, 10.0)
    assert machine._read_float64(values) == values.sum()
    assert machine._read_int64(values) == values.view(np.int64).sum()


def test_other_processes_are_told_from_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0, "own": 5.0, "busy": 1000.0}
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(machine.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(machine, "busy_seconds", lambda: clock["busy"])
    others = machine.Others()
    clock.update(now=110.0, own=8.0, busy=1018.0)  # 10 s long, 18 s of work in all, 3 s of it ours
    assert others.cores() == pytest.approx(1.5)
    clock.update(busy=1002.0)  # the machine counts in ticks
    assert others.cores() == 0.0
    monkeypatch.setattr(machine, "busy_seconds", lambda: None)
    assert others.cores() is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux only")
def test_busy_seconds_grow_with_work() -> None:
    before, began = machine.busy_seconds(), time.process_time()
    while time.process_time() < began + 0.2:
        pass
    after = machine.busy_seconds()
    assert before is not None and after is not None and after - before >= 0.1


def test_memory_is_of_this_process() -> None:
    now, peak = machine.memory_mb()
    assert now is not None and peak is not None and 10 < now <= peak


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_memory_without_proc_comes_from_getrusage(system: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoFile(type(Path())):  # type: ignore[misc]
        def read_text(self, *_: Any, **__: Any) -> str:
            raise FileNotFoundError(self)

    monkeypatch.setattr(machine, "Path", NoFile)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=2_000_000))
    assert machine.memory_mb() == (2 * unit, 2 * unit)
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows
    assert machine.memory_mb() == (None, None)
