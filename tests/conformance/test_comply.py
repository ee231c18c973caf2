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
#: asks without a limit, and wants an answer that ends by itself, which a small model drawing at random may not give
LONG = {"chat-system-prompt"}


@pytest.mark.parametrize("form", ["openai-chat", "open-responses"])
def test_replies_are_as_described(endpoint: Tried, form: str) -> None:
    command = [sys.executable, "-m", "llm_comply.cli", "--format", form, "--json", "--timeout", str(int(ANSWER))]
    command += ["--base-url", endpoint.url, "--api-key", KEY, "--model", endpoint.model]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    results = json.loads(ended.stdout)["results"]
    wrong = {each["id"]: each["errors"] for each in results if each["status"] == "failed" and each["id"] not in LONG}
    assert len(results) >= 9 and set(wrong) <= BEYOND, wrong
