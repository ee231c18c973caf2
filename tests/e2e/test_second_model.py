"""A second model, tried whole if its file is named (`tests.second`).

It is the target, and the understudy that drafts for it; then a drafter trained for ten steps drafts.
"""

from __future__ import annotations

import asyncio
import json
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
from edge_runtime.events import Finished, LinkState, LinkStatus, Provisional, Verified
from edge_runtime.options import FIXED_TREES, Pinned, RuntimeOptions
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
from tests.second import FILE, PROMPTS, SHA256, STEPS, optional, pair

#: questions of short answers
SHORT = (PROMPTS[3], PROMPTS[6], PROMPTS[19])
#: a question for a form, and the form
SUM = "Give a and b for 17 plus 25 as JSON."
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMAS["add"], "strict": False}}
OPTIONS = RuntimeOptions(policy=Policy(offline_rate=1000))
#: most tries to cut a short answer in time: a device that opens an understudy may read the whole answer at once
CUTS = 8
#: a difference of logits that another order of sums may turn
NEAR_TIE = 0.02
pytestmark = optional


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
    ends = answers_of_plain_decoding(bundle, verifier, cut=True)
    assert all(span.writer is not Writer.DRAFTER for end in ends for span in end.spans)
    assert sum(end.stats.kept for end in ends) > 0
    assert [end.reason for end in ends].count("stop") >= 2, "turns end"


def test_a_drafter_of_ten_steps_changes_no_token(tmp_path: Path) -> None:
    drafter, bundle = pair()
    assert json.loads((drafter / "config.json").read_text())["notes"]["steps"] >= STEPS  # and what own text adds
    verifier = VerifierProcess(drafter, tmp_path / "verifier.log", "--model", str(FILE), *PLAIN_STREAMS)
    verifier.start()
    try:
        verifier.wait_ready(900)
        for pinned in (FIXED_TREES, Pinned()):
            for cut in (False, True):
                ends = answers_of_plain_decoding(bundle, verifier, cut, pinned)
                assert pinned is not FIXED_TREES or all(end.stats.rounds > 0 for end in ends)
                assert not cut or sum(end.stats.provisional for end in ends) > 0
    finally:
        verifier.stop()


def test_json_through_a_cut(bundle: Bundle, verifier: VerifierProcess) -> None:
    async def run() -> list[Finished]:
        async with EmulatedLink(verifier.port) as link, EdgeRuntime(bundle, link.address, OPTIONS) as runtime:
            ends = [await answer(runtime, link, SUM, False, response_format=FORM)]
            while not ends[-1].stats.provisional and len(ends) <= CUTS:
                ends.append(await answer(runtime, link, SUM, True, response_format=FORM))
            return ends

    ends = asyncio.run(run())
    assert json.loads(ends[0].verified) == {"a": 17, "b": 25}
    assert all(end.token_ids == ends[0].token_ids for end in ends)
    assert ends[-1].stats.provisional > 0


async def answer(runtime: EdgeRuntime, link: EmulatedLink, prompt: str, cut: bool, **held: Any) -> Finished:
    """cut: the link goes silent until some tokens are written offline, or none will be. held: what it is held to."""
    due, written = cut, 0
    async for event in runtime.generate(prompt, max_new_tokens=40, **held):
        written += isinstance(event, Provisional)
        paused = isinstance(event, LinkState) and event.state is LinkStatus.WAITING
        if isinstance(event, Verified) and due:
            link.silent, due = True, False
        elif written >= 4 or (paused and runtime.bundle.manifest.has_drafter):
            link.silent = False
    assert isinstance(event, Finished)
    return event


def answers_of_plain_decoding(
    bundle: Bundle, verifier: VerifierProcess, cut: bool, pinned: Pinned | None = None
) -> list[Finished]:
    """Ask what has short answers, and compare. cut: see `answer`."""

    async def run() -> list[Finished]:
        async with (
            EmulatedLink(verifier.port) as link,
            EdgeRuntime(bundle, link.address, OPTIONS, pinned or Pinned()) as runtime,
        ):
            return [await answer(runtime, link, prompt, cut) for prompt in SHORT]

    ends = asyncio.run(run())
    prompts = [bundle.render_chat([{"role": "user", "content": prompt}]) for prompt in SHORT]
    plain = asyncio.run(plain_decode(verifier.address, bundle, prompts, Sampling(), 40))
    assert [end.token_ids for end in ends] == [answer.tokens for answer in plain]
    return ends


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
    question = [{"role": "user", "content": SUM}]
    answer = await client.chat.completions.create(messages=question, response_format=FORM, **ask)
    assert json.loads(answer.choices[0].message.content or "") == {"a": 17, "b": 25}


def test_calls_and_json_by_the_verifiers_endpoint(verifier: VerifierProcess) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"http://{verifier.address}/v1", api_key="x", timeout=900) as client:
            await _talk(client)

    asyncio.run(run())
