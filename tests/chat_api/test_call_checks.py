"""Calls of functions that no grammar enforces are checked, in bounded time, and the reply says which do not obey."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider_core.chat.api.call_checks import fault_of
from outrider_core.chat.api.replies import ChatWriter, Delta, Ending
from outrider_core.chat.api.requests import ChatRequest, parse
from outrider_core.chat.api.responses import parse_response
from outrider_core.chat.tool_grammar import call_text
from outrider_core.protocol.ending import FinishReason

TEXT: dict[str, Any] = {"type": "object", "properties": {"p": {"type": "string", "format": "path"}}, "required": ["p"]}
DOUBLING: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "right": ({"p": "/tmp"}, TEXT, False),
    "a wrong type": ({"p": 3}, TEXT, True),
    "missing": ({}, TEXT, True),
    "both of oneOf": ({"a": "x"}, {"oneOf": [{"required": ["a"]}, {"properties": {"a": {"type": "string"}}}]}, True),
    "one of oneOf": ({"b": "x"}, {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, False),
    "not": ({"a": 1}, {"not": {"required": ["a"]}}, True),
    "not unique": ({"a": [1, 1]}, {"properties": {"a": {"uniqueItems": True}}}, True),
    "dependent": ({"a": 1}, {"dependentRequired": {"a": ["b"]}}, True),
    "a schema that means nothing": ({"a": 1}, {"properties": None}, False),
    "no such reference": ({"a": 1}, {"$ref": "#/$defs/none"}, False),
    "a reference elsewhere": ({"a": 1}, {"$ref": "https://example.com/schema"}, False),
    "an older draft": ({"a": [1, "x"]}, {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {
        "a": {"items": [{"type": "integer"}, {"type": "integer"}]}}}, True),
    "names by pattern": ({"xx": 1}, {"patternProperties": {"^x": {}}, "additionalProperties": False}, False),
    "hostile: doubling": ({"a": 1}, {"$defs": {**DOUBLING, "d40": {"type": "null"}}, "$ref": "#/$defs/d0"}, False),
    "hostile: an expression": ({"a": "a" * 60 + "!"}, {"properties": {"a": {"pattern": "^(a+)+$"}},
                                                       "patternProperties": {"(a+)+!$": {}}}, False),
    "hostile: not alike": ({"a": [[i] for i in range(5000)]}, {"properties": {"a": {"uniqueItems": True}}}, False),
    "hostile: itself": ({"a": 1}, {"$ref": "#"}, False),
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("value", "schema", "wrong"), CASES.values(), ids=CASES)
def test_arguments_are_checked_in_bounded_time(value: Any, schema: dict[str, Any], wrong: bool) -> None:
    why = fault_of(json.dumps(value), schema)
    assert bool(why) == wrong and "\n" not in why and len(why) <= 300


def request(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"name": "f", "description": "d", "parameters": parameters}


async def answer(text: str) -> AsyncIterator[Delta | Ending]:
    yield Delta(text)
    yield Ending(FinishReason.STOP, 9, {"outrider": {"state": "verified"}})


def replies(arguments: list[Any]) -> list[dict[str, Any]]:
    """Of both calls, to the same answer."""
    text = "\n".join(call_text("f", each) for each in arguments)
    chat: ChatRequest = parse(json.dumps({
        "model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function",
        "function": request(TEXT)}],
    }).encode())  # fmt: skip
    respond = parse_response(
        json.dumps({"model": "m", "input": "x", "tools": [{"type": "function", **request(TEXT)}]}).encode()
    )
    writers = [each.writer("m", "", 1, str) for each in (chat, respond)]
    return [asyncio.run(each.whole(answer(text))) for each in writers]


def test_a_reply_names_the_calls_that_do_not_obey() -> None:
    for reply in replies([{"p": "x"}, {"p": 3}, {}]):
        marks = reply["outrider"]
        assert marks["state"] == "verified"
        assert [(each["index"], each["name"]) for each in marks["invalid_calls"]] == [(1, "f"), (2, "f")]
        assert "string" in marks["invalid_calls"][0]["why"]
    for reply in replies([{"p": "x"}]):
        assert reply["outrider"] == {"state": "verified"}


def test_a_stream_ends_with_it() -> None:
    async def events() -> list[bytes]:
        writer = ChatWriter("m", "", 1, calls=True, schemas={"f": TEXT})
        return [each async for each in writer.events(answer(call_text("f", {"p": 3})))]

    chunks = [json.loads(each[6:]) for each in asyncio.run(events()) if each.startswith(b"data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [each["name"] for each in chunks[-1]["outrider"]["invalid_calls"]] == ["f"]


@pytest.mark.parametrize(
    "place", ["file:///etc/hostname", "http://127.0.0.1:9/x", "https://there.example/x", "ftp://there.example/x"]
)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "PLACE"}, {"allOf": [{"$ref": "PLACE"}]}, {"$dynamicRef": "PLACE#x"},
        {"$id": "PLACE", "$ref": "other"},
        {"$schema": "PLACE", "type": "object"}, {"properties": {"a": {"$id": "PLACE", "$ref": "#/$defs/none"}}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "PLACE", "$ref": "other"},
        {"$schema": "http://json-schema.org/draft-03/schema#", "extends": {"$ref": "PLACE"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_reference_leads_nowhere_but_into_the_schema(
    schema: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def opened(*arguments: Any, **_: Any) -> None:
        asked.append(str(arguments[0]))
        raise OSError("nothing is opened here")

    monkeypatch.setattr("urllib.request.urlopen", opened)
    monkeypatch.setattr("urllib.request.OpenerDirector.open", opened)
    monkeypatch.setitem(sys.modules, "requests", None)
    fault_of('{"a": 1}', json.loads(json.dumps(schema).replace("PLACE", place)))
    assert not asked


def test_a_reference_into_the_schema_is_followed() -> None:
    schema = {
        "$id": "https://here.example/s",
        "$defs": {"n": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/$defs/n"}},
    }
    assert fault_of('{"a": "x"}', schema) and not fault_of('{"a": 1}', schema)
