"""Ranks of one training run take turns over the files they share."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing import spawn

from export.train.share import ALONE, Share
from tests.waiting import HANG, until


def test_the_first_rank_goes_through_a_block_before_the_others_and_all_leave_it_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barrier = threading.Barrier(3)
    monkeypatch.setattr("export.train.share.dist.barrier", lambda: barrier.wait(timeout=HANG))
    seen: list[tuple[str, int]] = []

    def work(rank: int) -> None:
        share = Share(rank, 3)
        if rank == 0:  # the first arrives last
            assert until(lambda: len(seen) == 2)
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
        thread.join(timeout=HANG)
    steps = [step for step, _ in seen]
    assert steps == ["before"] * 3 + ["inside"] * 3 + ["behind"] * 3
    assert seen[3] == ("inside", 0)


def test_a_process_alone_waits_for_nobody() -> None:
    with ALONE.first_then_all():
        pass
    assert ALONE.agreed("float32", "cpu") == "float32"


def says(rank: int, folder: str) -> None:
    """A rank's own value, and what all agree on, into a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    agreed = Share(rank, 2).agreed(("float32", "bfloat16")[rank], "cpu")
    Path(folder, str(rank)).write_text(agreed)
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_agree_on_what_the_first_one_measured(tmp_path: Path) -> None:
    """Two processes. Ranks that train in different formats would drift apart: only gradients are averaged."""
    spawn(says, (str(tmp_path),), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["float32", "float32"]
