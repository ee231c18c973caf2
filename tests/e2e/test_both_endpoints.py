"""Verifier and device answer the same requests alike over the OpenAI API, with one target behind both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from outrider_core.chat.api.app import MAX_BODY
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from tests.e2e.endpoints import MESSAGES, PAGE, Folders, Served
from tests.e2e.stack import MAX_NEW, oracle
from tests.waiting import HANG

EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def texts(folders: Folders, bundle: Bundle) -> dict[Sampling, str]:
    """Of plain decoding, by sampling."""
    prompt = bundle.render_chat(MESSAGES)
    samplings = (Sampling(), Sampling(0.8, seed=5), Sampling(0.8, seed=6))
    return {
        each: bundle.tokenizer.decode(oracle(folders, prompt, each), skip_special_tokens=True) for each in samplings
    }


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=5)])
def test_the_text_is_plain_decodings_whole_and_streamed(
    served: Served, client: OpenAI, texts: dict[Sampling, str], sampling: Sampling
) -> None:
    asked: Any = served.body(temperature=sampling.temperature, seed=sampling.seed)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == texts[sampling] and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == MAX_NEW
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == texts[sampling] and parts[-1].usage is not None
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens


def test_choices_stop_strings_and_the_other_calls(served: Served, client: OpenAI, texts: dict[Sampling, str]) -> None:
    asked: Any = served.body(temperature=0.8, seed=5, n=2)
    contents = [each.message.content for each in client.chat.completions.create(**asked).choices]
    assert contents == [texts[Sampling(0.8, seed=seed)] for seed in (5, 6)]
    text = texts[Sampling()]
    stopped = client.chat.completions.create(**served.body(stop=text[10:14])).choices[0]
    assert stopped.message.content == text[: text.index(text[10:14])] and stopped.finish_reason == "stop"
    response = client.responses.create(
        model=served.model, input=MESSAGES[0]["content"], temperature=0, max_output_tokens=MAX_NEW
    )
    assert response.output_text == text and response.status == "incomplete"
    plain = client.completions.create(model=served.model, prompt=[5, 6, 7], temperature=0, max_tokens=3, echo=True)
    assert plain.choices[0].text.startswith("w5 w6 w7") and plain.usage is not None
    assert plain.usage.prompt_tokens == plain.usage.completion_tokens == 3


def test_models(served: Served) -> None:
    [card] = httpx.get(f"{served.url}/models").json()["data"]
    assert card["id"] == served.model and httpx.get(f"{served.url}/models/{served.model}").json() == card
    assert httpx.get(f"{served.url}/models/gpt-9").json()["error"]["code"] == "model_not_found"


def test_refusals_have_openais_form(served: Served) -> None:
    chat = f"{served.url}/chat/completions"
    long = [{"role": "user", "content": "w1 " * 5000}]
    cases = [
        (served.post(model="gpt-9"), 404, "model_not_found"),
        (served.post(n=9), 400, "invalid_value"),
        (served.post(messages=[]), 400, "invalid_value"),
        (served.post(messages=long), 400, "context_length_exceeded"),
        (served.post(messages=long, stream=True), 400, "context_length_exceeded"),
        (httpx.post(chat, content=b"{"), 400, "invalid_json"),
        (httpx.post(chat, content=json.dumps(served.body()).encode().ljust(MAX_BODY + 1)), 413, "request_too_large"),
        (httpx.get(chat), 405, "method_not_allowed"),
        (httpx.post(f"{served.url}/embeddings", json={}), 404, "unknown_url"),
    ]
    for answer, status, code in cases:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code) and error["message"], answer.text
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_one_connection_takes_many_requests(served: Served) -> None:
    with httpx.Client(base_url=served.url) as client:
        for count in (1, 2, 3):
            assert client.post("/chat/completions", json=served.body(n=9)).status_code == 400
            [connection] = client._transport._pool.connections  # type: ignore[attr-defined]
            assert f"Request Count: {count}" in repr(connection)


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_that_is_allowed_reads_answers_and_errors(served: Served, stream: bool) -> None:
    chat = f"{served.url}/chat/completions"
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    allowed = httpx.options(chat, headers={"Origin": PAGE, **wanted, "Access-Control-Request-Private-Network": "true"})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
    assert allowed.headers["access-control-allow-private-network"] == "true"
    refused = httpx.options(chat, headers={"Origin": EVIL, **wanted})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    for more, status in (({}, 200), ({"n": 9}, 400)):
        body = served.body(max_tokens=2, stream=stream, **more)
        answer = httpx.post(chat, json=body, headers={"Origin": PAGE}, timeout=HANG)
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE


def test_strangers_pages_and_names_are_refused(served: Served) -> None:
    for headers in ({"Origin": EVIL}, {"Host": "evil.example"}):
        answer = httpx.get(f"{served.url}/models", headers=headers)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    page = {"Origin": "http://evil.example", "Host": "evil.example"}
    assert httpx.post(f"{served.url}/chat/completions", json=served.body(), headers=page).status_code == 403
