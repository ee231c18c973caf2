"""The HTTP front that verifier and device share: statuses, headers, bodies of any form, and clients that mean ill."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest

from outrider_core.chat.api.app import PARSERS
from tests.e2e.endpoints import Served
from tests.waiting import HANG


def said(peer: socket.socket) -> bytes:
    """All that comes until the socket is closed or cut."""
    came = bytearray()
    with suppress(ConnectionError):
        while got := peer.recv(65536):
            came += got
    return bytes(came)


def in_chunks(data: bytes, size: int) -> bytes:
    """The data in HTTP's chunks of `size` bytes, without the last, empty one."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


HEAD = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 8, 100])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/responses", b"/healthz", b"/nowhere"])
def test_a_body_in_tiny_chunks_is_cut(served: Served, path: bytes, size: int) -> None:
    """Before most of it is read, whether anybody wants it or not: each chunk takes the loop as long as a large one."""
    with served.connect() as peer:
        peer.sendall(HEAD % path)
        begin = in_chunks(b" " * 300 * size, size)
        with suppress(ConnectionError):
            for _ in range((16 << 20) // len(begin)):  # more than any buffer on the way
                peer.sendall(begin)
            raise AssertionError("read to its end")
    assert httpx.get(f"{served.root}/healthz", timeout=HANG).status_code == 200


def test_a_body_in_tiny_chunks_is_told_why(served: Served) -> None:
    with served.connect() as peer:
        peer.sendall(HEAD % b"/v1/chat/completions" + in_chunks(b" " * 258, 1))
        answer = said(peer)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"chunks" in answer and b'"invalid_request_error"' in answer


@pytest.mark.parametrize("size", [1, 300, 4096])
def test_a_body_in_chunks_is_read(served: Served, size: int) -> None:
    body = httpx.Request("POST", "http://x", json=served.body(n=9)).content
    body = body.ljust(200 if size == 1 else 300_000)
    with served.connect() as peer:
        peer.sendall(HEAD % b"/v1/chat/completions" + in_chunks(body, size) + b"0\r\n\r\n")
        answer = b""
        while b"\r\n\r\n{" not in answer or not answer.endswith(b"}"):
            answer += peer.recv(65536)
    assert b'"n"' in answer


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANY = {"type": "json_object"}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
#: as vLLM, SGLang, llama.cpp and Ollama spell it -> what it is here
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": SCHEMA}, FORM),
    ({"guided_json": json.dumps(SCHEMA)}, FORM),
    ({"json_schema": SCHEMA}, FORM),
    ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, FORM),
    ({"structured_outputs": {"json": SCHEMA}}, FORM),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, FORM),
    ({"structured_outputs": {"json_object": True}}, ANY),
    ({"format": SCHEMA}, FORM),
    ({"format": "json"}, ANY),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, FORM),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, FORM),
    ({"response_format": {"type": "json_object", "schema": None}}, ANY),
]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(("spelling", "form"), SPELLINGS)
def test_another_servers_spelling_is_obeyed(path: str, spelling: dict[str, Any], form: dict[str, Any]) -> None:
    if path == "/v1/responses" and "response_format" in spelling:
        pytest.skip("this call has no response_format")
    asked = PARSERS[path](json.dumps({"model": "m", **CALLS[path], **spelling}).encode())
    plain = PARSERS["/v1/chat/completions"](
        json.dumps({"model": "m", **CALLS["/v1/chat/completions"], "response_format": form}).encode()
    )
    assert asked.constraint(3, 100) == plain.constraint(3, 100) is not None and not asked.ignored


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("guided_regex", "a+"), ("guided_choice", ["a", "b"]), ("guided_grammar", "root ::= x"), ("regex", "a+")],
        *[
            ("grammar", 'root ::= "a"'),
            ("structured_outputs", {"choice": ["a"]}),
            ("structured_outputs", {"regex": "a"}),
        ],
        *[("structured_outputs", {"json": SCHEMA, "regex": "a"}), ("guided_json", "{"), ("guided_json", [1])],
        *[("format", "yaml"), ("json_schema", 3), ("min_tokens", 3), ("ignore_eos", True), ("stop_token_ids", [5])],
        *[("continue_final_message", True), ("add_generation_prompt", False), ("repetition_penalty", 1.1)],
        *[("repeat_penalty", 1.1), ("bad_words", ["x"]), ("best_of", 2), ("use_beam_search", True), ("mirostat", 2)],
        *[("chat_template_kwargs", {"enable_thinking": False}), ("skip_special_tokens", False), ("n_probs", 3)],
        *[("options", {"num_predict": 3}), ("web_search_options", {"search_context_size": "low"})],
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(served: Served, path: str, field: str, value: Any) -> None:
    body = {"model": served.model, **CALLS[path], field: value}
    answer = httpx.post(f"{served.root}{path}", json=body, timeout=HANG)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(field) and field in error["message"], answer.text


def test_two_forms_at_once_are_refused(served: Served) -> None:
    for more in ({"guided_json": SCHEMA, "json_schema": SCHEMA}, {"guided_json": SCHEMA, "response_format": ANY}):
        assert served.post(**more).json()["error"]["code"] == "invalid_value"


HARMLESS = {
    **{
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "guided_regex": None,
        "grammar": "",
    },
    **{"min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "add_generation_prompt": True, "regex": None},
    **{
        "structured_outputs": {"regex": None},
        "reasoning": {"effort": None, "summary": None},
        "best_of": 1,
        "format": "",
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_what_nobody_reads_is_named_in_a_header(served: Served, path: str, stream: bool) -> None:
    body = {"model": served.model, **CALLS[path], "max_tokens": 2, "stream": stream, **HARMLESS}
    answer = httpx.post(f"{served.root}{path}", json=body, timeout=HANG)
    assert answer.status_code == 200 and "x-outrider-ignored" not in answer.headers, answer.text
    typos = {"temprature": 0, "max_token": 3, "reasoning_effort": "low", "bad\r\nname": 1, "nothing": None}
    answer = httpx.post(f"{served.root}{path}", json={**body, **typos}, timeout=HANG)
    assert answer.headers["x-outrider-ignored"] == "temprature, max_token, reasoning_effort, ?"
    assert answer.status_code == 200


def test_members_that_nobody_reads_are_named_too(served: Served) -> None:
    messages = [{"role": "user", "content": "w5", "prefix": True, "name": "me", "refusal": None, "annotations": []}]
    answer = served.post(messages=messages, stream=True, stream_options={"continuous_usage_stats": True}, max_tokens=1)
    named = answer.headers["x-outrider-ignored"]
    assert set(named.split(", ")) == {"messages[0].prefix", "stream_options.continuous_usage_stats"}
    many = {f"{'x' * 90}{index}": 1 for index in range(1000)}
    assert len(served.post(**many, max_tokens=1).headers["x-outrider-ignored"]) < 4000
