"""Links of real packets, tested in a network namespace of their own where the system lets us make one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG

ROOT = Path(__file__).parents[2]
TRY = """
from benchmarks.packets import Laboratory, open_tun
with Laboratory():
    open_tun("lab", "10.77.0.1")
"""


def in_own_network(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.packets", sys.executable, *command],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=2 * HANG,
    )  # fmt: skip


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_links_of_real_packets(which: str) -> None:
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("network namespaces are Linux's")
    tried = in_own_network("-c", TRY)
    if tried.returncode:
        pytest.skip(f"no network of its own here: {(tried.stderr.strip().splitlines() or ['?'])[-1]}")
    tested = in_own_network("-m", "pytest", "-p", "no:cacheprovider", "-m", which, "tests/benchmarks/packets_inside.py")
    assert tested.returncode == 0, tested.stdout + tested.stderr
