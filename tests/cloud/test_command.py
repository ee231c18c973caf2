"""`python -m cloud.verifier` as a real process: ready line, signals, one-line failures."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from websockets.exceptions import ConnectionClosed

from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_GOING_AWAY, Error, Hello
from tests.cloud.drive import Client
from tests.targets.plain import tiny_truth
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "cloud.verifier"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(dtype=torch.float32)
    target_hash = save_tiny_target(folder / "target", model)
    save_tiny_drafter(folder / "drafter", model, target_hash)
    return folder / "target", folder / "drafter", target_hash


@contextmanager
def running(folders: tuple[Path, Path, str], *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*COMMAND, "--model", str(folders[0]), "--drafter", str(folders[1]), "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**ENVIRONMENT, "OUTRIDER_CACHE": str(folders[0].parent / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal_and_exits_0(folders: tuple[Path, Path, str], number: signal.Signals) -> None:
    with running(folders, "--max-model-len", "64", "--max-nodes", "16", "--kv-tokens", "512") as (process, line):
        found = re.search(
            r"ws://(127\.0\.0\.1:\d+)/v1/verify target=(\w+) drafter=(\w+) max_context=64 max_nodes=16", line
        )
        assert found, line
        address, target_hash, drafter_hash = found.groups()
        assert target_hash == folders[2]
        assert httpx.get(f"http://{address}/readyz").status_code == 200
        client = Client(address, Hello(1, target_hash, drafter_hash))
        client.open([5, 6, 7])
        truth = tiny_truth(tiny_model(dtype=torch.float32), [5, 6, 7], Sampling(), 3)
        assert client.verify(1, 3, TokenTree.chain(truth[:2])).bonus == truth[2]
        process.send_signal(number)
        assert client.receive(Error).code == ERR_GOING_AWAY
        with pytest.raises(ConnectionClosed) as closed:
            client.socket.recv(timeout=HANG)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        out, err = process.communicate(timeout=HANG)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in err


def fails(*flags: str, **environment: str) -> str:
    """The one line of a failed start."""
    result = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=HANG
    )
    assert result.returncode not in (0, -signal.SIGTERM) and result.stdout == ""
    said = result.stderr.strip().splitlines()
    lines = [line for line in said if "making an 8-bit copy" not in line]
    assert len(lines) == 1 and lines[0].startswith("verifier: "), result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--port", "99999"], "--port"),
        (["--bogus", "1"], "--bogus"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--kv-tokens", "300"], "2176"),
        (["--drafter", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_flags(flags: list[str], text: str) -> None:
    assert text in fails(*flags)


def test_bad_environment() -> None:
    assert "--max-nodes" in fails(VERIFIER_MAX_NODES="many")


def test_missing_and_mismatched_models(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, drafter, _ = folders
    assert "/no/such/model" in fails("--model", "/no/such/model", "--drafter", str(drafter), "--port", "0")
    other = save_tiny_target(tmp_path / "other", tiny_model(seed=1, dtype=torch.float32))
    line = fails("--model", str(tmp_path / "other"), "--drafter", str(drafter), "--port", "0")
    assert other in line and folders[2] in line


def test_drafter_of_other_shapes(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    save_tiny_drafter(tmp_path, tiny_model(hidden=16, dtype=torch.float32), folders[2])
    line = fails("--model", str(folders[0]), "--drafter", str(tmp_path), "--port", "0")
    assert "do not fit" in line


def test_port_in_use(folders: tuple[Path, Path, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = fails("--model", str(folders[0]), "--drafter", str(folders[1]), "--port", port)
        assert port in line and "in use" in line


def test_help_names_every_flag() -> None:
    result = subprocess.run(
        [*COMMAND, "--help"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG
    )
    assert result.returncode == 0
    for flag in ("model", "drafter", "host", "port", "kv-tokens", "max-model-len", "tensor-parallel-size", "insecure"):
        assert f"--{flag}" in result.stdout
