"""The HTTP front that verifier and device share: statuses, headers, bodies of any form, and clients that mean ill."""

from __future__ import annotations

import gzip
import json
import socket
import time
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from outrider_core import http_protocol
from outrider_core.chat.api.app import PARSERS
from outrider_core.drafting.bundle import Bundle
from tests.e2e.endpoints import PAGE, Folders, Served, serving
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


GETS = ["/v1/models", "/healthz", "/livez", "/ping", "/readyz", "/health", "/version"]


@pytest.mark.parametrize("path", GETS)
def test_what_is_read_is_read_by_head_too_and_with_a_slash(served: Served, path: str) -> None:
    whole = httpx.get(f"{served.root}{path}", timeout=HANG)
    head = httpx.head(f"{served.root}{path}", timeout=HANG)
    slash = httpx.get(f"{served.root}{path}/", timeout=HANG)
    assert whole.status_code == head.status_code == slash.status_code == 200 and not head.content
    assert slash.content == whole.content and head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json"])
def test_a_page_that_may_not_ask_is_not_told_what_is_served(served: Served, path: str) -> None:
    told = httpx.get(f"{served.root}{path}", headers={"origin": "https://elsewhere.example"}, timeout=HANG)
    assert told.status_code == 403 and served.model not in told.text


def test_the_version_is_told(served: Served) -> None:
    assert httpx.get(f"{served.root}/version").json() == {"version": version("outrider")}


@pytest.mark.parametrize("path", CALLS)
def test_a_slash_behind_a_call_is_no_redirect(served: Served, path: str) -> None:
    body = {"model": served.model, **CALLS[path], "max_tokens": 2}
    for slashes in ("/", "//"):
        assert httpx.post(f"{served.root}{path}{slashes}", json=body, timeout=HANG).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *[(method, path, "POST") for path in CALLS for method in ("GET", "HEAD", "PUT", "DELETE")],
        *[(method, "/v1/models", "GET, HEAD") for method in ("POST", "DELETE")],
        *[("POST", path, "GET, HEAD") for path in GETS],
        ("POST", "/v1/models/some", "GET, HEAD"),
    ],
)
def test_another_method_is_told_which_are_allowed(served: Served, method: str, path: str, allowed: str) -> None:
    answer = httpx.request(method, f"{served.root}{path}", timeout=HANG)
    assert answer.status_code == 405 and answer.headers["allow"] == allowed


def test_a_plain_request_for_the_websocket_is_told_to_upgrade(served: Served) -> None:
    answer = httpx.get(f"{served.root}/v1/verify", timeout=HANG)
    if served.kind == "verifier":
        assert answer.status_code == 426 and answer.headers["upgrade"] == "websocket"
    else:
        assert answer.status_code == 404


def packed(served: Served, body: bytes, coding: str = "gzip") -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return httpx.post(f"{served.url}/chat/completions", content=body, headers=headers, timeout=HANG)


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip"])
def test_a_body_in_gzip_is_read(served: Served, coding: str) -> None:
    body = json.dumps(served.body()).encode()
    plain = httpx.post(f"{served.url}/chat/completions", content=body, timeout=HANG)
    answer = packed(served, gzip.compress(body), coding)
    assert answer.status_code == 200 and answer.json()["choices"] == plain.json()["choices"]
    assert packed(served, body, "identity").status_code == 200


def test_a_bad_body_in_gzip_is_refused(served: Served) -> None:
    body = gzip.compress(json.dumps(served.body()).encode())
    cases = [
        (b"{}", "gzip", 400),
        (body[:-9], "gzip", 400),
        (body + b"x", "gzip", 400),
        (body + body, "gzip", 400),
        (b"", "gzip", 400),
        (gzip.compress(b" " * (64 << 20)), "gzip", 413),
        (body, "br", 415),
        (body, "gzip, gzip", 415),
        (body, "deflate", 415),
    ]
    for content, coding, status in cases:
        answer = packed(served, content, coding)
        assert answer.status_code == status and answer.json()["error"]["message"], (coding, answer.text)
        assert status != 415 or answer.headers["accept-encoding"] == "gzip"


def test_a_byte_order_mark_is_no_fault(served: Served) -> None:
    for body in (json.dumps(served.body()).encode("utf-8-sig"),):
        assert packed(served, body, "identity").status_code == packed(served, gzip.compress(body)).status_code == 200
    answer = packed(served, json.dumps(served.body()).encode("utf-16"), "identity")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


#: what OpenAI's JavaScript client sends
STAINLESS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
STAINLESS += "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout,user-agent"


@pytest.mark.parametrize("path", [*CALLS, "/v1/models"])
def test_pages_that_use_openais_client_get_their_preflight(served: Served, path: str) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": STAINLESS}
    allowed = httpx.options(f"{served.root}{path}", headers={"Origin": PAGE, **asks}, timeout=HANG)
    names = {name.strip().lower() for name in allowed.headers["access-control-allow-headers"].split(",")}
    assert allowed.status_code == 200 and names >= set(STAINLESS.split(","))
    headers = {"Origin": PAGE, "X-Request-Id": "mine.1"}
    answer = httpx.post(f"{served.root}{path}", json={}, headers=headers, timeout=HANG)
    assert answer.headers["x-request-id"] == "mine.1"
    exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert exposed >= {"retry-after", "x-request-id", "x-outrider-ignored"}


def test_a_kept_connection_outlives_the_pools_of_clients(
    served: Served, folders: Folders, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bounds the headers of a request does not bound the wait for it; what has begun is bounded."""
    assert http_protocol.KEEP_ALIVE > 90  # Go's
    monkeypatch.setattr("outrider.cli.serve.HEAD_SECONDS", 0.3)
    options = {"request_seconds": 0.3} if served.kind == "verifier" else {}
    ask = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving(served.kind, folders, bundle, **options) as hasty, hasty.connect() as peer:
        for _ in range(2):
            peer.sendall(ask)
            answer = b""
            while not answer.endswith(b"]}"):
                answer += (more := peer.recv(65536))
                assert more, answer
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(1)
        peer.sendall(ask[:20])
        assert said(peer) == b""
        monkeypatch.setattr("outrider_core.http_protocol.KEEP_ALIVE", 0.3)
        with hasty.connect() as idle:
            idle.sendall(ask)
            assert said(idle).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_a_token_has_no_case(folders: Folders, bundle: Bundle, scheme: str) -> None:
    with serving("device", folders, bundle, key="secret") as served:
        answer = httpx.get(f"{served.url}/models", headers={"Authorization": f"{scheme} secret"}, timeout=HANG)
        assert answer.status_code == 200
