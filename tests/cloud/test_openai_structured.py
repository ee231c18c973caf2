"""OpenAI's own client asks a real verifier for structured output: valid, and plain constrained decoding's text."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from cloud.server.limits import BYTES_PER_TOKEN, Account
from cloud.server.openai import EngineCompletion
from cloud.server.service import Verifier
from outrider_core.chat.api.constraints import constraint_of
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.cloud.test_openai import assert_freed
from tests.cloud.test_structured import EOS, MODEL, PERSON, TOKENIZER, VOCAB, json_verifier, rules
from tests.tiny import plain_decode
from tests.waiting import HANG, until
from tests.walks import HeldWalks

NAME = "org/tiny"
MESSAGES: Any = [{"role": "user", "content": "a person?"}]
IDS = [1, *TOKENIZER.encode("a person?"), EOS]
MOST = 300


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Verifier, OpenAI]]:
    verifier = json_verifier()
    verifier.model_name = NAME
    with serve(verifier) as address, OpenAI(base_url=f"http://{address}/v1", api_key="none") as client:
        yield verifier, client


@pytest.fixture
def client(served: tuple[Verifier, OpenAI]) -> OpenAI:
    return served[1]


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


def truth(sampling: Sampling, **fields: Any) -> str:
    constraint = constraint_of(len(IDS), VOCAB, **fields)
    assert constraint is not None
    tokens = plain_decode(MODEL, IDS, sampling, MOST, rules=rules(constraint))
    text: str = TOKENIZER.decode(tokens, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema(client: OpenAI, temperature: float, seed: int) -> None:
    form = schema_format(PERSON)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format=form, temperature=temperature, seed=seed, max_tokens=MOST
    )
    assert answer.choices[0].finish_reason == "stop"
    text = answer.choices[0].message.content or ""
    jsonschema.validate(json.loads(text), PERSON)
    assert text == truth(Sampling(temperature, seed=seed), response_format=form)


def test_streamed_with_biases_and_penalties(client: OpenAI) -> None:
    fields: Any = {
        "response_format": schema_format(PERSON),
        "logit_bias": {str(TOKENIZER.encode("1")[0]): 2.5},
        "frequency_penalty": 0.7,
        "presence_penalty": -0.2,
    }
    stream = client.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, temperature=1.0, seed=3, max_tokens=MOST, **fields
    )
    text = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    jsonschema.validate(json.loads(text), PERSON)
    assert text == truth(Sampling(1.0, seed=3), **fields)


def test_a_schema_is_charged_and_nothing_is_given_back(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a body was charged before it is tokenised counts towards its tokens, a schema's part of it does not."""
    spent = list[float]()

    def spend(account: Account, **amounts: float) -> None:
        spent.append(amounts.get("prefill", 0.0))
        plain(account, **amounts)

    plain = Account.spend
    monkeypatch.setattr(Account, "spend", spend)
    long = {**PERSON, "description": "x" * 8000}
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format=schema_format(long), temperature=0, max_tokens=2
    )
    assert answer.usage is not None
    assert min(spent) >= 0 and sum(spent) >= answer.usage.prompt_tokens + 8000 // BYTES_PER_TOKEN
    spent.clear()
    client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, max_tokens=2, user="y" * 4000)
    assert min(spent) >= 0 and sum(spent) >= 1000


class Pet(BaseModel):
    """As an app would declare it."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    lives: int = Field(ge=1, le=9)


class Owner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pets: list[Pet] = Field(min_length=1, max_length=2)
    home: bool | None


def test_a_class_of_pydantic(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=NAME, messages=MESSAGES, response_format=Owner, temperature=1.0, seed=1, max_tokens=MOST
    )
    owner = answer.choices[0].message.parsed
    assert isinstance(owner, Owner) and owner.pets[0].kind in ("cat", "dog")


def test_any_object(client: OpenAI) -> None:
    ended = 0
    for seed in range(8):
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, response_format={"type": "json_object"}, seed=seed, max_tokens=MOST
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
            ended += 1
    assert ended


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("schema", [{"type": "strin"}, {"not": {}}, {"pattern": "(?=a)"}, {"$ref": "#/nowhere"}])
def test_a_schema_that_cannot_be_obeyed_is_a_bad_request(
    served: tuple[Verifier, OpenAI], schema: dict[str, Any], streaming: bool
) -> None:
    verifier, client = served
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, response_format=schema_format(schema), stream=streaming
        )
    assert refused.value.code == "invalid_schema" and refused.value.param == "response_format"
    assert "cannot be obeyed" in refused.value.message
    assert_freed(verifier)


def test_a_client_that_hangs_up_ends_the_trial_of_its_schema(
    served: tuple[Verifier, OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, client = served
    walks, left = HeldWalks(monkeypatch), threading.Event()
    real = EngineCompletion.close

    async def closed(self: EngineCompletion) -> None:
        await real(self)
        left.set()

    monkeypatch.setattr(EngineCompletion, "close", closed)
    form = schema_format({**PERSON, "title": "left"})
    fields = {"model": NAME, "messages": MESSAGES, "response_format": form}
    request = httpx.Request("POST", f"{client.base_url}chat/completions", json=fields)
    with socket.create_connection((request.url.host, request.url.port or 0)) as connection:
        head = f"POST {request.url.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(request.content)}\r\n\r\n"
        connection.sendall(head.encode() + request.content)
        assert walks.begun.wait(HANG)
    assert left.wait(HANG)
    walks.go_on.set()
    assert until(lambda: not verifier.constraints._worker._waiting) and walks.count == 1
