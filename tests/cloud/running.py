"""Verifier processes on a tiny target, for tests of how they are operated; on the CPU, so on the 8-bit engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Hello
from tests.cloud.drive import Client
from tests.targets.plain import tiny_truth
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
MODEL = tiny_model(dtype=torch.float32)
PROMPT = [5, 6, 7]
TRUTH = tiny_truth(MODEL, PROMPT, Sampling(), 60)


class Running:
    """A verifier process on the tiny target.

    step_ms: its steps take at least so long. fault: the file that tests.cloud.faulty_verifier reads. constants: of the
    product, by their full names. stderr: a file descriptor; by default the file `log`. wait: for the ready line.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        step_ms: int = 0,
        fault: Path | None = None,
        constants: Mapping[str, float] = {},
        stderr: int | None = None,
        wait: bool = True,
    ) -> None:
        self.target_hash = (folder / "hash").read_text()
        limits = ["--max-model-len", "128", "--max-nodes", "16", "--kv-tokens", "1024", "--port", "0"]
        models = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter")]
        module = ["benchmarks.slow_target", "--step-ms", str(step_ms)] if step_ms else ["cloud.verifier"]
        if fault is not None:
            module = ["tests.cloud.faulty_verifier", str(fault)]
        if constants:
            given = [word for name, value in constants.items() for word in ("--set", f"{name}={value}")]
            module = ["tests.cloud.tuned_verifier", *given, "--module", *module]
        self.log = folder / "log"
        with self.log.open("a") as log:
            log.truncate(0)
            self.process = subprocess.Popen(
                [sys.executable, "-m", *module, *models, *limits, *flags],
                cwd=ROOT,
                env={**ENVIRONMENT, "OUTRIDER_CACHE": str(folder / "cache")},
                stdout=subprocess.PIPE,
                stderr=log if stderr is None else stderr,
                text=True,
            )
        assert self.process.stdout is not None
        if not wait:
            return
        line = self.process.stdout.readline()
        assert "verifier ready" in line, self.log.read_text()
        self.address = line.split("//")[1].split("/")[0]
        self.hello = Hello(1, self.target_hash, line.split("drafter=")[1].split()[0])

    def client(self, token: str = "") -> Client:
        return Client(self.address, self.hello, token=token)

    def metric(self, name: str) -> float:
        for line in httpx.get(f"http://{self.address}/metrics").text.splitlines():
            if line.startswith(name + " ") or line.startswith(name + "{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(name)


@contextmanager
def running(folder: Path, *flags: str, **options: Any) -> Iterator[Running]:
    server = Running(folder, *flags, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def save_folder(folder: Path, **shape: Any) -> Path:
    """Target, drafter and hash, as `Running` wants them. No token ends an answer: they are as long as tests want.

    shape: options of `tiny_model`.
    """
    model = tiny_model(**{"dtype": torch.float32, **shape})
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    (folder / "hash").write_text(save_tiny_target(folder / "target", model))
    save_tiny_drafter(folder / "drafter", model, (folder / "hash").read_text())
    return folder
