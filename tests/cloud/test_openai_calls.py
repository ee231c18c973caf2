"""Text completions, responses, choices and log probabilities over OpenAI's client; mutated requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI

from outrider_core.chat.api.app import PARSERS
from outrider_core.chat.api.errors import ApiError
from outrider_core.protocol.sampling import Sampling
from tests.cloud.test_openai import IDS, MODEL, NAME, QUESTION, TOKENIZER, served, truth, words
from tests.waiting import HANG

CHAT: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_choices_have_the_next_seeds(client: OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": CHAT, "n": 3, "seed": 7, "max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    want = [words(truth(Sampling(1.0, seed=7 + index), 8)) for index in range(3)]
    assert [choice.message.content for choice in whole.choices] == want
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 24)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == want


@pytest.mark.parametrize("stream", [False, True])
def test_text_completions(client: OpenAI, stream: bool) -> None:
    want = words(truth(Sampling(0.5, seed=3), 12))
    for prompt in (IDS, [IDS]):
        asked: Any = {"model": NAME, "prompt": prompt, "seed": 3, "temperature": 0.5, "max_tokens": 12}
        for echo in (False, True):
            if stream:
                parts = client.completions.create(stream=True, echo=echo, **asked)
                text = "".join(part.choices[0].text for part in parts)
            else:
                text = client.completions.create(echo=echo, **asked).choices[0].text
            assert text == (words(IDS) if echo else "") + want
    assert client.completions.create(model=NAME, prompt=QUESTION).choices[0].finish_reason == "length"


def test_log_probabilities_are_the_models_own(client: OpenAI) -> None:
    """Before temperature, penalties and biases, which change the draw alone."""
    asked: Any = {"model": NAME, "messages": CHAT, "seed": 3, "max_tokens": 6, "logprobs": True, "top_logprobs": 4}
    changed: Any = {"temperature": 0.5, "presence_penalty": 1.0, "logit_bias": {"7": 2}}
    whole = client.chat.completions.create(**asked, **changed)
    told = whole.choices[0].logprobs
    assert told is not None and told.content is not None and len(told.content) == 6
    drawn = list(IDS)
    for part in told.content:
        logits = MODEL(input_ids=torch.tensor([drawn]), use_cache=False).logits[0, -1].detach().double().numpy()
        chances = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        token = TOKENIZER.convert_tokens_to_ids(part.token)
        assert abs(chances[token] - part.logprob) < 1e-5
        best = np.sort(chances)[::-1][:4]
        assert np.allclose([top.logprob for top in part.top_logprobs], best, atol=1e-5)
        drawn.append(token)
    streamed = client.chat.completions.create(stream=True, **asked, **changed)
    parts = [each for chunk in streamed if chunk.choices and chunk.choices[0].logprobs
             for each in chunk.choices[0].logprobs.content or ()]  # fmt: skip
    assert parts == told.content
    old = client.completions.create(model=NAME, prompt=IDS, seed=3, max_tokens=6, logprobs=4, **changed).choices[0]
    assert old.logprobs is not None and old.logprobs.token_logprobs == [part.logprob for part in told.content]
    new = client.responses.create(
        model=NAME, input=QUESTION, max_output_tokens=6, include=["message.output_text.logprobs"], top_logprobs=4,
        temperature=0.5, extra_body={"seed": 3, "presence_penalty": 1.0, "logit_bias": {"7": 2}},
    )  # fmt: skip
    [message] = new.output
    assert [part.logprob for part in message.content[0].logprobs] == [part.logprob for part in told.content]  # type: ignore[union-attr]


def test_responses(client: OpenAI) -> None:
    want = words(truth(Sampling(0.5, seed=3), 12))
    asked: Any = {
        "model": NAME, "input": QUESTION, "temperature": 0.5, "max_output_tokens": 12, "extra_body": {"seed": 3},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    assert whole.output_text == want and whole.status == "incomplete"
    assert whole.usage is not None and (whole.usage.input_tokens, whole.usage.output_tokens) == (7, 12)
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == want
    said: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    assert client.responses.create(**{**asked, "input": said}).output_text == want
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["file_search_call.results"]}, "include"),
    ]
    for more, param in wrong:
        with pytest.raises(BadRequestError) as refused:
            client.responses.create(**{**asked, **more})
        assert (refused.value.param or "").startswith(param)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": NAME, "messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "n": 1, "logprobs": True, "top_logprobs": 1,
        "stop": ["x"], "seed": 1, "max_tokens": 2, "logit_bias": {"1": 1}, "stream": False, "temperature": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
    "/v1/completions": {"model": NAME, "prompt": [1, 2], "echo": True, "n": 1, "max_tokens": 2, "stop": "x"},
    "/v1/responses": {
        "model": NAME, "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "max_output_tokens": 2,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}, "instructions": "x",
    },
}  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**63, 1e308, "", "x", "\ud800", [], {}, [[]], [None], {"type": "x"}, {"a": []}, "x" * 2000,
]  # fmt: skip


def mutated(rng: random.Random, value: Any) -> Any:
    """`value` with something in it changed, left out, doubled or put elsewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], *([value[at]] if rng.random() < 0.1 else []), mutated(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def damaged(rng: random.Random, body: dict[str, Any]) -> bytes:
    for _ in range(rng.randrange(1, 4)):
        body = mutated(rng, body)
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        data = data[:at] + rng.choice([b"", b"\xff", b"{", b'"']) + data[at + 1 :]
    return data


def test_mutated_requests(url: str) -> None:
    """Over the socket: an answer or OpenAI's error with type and, where a field is at fault, its name."""
    rng = random.Random(1)
    with httpx.Client(base_url=url.removesuffix("/v1"), timeout=HANG) as client:
        for index in range(150):
            path = list(BODIES)[index % 3]
            reply = client.post(path, content=damaged(rng, BODIES[path]))
            assert reply.status_code in (200, 400, 404), reply.text
            if reply.status_code != 200:
                error = reply.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["message"]
                assert error["type"] == "invalid_request_error"


def test_mutated_bodies_are_read_or_refused() -> None:
    """10,000 of them: nothing but ApiError comes of one that is not taken."""
    rng, taken = random.Random(2), 0
    for index in range(10_000):
        path = list(BODIES)[index % 3]
        try:
            asked = PARSERS[path](damaged(rng, BODIES[path]))
            asked.conversation  # noqa: B018
            asked.writer("m", "f", 1, str)
            taken += 1
        except ApiError as error:
            assert error.status == 400 and error.message
    assert 500 < taken < 9500
