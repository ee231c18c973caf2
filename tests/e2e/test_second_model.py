"""A second model, tried whole: Qwen2.5-Coder-0.5B-Instruct, as its publisher quantised it to 4 bits (Q4_K_M).

OUTRIDER_SECOND_MODEL names the GGUF file, known by its SHA-256; without it nothing here runs. Nothing was trained for
it: it is the target and the understudy, which drafts.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from openai import AsyncOpenAI
from rich.console import Console

from benchmarks.baseline import plain_decode
from benchmarks.links import EmulatedLink
from edge_runtime.events import Finished, Verified
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.states import Writer
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from export.bundle.verifier_process import PLAIN_STREAMS, VerifierProcess
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.answers import write_answers
from outrider_core.targets.cached import cached_target
from outrider_core.targets.source import TargetSource
from tests.e2e.test_default_tools import SCHEMAS, TOOLS

SHA256 = "1d9614638d18"  # the first digits; also of the file's identity
FILE = Path(os.environ.get("OUTRIDER_SECOND_MODEL", "/nowhere"))
PROMPTS = [
    "Write a Python function that reverses a string.", "What does the keyword `yield` do in Python?",
    "Write a SQL query that counts users per country.", "What is the capital of France?",
    "Explain recursion in one sentence.", "Write a bash line that counts the lines of all .py files.",
    "What is 17 plus 25?", "Fix this: `for i in range(10) print(i)`", "Write hello world in Rust.",
    "What is a hash table?", "Translate to Python: `const f = x => x * 2`", "List three sorting algorithms.",
    "What does HTTP status 404 mean?", "Write a regex for an e-mail address.", "What is Big O notation?",
    "Write a JSON object with a name and an age.", "How do I undo the last git commit?",
    "Write a function that returns the n-th Fibonacci number.", "What is the difference between a list and a tuple?",
    "Say hello.",
]  # fmt: skip
#: questions of short answers
SHORT = (PROMPTS[3], PROMPTS[6], PROMPTS[19])
#: a difference of logits that another order of sums may turn
NEAR_TIE = 0.02
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not FILE.is_file(), reason="OUTRIDER_SECOND_MODEL names no file"),
]


@pytest.fixture(scope="module")
def source() -> TargetSource:
    found = TargetSource.resolve(str(FILE))
    assert SHA256.startswith(found.identity[: len(SHA256)]), "another file"
    return found


@pytest.fixture(scope="module", params=[8, 4])
def bundle(request: pytest.FixtureRequest, source: TargetSource, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With an understudy of so many bits."""
    folder = tmp_path_factory.mktemp("second") / "bundle"
    write_bundle(
        BundleOptions(target=source, understudy=source, understudy_bits=request.param, output_dir=folder),
        Console(quiet=True),
    )
    return open_bundle(folder)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierProcess]:
    process = VerifierProcess(
        None, tmp_path_factory.mktemp("log") / "verifier.log", "--model", str(FILE), *PLAIN_STREAMS
    )
    process.start()
    process.wait_ready(900)
    yield process
    process.stop()


def test_greedy_answers_are_those_of_transformers(source: TargetSource) -> None:
    """In float32, but for near-ties, which are counted."""
    import torch
    from transformers import AutoModelForCausalLM

    answers = write_answers(cached_target(source, bits=32), PROMPTS, 24, Sampling())
    model = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()
    tokens = ties = 0
    for answer in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([answer.ids])).logits[0, answer.start - 1 : -1].numpy()
        written = np.array(answer.ids[answer.start :])
        missing = logits.max(-1) - logits[np.arange(len(written)), written]
        assert missing.max() < NEAR_TIE
        tokens, ties = tokens + len(written), ties + int((missing > 0).sum())
    print(f"{tokens} tokens, {ties} at near-ties")
    assert ties <= tokens / 100


def test_answers_over_a_link_with_a_cut(bundle: Bundle, verifier: VerifierProcess) -> None:
    async def run() -> list[Finished]:
        ends = []
        async with EmulatedLink(int(verifier.address.rsplit(":", 1)[1])) as link:
            options = RuntimeOptions(policy=Policy(offline_rate=1000))
            async with EdgeRuntime(bundle, link.address, options) as runtime:
                for prompt in SHORT:
                    cut = False
                    async for event in runtime.generate(prompt, max_new_tokens=40):
                        if isinstance(event, Verified) and not cut:
                            link.silent = cut = True
                        elif link.silent and len(event.provisional) > 12:
                            link.silent = False
                    assert isinstance(event, Finished)
                    ends.append(event)
        return ends

    ends = asyncio.run(run())
    prompts = [
        bundle.render_chat([{"role": "user", "content": prompt}]) for prompt in (PROMPTS[3], PROMPTS[6], PROMPTS[19])
    ]
    plain = asyncio.run(plain_decode(verifier.address, bundle, prompts, Sampling(), 40))
    assert [end.token_ids for end in ends] == [answer.tokens for answer in plain]
    assert sum(end.stats.kept for end in ends) > 0
    assert all(span.writer is not Writer.DRAFTER for end in ends for span in end.spans)
    assert [end.reason for end in ends].count("stop") >= 2, "turns end"


async def _talk(client: AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    ask: Any = {"model": model, "temperature": 0, "max_tokens": 120}
    for index, choice in enumerate(("required", "auto")):
        question = [{"role": "user", "content": ("What is the weather in Paris, in celsius?", "Add 3 and 4.")[index]}]
        answer = await client.chat.completions.create(messages=question, tools=TOOLS, tool_choice=choice, **ask)
        [found] = answer.choices
        calls = found.message.tool_calls or []
        assert found.finish_reason == ("tool_calls" if calls else "stop")
        assert calls or choice == "auto"
        for call in calls:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMAS["add"], "strict": False}}
    question = [{"role": "user", "content": "Give a and b for 17 plus 25 as JSON."}]
    answer = await client.chat.completions.create(messages=question, response_format=form, **ask)
    assert json.loads(answer.choices[0].message.content or "") == {"a": 17, "b": 25}


def test_calls_and_json_by_the_verifiers_endpoint(verifier: VerifierProcess) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"http://{verifier.address}/v1", api_key="x", timeout=900) as client:
            await _talk(client)

    asyncio.run(run())
