"""openai-python over every supported field of every call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.conformance.conftest import KINDS, Tried

pytestmark = pytest.mark.slow

QUESTION: list[Any] = [{"role": "user", "content": "Name three uses of copper."}]
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"type": "integer", "maximum": 999}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers", "parameters": ADD}}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
TOKENS = 16


def ask(client: OpenAI, endpoint: Tried, **fields: Any) -> Any:
    asked = {"model": endpoint.model, "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0, **fields}
    return client.chat.completions.create(**asked)


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def streamed(parts: Any) -> str:
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def is_form(answer: Any) -> bool:
    if answer.choices[0].finish_reason == "stop":
        jsonschema.validate(json.loads(text_of(answer)), PLACE)
    return text_of(answer).lstrip().startswith("{")


def is_call(answer: Any) -> bool:
    [call] = answer.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), ADD)
    return bool(call.function.name == "add" and answer.choices[0].finish_reason == "tool_calls")


#: fields of chat completions -> what holds of the answer
FIELDS: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    ({}, lambda answer: bool(text_of(answer)) and answer.usage.completion_tokens <= TOKENS),
    ({"max_tokens": 1}, lambda answer: answer.usage.completion_tokens == 1),
    ({"max_tokens": None, "max_completion_tokens": 3}, lambda answer: answer.choices[0].finish_reason == "length"),
    ({"temperature": 0.7, "top_p": 0.9, "seed": 5}, lambda answer: bool(text_of(answer))),
    ({"temperature": None, "seed": 5}, lambda answer: bool(text_of(answer))),
    ({"n": 3, "seed": 5, "temperature": 1}, lambda answer: [each.index for each in answer.choices] == [0, 1, 2]),
    ({"frequency_penalty": 2, "presence_penalty": -2}, lambda answer: bool(text_of(answer))),
    ({"logit_bias": {"28": -100, "30": 5}}, lambda answer: bool(text_of(answer))),
    ({"response_format": {"type": "text"}}, lambda answer: bool(text_of(answer))),
    ({"response_format": {"type": "json_object"}}, lambda answer: text_of(answer).lstrip().startswith("{")),
    ({"response_format": FORM, "max_tokens": 60}, is_form),
    ({"extra_body": {"guided_json": PLACE}, "max_tokens": 60}, is_form),
    ({"extra_body": {"top_k": 20, "min_p": 0.05}, "temperature": 1, "seed": 2}, lambda answer: bool(text_of(answer))),
    ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}, is_call),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 60}, is_call),
    ({"tools": [TOOL], "tool_choice": "none"}, lambda answer: not answer.choices[0].message.tool_calls),
    ({"tools": [TOOL], "tool_choice": "auto"}, lambda answer: answer.choices[0].finish_reason is not None),
    (
        {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        lambda answer: bool(text_of(answer)),
    ),
]


@pytest.mark.parametrize(("fields", "holds"), FIELDS, ids=[" ".join(fields) or "none" for fields, _ in FIELDS])
def test_chat_completions_take_it_whole_and_streamed(
    client: OpenAI, endpoint: Tried, fields: dict[str, Any], holds: Callable[[Any], bool]
) -> None:
    answer = ask(client, endpoint, **fields)
    assert holds(answer) and answer.model == endpoint.model and answer.object == "chat.completion"
    if fields.get("n", 1) == 1 and (fields.get("seed") or fields.get("temperature", 0) == 0):
        parts = list(ask(client, endpoint, **fields, stream=True, stream_options={"include_usage": True}))
        assert streamed(parts) == (text_of(answer) or "")
        assert parts[-1].usage.completion_tokens == answer.usage.completion_tokens
        reasons = [part.choices[0].finish_reason for part in parts if part.choices]
        assert reasons[-1] == answer.choices[0].finish_reason and not any(reasons[:-1])


def test_a_stop_string_ends_it(client: OpenAI, endpoint: Tried) -> None:
    text = text_of(ask(client, endpoint))
    for stop in (text[4:7], [text[8:10], "never"]):
        first = stop if isinstance(stop, str) else stop[0]
        answer = ask(client, endpoint, stop=stop)
        assert text_of(answer) == text[: text.index(first)] and answer.choices[0].finish_reason == "stop"


def test_log_probabilities(client: OpenAI, endpoint: Tried) -> None:
    if endpoint.kind == "device":
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, endpoint, logprobs=True)
        assert refused.value.param == "logprobs"
        return
    answer = ask(client, endpoint, logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs.content
    assert "".join(each.token for each in told) == text_of(answer)
    assert all(len(each.top_logprobs) == 3 and each.token == each.top_logprobs[0].token for each in told)
    plain = client.completions.create(
        model=endpoint.model, prompt="The sea is", max_tokens=8, temperature=0, logprobs=2
    )
    chances: Any = plain.choices[0].logprobs
    assert "".join(chances.tokens) == plain.choices[0].text and chances.text_offset[0] == 0
    assert all(token in top for token, top in zip(chances.tokens, chances.top_logprobs, strict=True))


def test_text_completions(client: OpenAI, endpoint: Tried) -> None:
    asked: Any = {"model": endpoint.model, "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(prompt="The sea is", **asked)
    assert plain.choices[0].text and plain.usage is not None and plain.usage.completion_tokens <= 8
    echoed = client.completions.create(prompt="The sea is", echo=True, **asked)
    assert echoed.choices[0].text == "The sea is" + plain.choices[0].text
    parts = client.completions.create(prompt="The sea is", stream=True, **asked)
    assert "".join(part.choices[0].text for part in parts if part.choices) == plain.choices[0].text
    assert client.completions.create(prompt=[504, 3424, 314], **asked).usage.prompt_tokens == 3  # type: ignore[union-attr]
    assert len(client.completions.create(prompt="A", n=2, seed=3, **{**asked, "temperature": 1}).choices) == 2


def test_responses(client: OpenAI, endpoint: Tried) -> None:
    asked: Any = {"model": endpoint.model, "input": "Say hi.", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    assert whole.output_text and whole.status in ("completed", "incomplete") and whole.usage is not None
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and events[-1].type == f"response.{whole.status}"
    messages = [{"role": "user", "content": [{"type": "input_text", "text": "Say hi."}]}]
    assert client.responses.create(**{**asked, "input": messages}).output_text == whole.output_text
    assert client.responses.create(**asked, instructions="Be rude.", reasoning={"effort": None}).output_text
    form = {"format": {"type": "json_schema", "name": "place", "schema": PLACE}}
    formed = client.responses.create(**{**asked, "max_output_tokens": 60}, text=form)
    assert formed.output_text.startswith("{")
    tool = {"type": "function", "name": "add", "parameters": ADD}
    called = client.responses.create(**{**asked, "max_output_tokens": 60}, tools=[tool], tool_choice="required")
    [item] = called.output
    assert item.type == "function_call" and jsonschema.validate(json.loads(item.arguments), ADD) is None
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
    back: Any = [*messages, item.model_dump(exclude_none=True), output]
    assert client.responses.create(**{**asked, "input": back}, tools=[tool], tool_choice="none").output_text


def test_models_and_refusals(client: OpenAI, endpoint: Tried) -> None:
    assert client.models.retrieve(endpoint.model).id == endpoint.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.NotFoundError):
        ask(client, endpoint, model="nobody")
    for fields in ({"temperature": 3}, {"n": 0}, {"messages": []}, {"top_p": 2}, {"extra_body": {"min_tokens": 3}}):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, endpoint, **fields)
        assert refused.value.param and refused.value.code and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=endpoint.model, input="hi")


def test_a_field_that_nobody_reads_is_named(client: OpenAI, endpoint: Tried) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=endpoint.model, messages=QUESTION, max_tokens=2, extra_body={"temprature": 0}
    )
    assert raw.headers["x-outrider-ignored"] == "temprature"


SUBJECTS = ["copper", "the moon", "rain", "bread", "iron", "rivers", "sleep", "paper", "salt", "music"]
ASKED = [
    (f"{how} {subject}.", sampling)
    for subject in SUBJECTS
    for how, sampling in (
        ("Name one use of", {"temperature": 0}),
        ("Tell me about", {"temperature": 0}),
        ("Write a line on", {"temperature": 0.8, "seed": 7}),
        ("Praise", {"temperature": 1.0, "top_p": 0.9, "seed": 8}),
        ("Ask about", {"temperature": 0, "frequency_penalty": 1.0}),
    )
]


@pytest.mark.skipif(len(KINDS) == 1, reason="wants both endpoints")
def test_the_devices_text_is_the_verifiers(endpoints: dict[str, Tried]) -> None:
    """Of fifty requests."""
    assert len(ASKED) == 50
    with endpoints["verifier"].client() as first, endpoints["device"].client() as second:
        for question, sampling in ASKED:
            messages = [{"role": "user", "content": question}]
            texts = [
                text_of(ask(client, endpoints[kind], messages=messages, **sampling))
                for client, kind in ((first, "verifier"), (second, "device"))
            ]
            assert texts[0] == texts[1] and texts[0], (question, sampling)
