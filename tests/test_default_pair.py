"""The default model and its drafter as users get them, without torch: run by `make test-lowest` too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from export.bundle.verifier_process import free_port
from outrider_core.drafting.bundle import open_bundle
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.cached import cached_target
from outrider_core.targets.source import TargetSource
from tests.targets.plain import plain_decode_8bit
from tests.waiting import HANG, until

ROOT = Path(__file__).parents[1]
BUNDLE = ROOT / "build/bundle"
pytestmark = pytest.mark.skipif(
    not (BUNDLE / "manifest.json").is_file(), reason="no build/bundle; run the tests with: make test"
)


@contextmanager
def served(kind: str, *arguments: str) -> Iterator[str]:
    """`outrider KIND` in a process of its own, from when it serves: its address."""
    address = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", kind, "--port", address.rsplit(":", 1)[1], *arguments], cwd=ROOT
    )

    def serves() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{address}/v1/models", timeout=HANG).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(serves)
        yield address
    finally:
        process.terminate()
        process.wait(HANG)


def command(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`outrider`; `before` is run in its interpreter first."""
    program = f"import sys; {before}\nfrom outrider.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=HANG
    )


def test_default_model_on_the_command_line_without_torch() -> None:
    question = "What is the capital of Japan?"
    watch = (
        "import atexit; atexit.register(lambda: print(sorted({'torch', 'transformers'} & set(sys.modules)), "
        "file=sys.stderr))"
    )
    done = command("generate", "--local", "--json", "--max-tokens", "24", question, before=watch)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr
    end = json.loads(done.stdout)
    assert "Tokyo" in end["verified_text"] and end["text"] == end["verified_text"]
    bundle = open_bundle(BUNDLE)
    target = cached_target(TargetSource.resolve(bundle.manifest.target))
    prompt = bundle.render_chat([{"role": "user", "content": question}])
    assert end["token_ids"] == plain_decode_8bit(target, prompt, Sampling(), 24, target.eos_ids)


@pytest.mark.slow
def test_default_model_talks_turn_by_turn() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime", "chat", "--local", "--max-tokens", "8"],
        text=True,
        input="What is the capital of Japan?\nAnd of Italy?\n\n",
        capture_output=True,
        cwd=ROOT,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout and done.stderr.count("verified tokens") == 2


@pytest.mark.slow
def test_default_model_behind_both_endpoints() -> None:
    """A verifier and a device of its own: the same text from both, and JSON that its schema allows."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    asked = [{"role": "user", "content": "Name the capital of Italy, as JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    with served("verifier") as verifier, served("serve", "--server", verifier.removeprefix("http://")) as device:
        answers = []
        for address in (verifier, device):
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=HANG)
            model = client.models.list().data[0].id
            reply = client.chat.completions.create(
                model=model, messages=asked, response_format=form, temperature=0, max_tokens=48
            )
            answers.append(reply.choices[0].message.content)
    assert answers[0] == answers[1]
    assert list(json.loads(answers[0])) == ["city"]
