"""Hostile clients beside well-behaved ones, on a real verifier behind TLS: others lose nothing, memory stays flat."""

from __future__ import annotations

import hashlib
import json
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trustme

from benchmarks import load
from benchmarks.load_hostile import KINDS
from benchmarks.load_report import resident_bytes
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
#: of a step, so that what is measured is the verifier's queue and not this machine's processors
STEP_MS = 25
#: what a burst may take: the longest text that is tokenised takes some 140 MB, one at a time
BURST_MB = 192
#: its memory is back in this time
GIVEN_BACK_SECONDS = 30


@dataclass(frozen=True)
class Place:
    folder: Path
    address: str
    pid: int
    tokens: dict[str, str]
    megabytes: list[float]

    @property
    def authority(self) -> Path:
        """The certificate that signed the verifier's."""
        return self.folder / "authority.pem"

    def client(self) -> httpx.Client:
        context = ssl.create_default_context(cafile=self.authority)
        return httpx.Client(base_url=f"https://{self.address}", verify=context, timeout=HANG)

    def refused(self) -> dict[str, float]:
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        parts = [line.split('"') for line in lines if line.startswith("outrider:refused_total")]
        return {part[1]: float(part[2].removeprefix("} ")) for part in parts}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hostile")
    model = tiny_model(seed=5, dtype=torch.float32)
    save_tiny_drafter(folder / "drafter", model, save_tiny_target(folder / "target", model))
    (folder / "prompts.txt").write_text("w20 w21 w22\nw99 w5\nw7 w8 w9 w10 w11\nw42\n")
    tokens = {name: secrets.token_hex(8) for name in ("good", "bad", "first")}
    hashes = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in tokens.items()}
    (folder / "tokens").write_text("".join(f"{name} {digest}\n" for name, digest in hashes.items()))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    flags = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter"), "--port", "0"]
    flags += ["--ssl-certfile", str(folder / "server.pem"), "--ssl-keyfile", str(folder / "server.pem")]
    flags += [
        "--auth-file",
        str(folder / "tokens"),
        "--max-model-len",
        "128",
        "--max-nodes",
        "24",
        "--kv-tokens",
        "4096",
    ]
    limits = ("REQUEST_SECONDS=2", "MESSAGE_SECONDS=2", "MAX_CONNECTIONS=500")
    tuned = [word for each in limits for word in ("--set", f"cloud.server.limits.{each}")]
    tuned += ["--module", "benchmarks.slow_target", "--step-ms", str(STEP_MS), "--threads", "1"]
    command = [sys.executable, "-m", "tests.cloud.tuned_verifier", *tuned, *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "verifier ready" in line, (folder / "log").read_text()
        place = Place(folder, line.split("//")[1].split("/")[0], process.pid, tokens, [])
        tokenise_once(place)
        yield place
        assert process.poll() is None, (folder / "log").read_text()
    finally:
        process.terminate()
        process.wait(HANG)


def tokenise_once(place: Place) -> None:
    """The first long prompt takes memory that is kept for the next one."""
    ask = {"model": str(place.folder / "target"), "messages": [{"role": "user", "content": "word " * 190_000}]}
    headers = {"Authorization": f"Bearer {place.tokens['first']}"}
    with place.client() as client:
        assert client.post("/v1/chat/completions", json=ask, headers=headers).status_code == 400


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_served_as_before(place: Place, tmp_path: Path, kind: str) -> None:
    before = place.refused()
    flags = ["--model", str(place.folder / "target"), "--drafter", str(place.folder / "drafter")]
    flags += ["--prompts", str(place.folder / "prompts.txt"), "--json", str(tmp_path / "load.json")]
    flags += ["--seconds", "10", "--tokens", "24", "--think", "0.05", "--sample", "0.25", "--devices", "2"]
    flags += ["--address", place.address, "--pid", str(place.pid), "--bad", kind, "--tls-ca", str(place.authority)]
    assert load.main([*flags, "--token", place.tokens["good"], "--bad-token", place.tokens["bad"]]) == 0
    figures: dict[str, Any] = json.loads((tmp_path / "load.json").read_text())
    alone, beside = figures["phases"]
    assert figures["wrong_verdicts"] == figures["wrong_tokens"] == 0
    assert beside["tokens"] > 0
    assert beside["ratios"]["p95"] <= 2, (alone["verify_ms"], beside["verify_ms"], beside["companion"])
    grown = {reason: count - before.get(reason, 0) for reason, count in place.refused().items()}
    bound = {
        "half-request": "slow_request",
        "drip-body": "token",
        "idle-sockets": "slow_request",
        "unfinished": "slow_message",
        "crowd": "account_connections",
        "long-prompts": "rate",
    }.get(kind)
    assert bound is None or grown.get(bound, 0) >= 1, (grown, beside["companion"])
    if kind == "half-tls":  # asyncio cuts these, before there is a request to refuse
        assert beside["companion"]["cut"] >= 1, beside["companion"]
    memory = beside["memory"]
    assert memory["most_mb"] - memory["start_mb"] < BURST_MB, memory["samples"]
    place.megabytes.append(memory["end_mb"])


def test_memory_is_flat_over_all_of_them(place: Place) -> None:
    """What they took while they were there has been given back or used again."""
    if len(place.megabytes) < 3:
        pytest.skip("wants the tests above")
    until = time.monotonic() + GIVEN_BACK_SECONDS  # the last of them have only just gone
    while resident_bytes(place.pid) / 1e6 - place.megabytes[0] >= 64:
        assert time.monotonic() < until, place.megabytes
        time.sleep(0.5)
