"""LangChain's client of OpenAI's API: answers, streams, batches, structured output and calls."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.conformance.conftest import ANSWER, KEY, Tried

pytestmark = pytest.mark.slow
langchain_openai = pytest.importorskip("langchain_openai", reason="run it with: make test-conformance")


class Place(BaseModel):
    """A place and its size."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=99_999_999)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, endpoint: Tried) -> Any:
    return langchain_openai.ChatOpenAI(
        model=endpoint.model,
        base_url=endpoint.url,
        api_key=KEY,
        temperature=0,
        max_tokens=80,
        timeout=ANSWER,
        max_retries=0,
        use_responses_api=request.param,
    )


def test_answers_streams_and_batches_are_the_same_text(model: Any) -> None:
    short = model.bind(max_tokens=12) if not model.use_responses_api else model.bind(max_output_tokens=12)
    whole = short.invoke("Name one use of copper.").text
    whole = whole if isinstance(whole, str) else whole()
    parts = [
        part.text if isinstance(part.text, str) else part.text() for part in short.stream("Name one use of copper.")
    ]
    assert "".join(parts) == whole != ""
    assert len(short.batch(["Say hi.", "Say no."])) == 2


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_obeys_the_schema(model: Any, method: str) -> None:
    answer = model.with_structured_output(Place, method=method).invoke("Where is the Louvre? Answer in JSON.")
    assert isinstance(answer, Place)


def test_tools_are_called(model: Any) -> None:
    calls = model.bind_tools([add], tool_choice="required").invoke("What is 17 plus 25?").tool_calls
    assert calls and all(call["name"] == "add" and set(call["args"]) == {"a", "b"} for call in calls)
