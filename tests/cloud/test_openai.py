"""Chat completions over a real socket equal plain decoding; every refusal; nothing leaks; text is byte-safe."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import HTTPConnection
from starlette.routing import Mount
from structlog.testing import capture_logs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cloud.server.accounts import Accounts
from cloud.server.limits import Account, Gate
from cloud.server.openai import EngineBackend
from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.chat.api.app import MAX_BODY, api_routes
from outrider_core.chat.api.requests import NEUTRAL
from outrider_core.chat.boundary import boundary_of, render_chat
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.protocol.constraint import Constraint, Rules, pack_bias
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.text import REPLACEMENT, WINDOW_TOKENS, Detokeniser, StopStrings
from tests.cloud.drive import make_verifier, serve
from tests.tiny import plain_decode, tiny_model, tiny_tokenizer
from tests.waiting import HANG, until

VOCAB = 199
MODEL = tiny_model("llama", seed=4, vocab=VOCAB)
TOKENIZER = tiny_tokenizer(VOCAB)
NAME = "org/tiny"
QUESTION = "w10 w20 w30 w40 w50"
MESSAGES = [{"role": "user", "content": QUESTION}]
IDS = [1, 10, 20, 30, 40, 50, 3]
GREEDY = {"temperature": 0}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 24,
    "total_tokens": 31,
    "outrider": {"drafted_tokens": 0, "accepted_tokens": 0},
}
CONTEXT = 400


@contextmanager
def served(eos_ids: tuple[int, ...] = (), **settings: Any) -> Iterator[tuple[Verifier, str]]:
    """A verifier with the routes; yields it and the URL of /v1. At the end no session may be left."""
    verifier = make_verifier(MODEL, eos_ids, **{"max_model_len": CONTEXT, "kv_tokens": 4096, **settings})
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(TOKENIZER), NAME
    with serve(verifier) as address:
        yield verifier, f"http://{address}/v1"
        assert_freed(verifier)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as (_, url):
        yield url


def assert_freed(verifier: Verifier) -> None:
    assert until(lambda: not verifier.alive or len(verifier.sessions) == 0)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGES, "max_tokens": 24, **fields}


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json=body(**fields), timeout=HANG)


def complete(url: str, **fields: Any) -> dict[str, Any]:
    answer = post(url, **fields)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def text_of(whole: dict[str, Any]) -> str:
    text: str = whole["choices"][0]["message"]["content"]
    return text


def stream(url: str, **fields: Any) -> list[dict[str, Any]]:
    """All events' data but the last, which must be [DONE]."""
    answer = post(url, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def streamed_text(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def truth(sampling: Sampling, count: int, ids: Sequence[int] = IDS, **options: Any) -> list[int]:
    return plain_decode(MODEL, ids, sampling, count, **{"eos_ids": (), **options})


def words(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=True)
    return text


def slow_down(verifier: Verifier, seconds: float, fail_after: int | None = None) -> list[Any]:
    """The real engine, later; with `fail_after` the steps behind that many fail. Returns the steps, as they come."""
    step, steps = verifier.engine.step, list[Any]()

    def slow_step(segments: Any) -> Any:
        steps.append(segments)
        time.sleep(seconds)
        if fail_after is not None and len(steps) > fail_after:
            raise RuntimeError(f"out of memory near {QUESTION}")
        return step(segments)

    verifier.engine.step = slow_step  # type: ignore[method-assign]
    return steps


SAMPLINGS: list[tuple[dict[str, Any], Sampling]] = [
    (GREEDY, Sampling()),
    ({"seed": 7}, Sampling(1.0, seed=7)),
    ({"temperature": None, "top_p": 1, "seed": -2}, Sampling(1.0, seed=2**63 - 2)),
    ({"temperature": 0.7, "top_p": 0.9, "seed": 8}, Sampling(0.7, 0, 0.9, seed=8)),
    ({"temperature": 1.5, "top_k": 20, "min_p": 0.05, "seed": 9}, Sampling(1.5, 20, 1.0, 0.05, 9)),
    ({"temperature": 2, "top_p": 0, "seed": 9}, Sampling()),
]


@pytest.mark.parametrize(("fields", "sampling"), SAMPLINGS)
def test_text_equals_plain_decoding_streamed_and_whole(url: str, fields: dict[str, Any], sampling: Sampling) -> None:
    want = words(truth(sampling, 24))
    whole = complete(url, **fields)
    assert text_of(whole) == want
    assert whole["choices"][0]["finish_reason"] == "length"
    assert streamed_text(stream(url, **fields)) == want


def test_without_a_seed_answers_differ(url: str) -> None:
    assert text_of(complete(url)) != text_of(complete(url))


def test_fields_of_a_whole_answer(url: str) -> None:
    whole = complete(url, **GREEDY)
    drawn = truth(Sampling(), 24)
    assert whole.pop("id").startswith("chatcmpl-") and abs(whole.pop("created") - time.time()) < 60
    assert whole == {
        "object": "chat.completion",
        "model": NAME,
        "system_fingerprint": "tiny-target",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": words(drawn), "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": USAGE,
    }


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
def test_fields_of_the_chunks(url: str, options: dict[str, bool] | None) -> None:
    chunks = stream(url, **GREEDY, stream_options=options)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    for chunk in chunks:
        assert (chunk["object"], chunk["model"]) == ("chat.completion.chunk", NAME)
        assert chunk["system_fingerprint"] == "tiny-target"
    if options == {"include_usage": True}:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == USAGE
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(list(delta) == ["content"] and delta["content"] for delta in deltas[1:-1])
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_end_of_answer_is_no_text() -> None:
    drawn = truth(Sampling(), 12)
    eos = drawn[6]
    assert eos not in drawn[:6]
    with served((eos,)) as (_, url):
        whole = complete(url, **GREEDY)
        assert text_of(whole) == words(drawn[:6]) == streamed_text(stream(url, **GREEDY))
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == 7
        # drawn as the last token allowed, it still is the reason
        assert complete(url, **GREEDY, max_tokens=7)["choices"][0]["finish_reason"] == "stop"
        assert complete(url, **GREEDY, max_tokens=6)["choices"][0]["finish_reason"] == "length"


def test_stop_strings_across_token_borders(url: str) -> None:
    drawn = truth(Sampling(), 24)
    text = words(drawn)
    rng = random.Random(3)
    for _ in range(6):
        at = rng.randrange(4, len(text) - 8)
        stops = [text[at : at + 7], "never there", text[at + 1 : at + 12]]
        want = text[: min((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)[1]]
        whole = complete(url, **GREEDY, stop=stops)
        assert text_of(whole) == want == streamed_text(stream(url, **GREEDY, stop=stops))
        assert whole["choices"][0]["finish_reason"] == "stop"
        # no more tokens were drawn than the stop string needs
        assert words(drawn[: whole["usage"]["completion_tokens"] - 1]).find(stops[0]) == -1
    one = complete(url, **GREEDY, stop=words(drawn[3:5]))
    assert text_of(one) == words(drawn[:3]) + " "


def test_a_stop_string_that_only_began_is_sent(url: str) -> None:
    text = words(truth(Sampling(), 24))
    for stop in (text[-5:] + "!", text[-9:] + "?", []):
        whole = complete(url, **GREEDY, stop=stop)
        assert text_of(whole) == text and whole["choices"][0]["finish_reason"] == "length"
        assert streamed_text(stream(url, **GREEDY, stop=stop)) == text


def test_max_tokens(url: str) -> None:
    drawn = truth(Sampling(), 24)
    for count in (1, 2, 10):
        whole = complete(url, **GREEDY, max_tokens=count)
        assert text_of(whole) == words(drawn[:count]) and whole["usage"]["completion_tokens"] == count
    newer = complete(url, **GREEDY, max_tokens=None, max_completion_tokens=5)
    assert text_of(newer) == words(drawn[:5])


def test_the_context_ends_the_answer() -> None:
    with served(max_model_len=40) as (_, url):
        for most in (None, 34, 10**9):
            whole = complete(url, **GREEDY, max_tokens=most)
            assert text_of(whole) == words(truth(Sampling(), 33))
            assert whole["usage"] == {**USAGE, "completion_tokens": 33, "total_tokens": 40}
            assert whole["choices"][0]["finish_reason"] == "length"
        longest = [{"role": "user", "content": " ".join(["w9"] * 37)}]
        assert complete(url, **GREEDY, messages=longest)["usage"]["completion_tokens"] == 1
        too_long = [{"role": "user", "content": " ".join(["w9"] * 38)}]
        error = refused(post(url, messages=too_long), 400, "messages")
        assert error["code"] == "context_length_exceeded" and "40 tokens" in error["message"]


def test_roles_and_parts(url: str) -> None:
    parts = [{"type": "text", "text": "w20 w2"}, {"type": "text", "text": "1"}]
    messages = [
        {"role": "developer", "content": "w10", "name": "x"},
        {"role": "system", "content": "w11"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "w30"},
        {"role": "user", "content": "w40"},
    ]
    whole = complete(url, **GREEDY, messages=messages, max_tokens=5)
    ids = [1, 10, 3, 11, 3, 20, 21, 3, 30, 3, 40, 3]
    assert text_of(whole) == words(truth(Sampling(), 5, ids))
    assert whole["usage"]["prompt_tokens"] == len(ids)


def test_fields_that_do_nothing_are_accepted(url: str) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    neutral |= {"response_format": {"type": "text"}, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0}
    fields = {**GREEDY, **neutral, "audio": None, "user": "me", "store": True, "metadata": {"a": "b"}, "unheard_of": 1}
    assert text_of(complete(url, **fields)) == words(truth(Sampling(), 24))
    assert complete(url, **GREEDY, **dict.fromkeys(NEUTRAL))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto"},
        {"function_call": "auto"},
        {"max_tokens": -1, "max_completion_tokens": 24},
        {"max_completion_tokens": -1},
        {"top_k": -1},
        {"stop": ""},
        {"stop": ["", ""]},
        {"stop": []},
        {"seed": -1},
    ],
)
def test_what_common_clients_send_for_nothing_is_accepted(url: str, fields: dict[str, Any]) -> None:
    assert text_of(complete(url, **GREEDY, **fields)) == words(truth(Sampling(), 24))


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"logit_bias": {"7": 4.5, "9": -100, "8": 0}}, Constraint(len(IDS), 0.0, 0.0, *pack_bias({7: 4.5, 9: -100}))),
        ({"frequency_penalty": 1.5}, Constraint(len(IDS), 1.5)),
        ({"presence_penalty": -1}, Constraint(len(IDS), 0.0, -1.0)),
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6, seed=9)])
def test_biases_and_penalties(url: str, fields: dict[str, Any], constraint: Constraint, sampling: Sampling) -> None:
    want = truth(sampling, 24, rules=Rules(constraint))
    assert want != truth(sampling, 24)
    assert text_of(complete(url, temperature=sampling.temperature, seed=sampling.seed, **fields)) == words(want)


def test_an_assistant_may_have_said_nothing(url: str) -> None:
    silent = [{"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "assistant", "content": ""}]
    answers = {text_of(complete(url, **GREEDY, messages=[*MESSAGES, said])) for said in silent}
    assert len(answers) == 1


def test_seed_minus_one_is_random(url: str) -> None:
    answers = {text_of(complete(url, temperature=2.0, seed=-1)) for _ in range(5)}
    assert len(answers) > 1
    assert len({text_of(complete(url, temperature=2.0, seed=-2)) for _ in range(3)}) == 1


def test_what_no_call_asked_for_is_refused(url: str) -> None:
    result = {"role": "tool", "content": "x", "tool_call_id": "call_1"}
    error = refused(post(url, messages=[*MESSAGES, result]), 400, "messages[1].tool_call_id")
    assert "tool_call_id must be" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/embeddings", 404), ("POST", "/nowhere", 404), ("GET", "/chat/completions", 405)],
)
def test_unknown_routes_answer_as_openai_does(url: str, method: str, path: str, status: int) -> None:
    error = refused(httpx.request(method, url + path), status, None)
    assert error["code"] == ("unknown_url" if status == 404 else "method_not_allowed")
    assert "/v1/chat/completions" in error["message"]


def test_models(url: str) -> None:
    listed = httpx.get(f"{url}/models").json()
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == [NAME]
    card = httpx.get(f"{url}/models/{NAME}").json()
    assert card == listed["data"][0] and (card["object"], card["owned_by"]) == ("model", "outrider")
    error = refused(httpx.get(f"{url}/models/gpt-4o"), 404, "model")
    assert error["code"] == "model_not_found" and NAME in error["message"]


def refused(answer: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    """The error inside OpenAI's envelope."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["param"] == param
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    assert error["type"] == kind
    return error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("repetition_penalty", 1.1),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_unsupported_fields_are_named(url: str, name: str, value: Any, streaming: bool) -> None:
    error = refused(post(url, stream=streaming, **{name: value}), 400, name)
    assert error["code"] == "unsupported_parameter" and error["message"].startswith(f"{name} is not supported")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "x" * (1 << 15)}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format"),  # not with this target's tokenizer
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[...].content"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*MESSAGES, {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[...].content"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].id"),
        ({"messages": [*MESSAGES, {"role": "critic", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[...].content[...].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_invalid_fields_are_named(url: str, fields: dict[str, Any], param: str) -> None:
    answer = post(url, **fields)
    named = answer.json()["error"]["param"]
    refused(answer, 400, named)
    assert named.replace("[0]", "[...]") == param.replace("[0]", "[...]"), answer.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\xff"}', b"[" * 100_000, b"1" * 50_000]
)
def test_bodies_that_are_no_request(url: str, content: bytes) -> None:
    refused(httpx.post(f"{url}/chat/completions", content=content), 400, None)


def test_missing_model(url: str) -> None:
    refused(httpx.post(f"{url}/chat/completions", json={"messages": MESSAGES}), 400, "model")


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00", "\\ud800x\\ud800 w5 w6"])
def test_half_surrogate_pairs(url: str, escape: str) -> None:
    content = json.dumps(body()).replace("w10", escape)
    assert httpx.post(f"{url}/chat/completions", content=content).status_code == 400


def test_other_model(url: str) -> None:
    error = refused(post(url, model="gpt-4o"), 404, "model")
    assert error["code"] == "model_not_found" and NAME in error["message"]


def test_body_too_large(url: str) -> None:
    path = f"{url}/chat/completions"
    fits = json.dumps(body(**GREEDY, max_tokens=1)).encode()
    assert httpx.post(path, content=fits.ljust(MAX_BODY)).status_code == 200
    for size in (MAX_BODY + 1, 32 * MAX_BODY):
        refused(httpx.post(path, content=fits.ljust(size)), 413, None)
        # without a Content-Length
        chunks = (b" " * min(65536, size - at) for at in range(0, size, 65536))
        refused(httpx.post(path, content=chunks), 413, None)
    assert httpx.get(f"{url}/models").status_code == 200


def test_body_too_slow(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_core.chat.api.app.BODY_SECONDS", 0.3)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 0), timeout=HANG) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_busy_then_free() -> None:
    with served(max_sessions=1) as (verifier, url):
        slow_down(verifier, 0.02)
        with httpx.stream("POST", f"{url}/chat/completions", json=body(stream=True, max_tokens=300)) as first:
            lines = first.iter_lines()
            next(lines)
            for streaming in (False, True):
                answer = post(url, stream=streaming)
                assert refused(answer, 429, None)["code"] == "server_busy"
                assert int(answer.headers["retry-after"]) >= 1
        assert_freed(verifier)
        assert text_of(complete(url, **GREEDY, max_tokens=3)) == words(truth(Sampling(), 3))


def test_not_ready() -> None:
    with served() as (verifier, url):
        verifier.drain()
        answer = post(url)
        assert refused(answer, 503, None)["code"] == "not_ready"
        assert int(answer.headers["retry-after"]) >= 1


def test_a_step_that_fails() -> None:
    with served() as (verifier, url), capture_logs() as logs:
        slow_down(verifier, 0.0, fail_after=4)
        chunks = stream(url, **GREEDY)
        assert chunks.pop()["error"]["type"] == "server_error"
        assert streamed_text(chunks) == words(truth(Sampling(), 4))
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        refused(post(url), 500, None)
    assert any(entry["event"] == "step failed" for entry in logs)


def test_a_fault_nobody_foresaw_is_a_500_and_logs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = make_verifier(MODEL, ())
    tokenizer = tiny_tokenizer(VOCAB)
    failing = tiny_tokenizer(VOCAB)
    failing.chat_template = "{{ messages[0]['content'] / 2 }}"
    missing = tiny_tokenizer(VOCAB)
    missing.chat_template = None
    strict = tiny_tokenizer(VOCAB)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    empty = tiny_tokenizer(VOCAB)
    empty.chat_template = "{{ '' }}"
    larger = tiny_tokenizer(VOCAB + 5)
    larger.chat_template = f"w{VOCAB + 3}"
    cases = [
        (tokenizer, 500, None, "internal_error"),
        (failing, 400, "messages", "TypeError"),
        (missing, 400, "model", "no chat template"),
        (strict, 400, "messages", "roles must alternate"),
        (empty, 400, "messages", "empty prompt"),
        (larger, 400, "messages", str(VOCAB + 3)),
    ]
    chats = [chat_tokenizer_of(case[0]) for case in [*cases, (tokenizer,)]]
    monkeypatch.setattr(chats[0], "encode_chat", lambda messages, tools: 1 / 0)
    account = Accounts().authenticate(None)
    assert account is not None

    def everybody(_: HTTPConnection) -> Account:
        return account

    gate = Gate(Settings(), verifier.metrics)
    routes: Any = [
        Mount(
            f"/{index}",
            routes=api_routes(EngineBackend(verifier, NAME, each, everybody, gate)),
        )
        for index, each in enumerate(chats)
    ]
    monkeypatch.setattr("cloud.app.page_routes", lambda *_: routes)
    with serve(verifier) as address, capture_logs() as logs:
        for index, (_, status, param, text) in enumerate(cases):
            error = refused(post(f"http://{address}/{index}/v1"), status, param)
            assert text == error["code"] or text in error["message"]
        assert text_of(complete(f"http://{address}/{len(cases)}/v1", **GREEDY)) == words(truth(Sampling(), 24))
        assert_freed(verifier)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["completion failed"]
    assert "w10" not in str(logs) and str(IDS)[1:-1] not in str(logs)


def test_eight_at_once_do_not_mix(url: str) -> None:
    asked = [[{"role": "user", "content": f"w{i} w{2 * i} w9"}] for i in range(5, 13)]

    def ask(index: int) -> str:
        fields = {"messages": asked[index], "seed": 5}
        return streamed_text(stream(url, **fields)) if index % 2 else text_of(complete(url, **fields))

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(ask, range(8)))
    for messages, text in zip(asked, texts, strict=True):
        ids = TOKENIZER.apply_chat_template(messages, return_dict=False)
        assert text == words(truth(Sampling(1.0, seed=5), 24, ids))


def test_what_is_said_is_never_a_turn(url: str) -> None:
    said = [{"role": "user", "content": "w5 </s> <s> w6"}]
    ids = boundary_of(TOKENIZER).encode(said, lambda messages: render_chat(TOKENIZER, messages))
    special = set(TOKENIZER.all_special_ids) - {TOKENIZER.unk_token_id}
    silent = TOKENIZER.apply_chat_template([{"role": "user", "content": ""}], return_dict=False)
    assert [i for i in ids if i in special] == [i for i in silent if i in special]
    assert ids != TOKENIZER.apply_chat_template(said, return_dict=False)
    assert text_of(complete(url, **GREEDY, messages=said)) == words(truth(Sampling(), 24, ids))


def test_one_connection_serves_many_requests(url: str) -> None:
    want = words(truth(Sampling(), 24))
    with httpx.Client() as client:
        for streaming in (False, True, False, True):
            answer = client.post(f"{url}/chat/completions", json=body(**GREEDY, stream=streaming))
            assert want.split()[-1] in answer.text
            assert client.post(f"{url}/chat/completions", json=body(n=0)).status_code == 400
            [connection] = client._transport._pool.connections  # type: ignore[attr-defined]
        assert "Request Count: 8" in repr(connection)


def test_no_feature_rows_are_computed() -> None:
    with served() as (verifier, url):
        produced: list[int] = []
        rows = verifier.features.rows

        def counted(pool_rows: Sequence[int], positions: Sequence[int]) -> Any:
            produced.append(len(pool_rows))
            return rows(pool_rows, positions)

        verifier.features.rows = counted  # type: ignore[method-assign]
        long = [{"role": "user", "content": " ".join(f"w{i}" for i in range(5, 90))}]
        complete(url, messages=long)
        stream(url, messages=long)
        assert produced == []


@pytest.mark.parametrize("phase", ["prefill", "whole", "stream"])
def test_a_client_that_hangs_up_frees_its_session(phase: str) -> None:
    with served() as (verifier, url):
        steps = slow_down(verifier, 0.05)  # 300 tokens would take 300 of them
        fields = body(stream=phase == "stream", max_tokens=300)
        if phase == "prefill":
            fields["messages"] = [{"role": "user", "content": " ".join(["w7"] * 390)}]  # 25 chunks
        if phase == "stream":
            with httpx.stream("POST", f"{url}/chat/completions", json=fields) as answer:
                lines = answer.iter_lines()
                assert [next(lines)[:6] for _ in range(3)] == ["data: ", "", "data: "]
                assert len(verifier.sessions) == 1
        else:
            request = httpx.Request("POST", f"{url}/chat/completions", json=fields)
            with socket.create_connection((request.url.host, request.url.port or 0)) as client:
                head = f"POST {request.url.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(request.content)}\r\n\r\n"
                client.sendall(head.encode() + request.content)
                assert until(lambda: len(verifier.sessions) == 1 and len(steps) >= 3)
                assert len(verifier.sessions) == 1
        assert_freed(verifier)
        assert len(steps) < 200
        assert verifier.engine.pool.owners() == []


def test_a_client_that_hangs_up_while_it_sends(url: str) -> None:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 0)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert text_of(complete(url, **GREEDY, max_tokens=2)) == words(truth(Sampling(), 2))


def test_a_reader_that_stands_still_holds_no_session() -> None:
    name = "tiny" * 5000  # stands in every event, so that they soon fill all buffers on the way
    verifier = make_verifier(MODEL, (), max_model_len=CONTEXT, kv_tokens=4096)
    content = json.dumps(body(**GREEDY, model=name, stream=True, max_tokens=300)).encode()
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(TOKENIZER), name
    with serve(verifier) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = address.split(":")
        client.connect((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        client.sendall(f"{head}connection: close\r\n\r\n".encode() + content)
        received = client.recv(1000)  # the answer has begun
        assert_freed(verifier)
        client.settimeout(HANG)
        while chunk := client.recv(1 << 20):
            received += chunk
        assert len(received) > 300 * len(name) and b"data: [DONE]" in received
        pieces = len(words(truth(Sampling(), 300)).split())
        assert received.count(b'"content":"') == 1 + pieces


def test_an_engine_that_stops_ends_the_answer() -> None:
    with served() as (verifier, url):
        slow_down(verifier, 0.05)
        with httpx.stream("POST", f"{url}/chat/completions", json=body(stream=True, max_tokens=300)) as answer:
            lines = answer.iter_lines()
            next(lines)
            verifier.batcher.stop()
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "not_ready"


# --- text ---------------------------------------------------------------------------------------------------------

CORPUS = [
    "naïve café 你好，世界 你们好吗",
    "👩‍👩‍👧‍👦 family 🇪🇺 flags 👍🏽 thumbs",
    "Ωμέγα — “quotes” …",
    "日本語のテキスト 😀😃😄",
]


def byte_level() -> Tokenizer:
    """A real byte-level BPE whose merges cross some characters and split others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's way: words with a mark for the space, unknown characters as single bytes."""
    pieces = ["<unk>", "▁", "▁the", "▁cat", "a", "b", "c", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
TEXTS = st.text(st.sampled_from("ab é你好😀👍🏽 \n\ufffd‍世") | st.characters(exclude_categories=["Cs"]), max_size=40)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    end = tokenizer.token_to_id("<|end|>")
    detokeniser = Detokeniser(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), {end})
    return [*(detokeniser.push(token) for token in ids), detokeniser.flush()]


def test_the_vocabulary_splits_characters() -> None:
    """Else the tests below would prove nothing."""
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tokenizer.encode("cat 😎龍").ids
        assert REPLACEMENT in "".join(tokenizer.decode([token]) for token in ids)
        assert "".join(pieces_of(tokenizer, ids)) == "cat 😎龍"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
@given(text=TEXTS)
def test_text_comes_out_as_it_went_in(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    whole = tokenizer.decode(ids)
    assert_pieces(pieces_of(tokenizer, ids), whole)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60))
def test_any_bytes(ids: list[int]) -> None:
    assert_pieces(pieces_of(BYTE_LEVEL, ids), BYTE_LEVEL.decode(ids))


def assert_pieces(pieces: list[str], whole: str) -> None:
    """At every moment what was sent is a prefix of the whole; in the end only cut-off bytes are missing."""
    sent = ""
    for piece in pieces:
        sent += piece
        assert whole.startswith(sent)
    assert whole[len(sent) :].strip(REPLACEMENT) == ""
    if not whole.endswith(REPLACEMENT):
        assert sent == whole


def test_a_long_run_of_replacement_characters_keeps_the_window_short() -> None:
    ids = BYTE_LEVEL.encode("x" + REPLACEMENT * 500 + "y").ids
    longest = 0

    def decode(window: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return BYTE_LEVEL.decode(window)

    detokeniser = Detokeniser(decode)
    text = "".join(detokeniser.push(token) for token in ids) + detokeniser.flush()
    assert text == "x" + REPLACEMENT * 500 + "y"
    assert len(ids) > 500 and longest <= WINDOW_TOKENS + 8


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    borders=st.lists(st.integers(0, 20), max_size=8),
)
def test_stop_strings_do_not_depend_on_borders(text: str, stops: list[str], borders: list[int]) -> None:
    cuts = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    finder = StopStrings(stops)
    sent = "".join(finder.push(text[a:b]) for a, b in pairwise(cuts)) + finder.flush()
    # letter by letter: the first moment that a stop string is complete, cut before the longest one
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    want = text
    if ends:
        want = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    assert (sent, finder.hit) == (want, bool(ends))
