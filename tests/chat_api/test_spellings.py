"""Ignored names are found in bounded work, in any body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import inspect

from outrider_core.chat.api import spellings
from outrider_core.chat.api.completions import CompletionRequest, parse_completion
from outrider_core.chat.api.requests import parse
from outrider_core.chat.api.responses import parse_response


def nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [10, 450, 900])
@pytest.mark.parametrize("name", ["metadata", "foo", "grammar", "guided_json", "documents"])
def test_a_deep_value_that_says_nothing_is_no_fault(name: str, depth: int) -> None:
    asked = parse(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], name: nested(depth)}).encode()
    )
    assert asked.ignored == ()


@pytest.mark.parametrize(
    "prompt", [[[]] * 30_000, [1] * 30_000, ["x"] * 30_000, [[1, 2]] * 30_000], ids=lambda p: str(p[0])
)
def test_values_that_hold_no_fields_are_not_looked_at(prompt: Any) -> None:
    fields = {"model": "m", "prompt": prompt}
    assert sum(1 for _ in spellings._values(fields, inspect.type_info(CompletionRequest), "")) < 10


def test_only_so_many_values_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spellings, "MOST_VALUES", 200)
    messages = [{"role": "user", "content": "x"}] * 30 + [{"role": "user", "content": "x", "foo": 1}]
    early = parse(json.dumps({"model": "m", "messages": messages}).encode())
    assert early.ignored == ("messages[30].foo",)
    late = parse(json.dumps({"model": "m", "messages": messages[:-1] * 9 + messages[-1:]}).encode())
    assert late.ignored == ()


def test_many_calls_of_one_turn_stand_in_one_message() -> None:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(50)]
    asked = parse_response(json.dumps({"model": "m", "input": calls}).encode())
    assert asked.model == "m"
    completion = parse_completion(b'{"model": "m", "prompt": "x", "foo": 1}')
    assert completion.ignored == ("foo",)
