"""A request can be followed from the client to the log, and every reply is counted and timed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from cloud.server.service import Verifier
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from tests.cloud.drive import Client, make_verifier, serve
from tests.tiny import plain_decode, tiny_model, tiny_tokenizer
from tests.waiting import until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture
def verifier() -> Verifier:
    verifier = make_verifier(tiny_model(), (), kv_tokens=2048)
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tiny_tokenizer()), "tiny"
    return verifier


@pytest.fixture
def logged(verifier: Verifier) -> Iterator[tuple[str, list[Any]]]:
    with capture_logs() as logs, serve(verifier) as address:
        yield address, logs  # type: ignore[misc]


def line_of(logs: list[Any], event: str) -> Any:
    """The one line of this event; a reply may be with its client before it is written."""
    assert until(lambda: any(line["event"] == event for line in logs))
    [line] = [line for line in logs if line["event"] == event]
    return line


def ask(address: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return httpx.post(f"http://{address}/v1/chat/completions", json={**ASK, **fields}, headers=headers or {})


def test_a_completion_is_followed_by_its_ids(logged: tuple[str, list[Any]]) -> None:
    address, logs = logged
    answer = ask(address, {"X-Request-Id": "my-request.1", "traceparent": PARENT})
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("my-request.1", PARENT)
    line = line_of(logs, "completion")
    assert (line["request"], line["trace"]) == ("my-request.1", "0af7651916cd43dd8448eb211c80319c")
    assert line["completion"] == answer.json()["id"] and line["completion"].startswith("chatcmpl-")
    assert (line["finish"], line["tokens"], line["prompt_tokens"]) == ("length", 3, 4)
    opened = line_of(logs, "session opened")
    assert opened["request"] == "my-request.1"


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "line\tbreak", "ü"])
def test_ids_that_do_not_belong_into_a_log_are_replaced(logged: tuple[str, list[Any]], name: str) -> None:
    address, _ = logged
    headers = {b"x-request-id": name.encode("latin-1"), b"traceparent": b"00-x"}
    answer = httpx.get(f"http://{address}/healthz", headers=headers)  # type: ignore[arg-type]
    assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"]) and "traceparent" not in answer.headers


def test_every_reply_has_an_id_also_refusals(logged: tuple[str, list[Any]]) -> None:
    address, _ = logged
    for path, status in (("healthz", 200), ("nowhere", 404), ("v1/models/other", 404), ("v1/chat/completions", 405)):
        answer = httpx.get(f"http://{address}/{path}", headers={"X-Request-Id": path.replace("/", "-")})
        assert answer.status_code == status and answer.headers["x-request-id"] == path.replace("/", "-")


def test_a_device_finds_its_session_in_the_log(logged: tuple[str, list[Any]]) -> None:
    address, logs = logged
    session = bytes(range(16))
    with Client(address, headers={"X-Request-Id": "phone-7"}) as client:
        assert client.socket.response is not None and client.socket.response.headers["x-request-id"] == "phone-7"
        client.open([5, 6, 7], session=session)
    opened = line_of(logs, "session opened")
    assert (opened["session"], opened["request"]) == (session[:4].hex(), "phone-7")
    connected = line_of(logs, "device connected")
    assert connected["request"] == "phone-7"


def test_replies_are_counted_and_timed(logged: tuple[str, list[Any]], verifier: Verifier) -> None:
    address, _ = logged

    def sample(name: str, **labels: str) -> float:
        return verifier.metrics.registry.get_sample_value(f"outrider:{name}", labels) or 0.0

    ask(address)
    ask(address, stream=True)
    ask(address, stop="w")
    ask(address, n=9)
    httpx.get(f"http://{address}/made/up/1")
    with httpx.stream("POST", f"http://{address}/v1/chat/completions", json={**ASK, "max_tokens": 100, "stream": True}):
        pass  # hung up
    truth = plain_decode(tiny_model(), [5, 6, 7], Sampling(), 3, eos_ids=())
    with Client(address) as client:
        client.open([5, 6, 7])
        assert client.verify(1, 3, TokenTree.chain(truth[:2])).bonus == truth[2]
        chat = "/v1/chat/completions"
        assert sample("http_requests_total", path=chat, status="200") == 4
        assert sample("http_requests_total", path=chat, status="400") == 1
        assert sample("http_requests_total", path="other", status="404") == 1
        assert sample("http_requests_total", path="/v1/verify", status="101") == 1
        for path in ("/v1/completions", "/v1/responses", "/v1/models"):  # every route has a name of its own
            status = str(httpx.post(f"http://{address}{path}", json={}).status_code)
            assert sample("http_requests_total", path=path, status=status) == 1
        assert sample("http_requests_total", path="other", status="404") == 1
        ended = {reason: sample("request_success_total", finished_reason=reason) for reason in ("length", "stop")}
        assert ended == {"length": 2, "stop": 1}
        assert sample("time_to_first_token_seconds_count") >= 3 and sample("inter_token_latency_seconds_count") >= 4
        assert sample("verify_seconds_count") == 1
        assert sample("e2e_request_latency_seconds_count") >= 3
