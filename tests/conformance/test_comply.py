"""llm-comply (MIT), which holds replies to OpenAI's and Open Responses' own descriptions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conformance.conftest import ANSWER, KEY, Tried

pytestmark = pytest.mark.slow

#: what the default target does not do: it reads no images
BEYOND = {"chat-image-input", "image-input"}
#: Nothing here limits an answer, and it is drawn at random: a small model may write on to the end of its context.
ATTEMPTS = 4


def failed(endpoint: Tried, form: str, only: set[str]) -> dict[str, list[str]]:
    """The cases that fail, with the reasons. only: the cases to run; empty: all."""
    command = [sys.executable, "-m", "llm_comply.cli", "--format", form, "--json", "--timeout", str(int(ANSWER))]
    command += ["--base-url", endpoint.url, "--api-key", KEY, "--model", endpoint.model]
    command += ["--filter", ",".join(sorted(only))] if only else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    results = json.loads(ended.stdout)["results"]
    assert len(results) >= (len(only) or 9), ended.stdout
    return {each["id"]: each["errors"] for each in results if each["status"] == "failed"}


@pytest.mark.parametrize("form", ["openai-chat", "open-responses"])
def test_replies_are_as_described(endpoint: Tried, form: str) -> None:
    wrong = failed(endpoint, form, set())
    for _ in range(ATTEMPTS):
        if set(wrong) <= BEYOND:
            return
        wrong = failed(endpoint, form, set(wrong) - BEYOND)
    raise AssertionError(wrong)
