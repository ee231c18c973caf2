"""The common behaviour of servers of these calls, as the tests of llama.cpp and vLLM expect it of theirs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import ANSWER, KEY, Tried

pytestmark = pytest.mark.slow


def body(endpoint: Tried, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say hi."}]
    return {"model": endpoint.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def post(endpoint: Tried, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    asked = body(endpoint, **fields)
    return httpx.post(f"{endpoint.url}/{path}", json=asked, headers={"Authorization": f"Bearer {KEY}"}, timeout=ANSWER)


def content(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_the_same_request_has_the_same_answer(endpoint: Tried) -> None:
    for more in ({}, {"temperature": 1.0, "seed": 42}):
        assert len({content(post(endpoint, **more)) for _ in range(3)}) == 1
    assert len({content(post(endpoint, temperature=2.0, seed=seed)) for seed in range(4)}) > 1


def test_requests_at_once_are_answered_as_one_by_one(endpoint: Tried) -> None:
    questions = [[{"role": "user", "content": f"Count to {number}."}] for number in range(6)]
    alone = [content(post(endpoint, messages=each)) for each in questions]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda each: content(post(endpoint, messages=each)), questions)) == alone


def test_a_client_that_hangs_up_keeps_nobody_waiting(endpoint: Tried) -> None:
    """More of them than an endpoint answers at once; their answers would take many times as long as an answer may."""
    want, headers = content(post(endpoint)), {"Authorization": f"Bearer {KEY}"}
    for _ in range(40):
        asked = body(endpoint, stream=True, max_tokens=1900, logit_bias={"2": -100, "0": -100})
        url = f"{endpoint.url}/chat/completions"
        with httpx.stream("POST", url, json=asked, headers=headers, timeout=ANSWER) as stream:
            next(stream.iter_lines())
    assert content(post(endpoint)) == want


def test_content_parts_are_one_text(endpoint: Tried) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi."}]
    assert content(post(endpoint, messages=[{"role": "user", "content": parts}])) == content(post(endpoint))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_are_read(endpoint: Tried, role: str) -> None:
    """They change the answer, and count as they are long."""
    question = {"role": "user", "content": "Say hi."}

    def asked(instructions: str) -> httpx.Response:
        return post(endpoint, messages=[{"role": role, "content": instructions}, question], max_tokens=24)

    french, long = asked("You speak French only."), asked("You speak French only." + " Bien sûr." * 20)
    assert content(french) != content(asked("You are a pirate. You only ever say: arrr!"))
    assert long.json()["usage"]["prompt_tokens"] >= french.json()["usage"]["prompt_tokens"] + 40


def test_text_of_any_script_comes_whole(endpoint: Tried) -> None:
    for text in ("h\u00e9llo w\u00f6rld", "\u4f60\u597d", "\U0001f600" * 5, "a\u0000b", "\u202e", "<|im_end|>"):
        answer = post(endpoint, messages=[{"role": "user", "content": f"Repeat: {text}"}], stream=True)
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]" and all(json.loads(line)["object"] for line in lines[:-1])
        echoed = post(endpoint, "completions", messages=None, prompt=text, echo=True, max_tokens=1)
        assert echoed.status_code == 200, echoed.text


def test_a_prompt_that_is_too_long_is_refused(endpoint: Tried) -> None:
    answer = post(endpoint, messages=[{"role": "user", "content": "word " * 150_000}])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        *[
            {"messages": each}
            for each in (None, "hi", [], [{}], [{"role": "user"}], [{"role": "nobody", "content": "a"}])
        ],
        *[{"max_tokens": each} for each in (0, -2, "8", 1.5)],
        *[{"temperature": each} for each in (-0.1, 2.1, "warm")],
        *[{"top_p": -1}, {"top_k": -2}, {"min_p": 2}, {"n": 0}, {"stop": 3}, {"stop": ["a"] * 5}, {"seed": "a"}],
        *[{"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}, {"logit_bias": {"a": 1}}],
        *[{"tools": [{"type": "function"}]}, {"tool_choice": "some"}, {"stream": "yes"}, {"model": None}],
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(endpoint: Tried, fields: dict[str, Any]) -> None:
    answer = post(endpoint, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert error["param"].split(".")[0].split("[")[0] == next(iter(fields)) and error["message"]


def test_what_is_no_request_is_refused(endpoint: Tried) -> None:
    for sent in (b"", b"{", b"[]", b"null", b"\xff", b"{" * 5000, b"1"):
        url, headers = f"{endpoint.url}/chat/completions", {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(url, content=sent, headers=headers, timeout=ANSWER)
        assert answer.status_code == 400 and answer.json()["error"]["message"], sent


def test_tool_results_travel_back(endpoint: Tried) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    assert post(endpoint, messages=messages, tools=[tool]).status_code == 200
