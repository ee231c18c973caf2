"""Calls of functions by the default target, asked for with OpenAI's client: every call obeys its schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI

from edge_runtime.runtime import EdgeRuntime
from export.bundle.verifier_process import VerifierProcess
from outrider.cli.serve import Endpoint
from outrider_core.drafting.bundle import open_bundle
from tests.e2e.conftest import BUNDLE, needs_default_bundle

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    },
    "add": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": -999, "maximum": 999} for name in "ab"},
        "required": ["a", "b"],
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTIONS = ["What is the weather in Paris?", "What is 17 plus 25?", "Weather in Oslo and in Rome?", "Add 3 and 4."]
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "add"}}, "auto"]

pytestmark = needs_default_bundle


async def ask(client: AsyncOpenAI, index: int, most: int = 120) -> int:
    """The number of calls in one answer, each of which obeys its schema."""
    model = (await client.models.list()).data[0].id
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTIONS[index % 4]}], tools=TOOLS,
        tool_choice=CHOICES[index % 3], temperature=index % 2, seed=index, max_tokens=most,
        parallel_tool_calls=index % 4 == 2,
    )  # fmt: skip
    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    if choice.finish_reason == "length" and calls:
        calls.pop()  # cut off in its middle
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert (choice.finish_reason == "tool_calls") == bool(calls) or choice.finish_reason == "length"
    if index % 3 < 2 and index % 4 != 2:
        assert len(calls) == 1 and choice.finish_reason == "tool_calls"
    return len(calls)


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_by_the_verifiers_endpoint(verifier: VerifierProcess, count: int) -> None:
    async def run() -> list[int]:
        async with AsyncOpenAI(base_url=f"http://{verifier.address}/v1", api_key="x", timeout=900) as client:
            turns = asyncio.Semaphore(30)

            async def one(index: int) -> int:
                async with turns:
                    return await ask(client, index)

            return await asyncio.gather(*map(one, range(count)))

    assert sum(asyncio.run(run())) >= count // 2


@pytest.mark.slow
def test_by_the_devices_endpoint(verifier: VerifierProcess) -> None:
    async def run() -> int:
        async with EdgeRuntime(open_bundle(BUNDLE), verifier.address) as runtime:
            transport = httpx.ASGITransport(Endpoint(runtime).app)
            web = httpx.AsyncClient(transport=transport)
            async with AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=web, timeout=900) as client:
                return sum([await ask(client, index) for index in (0, 1)])

    assert asyncio.run(run()) == 2
