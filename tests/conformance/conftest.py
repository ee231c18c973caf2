"""Endpoints that clients of the OpenAI API are tried on: the one that OUTRIDER_BASE_URL names, or both of our own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from openai import OpenAI

from export.bundle.verifier_process import VerifierProcess
from tests.e2e.conftest import BUNDLE, DRAFTER, bundle, folders, needs_default_bundle  # noqa: F401

#: of /v1, as clients take it; with OUTRIDER_API_KEY where it wants one
BASE_URL, KEY = os.environ.get("OUTRIDER_BASE_URL"), os.environ.get("OUTRIDER_API_KEY") or "none"
KINDS = ["given"] if BASE_URL else ["verifier", "device"]
#: seconds that an answer may take
ANSWER = 300.0


@dataclass(frozen=True)
class Tried:
    """An endpoint. kind: one of KINDS. url: of /v1. model: its name there."""

    kind: str
    url: str
    model: str

    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=ANSWER)


def tried(kind: str, url: str) -> Tried:
    with OpenAI(base_url=url, api_key=KEY, max_retries=5, timeout=ANSWER) as client:
        return Tried(kind, url, client.models.list().data[0].id)


@pytest.fixture(scope="session")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tried]]:
    """By kind. Our own serve the default target, each in a process."""
    if BASE_URL:
        yield {"given": tried("given", BASE_URL)}
        return
    if not (BUNDLE / "manifest.json").is_file():
        pytest.skip("no build/bundle; run the tests with: make test-conformance")
    verifier = VerifierProcess(DRAFTER, tmp_path_factory.mktemp("log") / "verifier.log")
    verifier.start()
    words = [sys.executable, "-m", "outrider", "serve", "--bundle", str(BUNDLE), "--port", "0", "--threads", "1"]
    environment = {**os.environ, "OUTRIDER_API_KEY": ""}
    with contextlib.ExitStack() as stack:
        stack.callback(verifier.stop)
        verifier.wait_ready()
        command = [*words, "--server", verifier.address]
        device = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True))
        stack.callback(device.terminate)
        assert device.stderr is not None
        url = next(line.split()[-1] for line in device.stderr if "http://" in line)
        yield {"verifier": tried("verifier", f"http://{verifier.address}/v1"), "device": tried("device", url)}


@pytest.fixture(params=KINDS)
def endpoint(request: pytest.FixtureRequest, endpoints: dict[str, Tried]) -> Tried:
    """Each of them."""
    return endpoints[request.param]


@pytest.fixture
def client(endpoint: Tried) -> Iterator[OpenAI]:
    with endpoint.client() as client:
        yield client
