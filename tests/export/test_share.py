"""Ranks of one training run take turns over the files they share."""

from __future__ import annotations

import threading
import time

import pytest

from export.share import ALONE, Share


def test_the_first_rank_goes_through_a_block_before_the_others_and_all_leave_it_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barrier = threading.Barrier(3)
    monkeypatch.setattr("export.share.dist.barrier", lambda: barrier.wait(timeout=20))
    seen: list[tuple[str, int]] = []

    def work(rank: int) -> None:
        share = Share(rank, 3)
        time.sleep(0.05 * (2 - rank))  # the first arrives last
        seen.append(("before", rank))
        with share.first_then_all():
            if rank:
                time.sleep(0.05)
            seen.append(("inside", rank))
        seen.append(("behind", rank))

    ranks = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout=30)
    steps = [step for step, _ in seen]
    assert steps == ["before"] * 3 + ["inside"] * 3 + ["behind"] * 3
    assert seen[3] == ("inside", 0)


def test_a_process_alone_waits_for_nobody() -> None:
    with ALONE.first_then_all():
        pass
