"""No bytes a device can send hurt the verifier: see tests/fuzz.py for the storm itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider_core.protocol.wire import ERR_BOUNDS, ERR_MALFORMED, ERR_MISMATCH, ERR_ORDER, ERR_TOO_LONG, ERR_UNKNOWN
from tests.fuzz import Mutator, Report, check_decoders, run

GROWTH = 48 << 20  # bytes; what the allocators of torch and Python may keep


def assert_survived(report: Report, frames: int) -> None:
    """The storm was strong enough to mean something, and left nothing behind."""
    assert report.frames == frames
    assert 0.2 < report.understood / frames < 0.6
    assert report.submitted > frames / 40
    codes = (ERR_MALFORMED, ERR_MISMATCH, ERR_BOUNDS, ERR_UNKNOWN, ERR_ORDER, ERR_TOO_LONG)
    wanted = {"WELCOME", "OPENED", "FEATURES", "VERDICT", "RESYNC", *(f"ERROR {code}" for code in codes)}
    assert wanted <= report.replies.keys(), report
    assert report.growth < GROWTH, report


def test_ten_thousand_frames() -> None:
    assert_survived(run(10_000, seed=0), 10_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_frames() -> None:
    assert_survived(run(1_000_000, seed=1), 1_000_000)


def test_mutations_reach_every_type_and_many_refusals() -> None:
    """Each message type gets through now and then, and frames are refused for many different reasons."""
    mutator, understood, seen = Mutator(random.Random(3)), Counter[str](), set[bytes]()
    for _ in range(5_000):
        frame = mutator.frame()
        seen.add(frame)
        message = check_decoders(frame, 0)
        understood[type(message).__name__] += 1
    assert understood.keys() == {"Hello", "Open", "Verify", "Generate", "Cancel", "Close", "NoneType"}
    assert min(understood.values()) > 30, understood
    assert len(seen) > 4_000
