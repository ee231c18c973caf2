"""One writer for both endpoints: an answer as one object and as a stream says the same, and errors keep their shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider_core.chat.api import app
from outrider_core.chat.api.app import PARSERS
from outrider_core.chat.api.completions import TextWriter
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.replies import ChatWriter, Delta, Ending, TokenChance, TokenChances
from outrider_core.chat.api.response_writer import ResponseWriter
from outrider_core.chat.tool_grammar import call_text
from outrider_core.protocol.ending import FinishReason

ENDING = Ending(FinishReason.STOP, 5, {"outrider": {"unverified": False}}, drafted=9, accepted=3)


async def answer(*parts: Delta | Ending | ApiError) -> AsyncIterator[Delta | Ending]:
    for part in parts:
        if isinstance(part, ApiError):
            raise part
        yield part


USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "outrider": {"drafted_tokens": 9, "accepted_tokens": 3},
}


def writer(include_usage: bool = False) -> ChatWriter:
    return ChatWriter("tiny", "target-hash", 7, include_usage)


def streamed(*parts: Delta | Ending | ApiError, include_usage: bool = False) -> list[dict[str, Any]]:
    """The chunks as JSON, [DONE] checked and removed."""

    async def collect() -> list[bytes]:
        return [event async for event in writer(include_usage).events(answer(*parts))]

    *chunks, last = asyncio.run(collect())
    assert last == b"data: [DONE]\n\n"
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]


def test_whole_answer() -> None:
    body = json.loads(json.dumps(asyncio.run(writer().whole(answer(Delta("ab"), Delta("c"), ENDING)))))
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    message = {"role": "assistant", "content": "abc", "refusal": None, "annotations": []}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == USAGE
    assert body["outrider"] == {"unverified": False}


@pytest.mark.parametrize("include_usage", [False, True])
def test_stream(include_usage: bool) -> None:
    """The role comes first, then the text, the reason, and, if asked for, the token counts, null until then."""
    mark = Delta("", {"outrider": {"state": "alone"}})
    chunks = streamed(Delta("ab"), mark, Delta("c"), ENDING, include_usage=include_usage)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    counted = chunks.pop() if include_usage else {"choices": []}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "ab"}, {}, {"content": "c"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert [chunk.get("outrider") for chunk in chunks] == [None, None, {"state": "alone"}, None, {"unverified": False}]
    assert counted["choices"] == []
    assert [chunk.get("usage", "absent") for chunk in chunks] == [None if include_usage else "absent"] * 5
    if include_usage:
        assert counted["usage"] == USAGE


def test_error_in_mid_stream_is_an_event() -> None:
    chunks = streamed(Delta("ab"), ApiError(500, "broken", code="internal_error"))
    assert chunks[-1] == {
        "error": {"message": "broken", "type": "server_error", "param": None, "code": "internal_error"}
    }


def test_error_of_a_whole_answer_is_raised() -> None:
    with pytest.raises(ApiError, match="broken"):
        asyncio.run(writer().whole(answer(Delta("ab"), ApiError(500, "broken"))))


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_error_shape(status: int, kind: str) -> None:
    error = ApiError(status, "no", "messages", "some_code", retry_after=3)
    assert error.body() == {"error": {"message": "no", "type": kind, "param": "messages", "code": "some_code"}}
    assert error.headers == {"retry-after": "3"}


def test_a_missing_token_names_the_scheme() -> None:
    assert ApiError(401, "a token is needed").headers == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize("cut", [0, 20, 60])
def test_a_call_that_a_stop_string_cuts_off_is_not_told_as_whole(cut: int) -> None:
    """Programs take `tool_calls` for calls whose arguments they can read."""
    text = call_text("f", {"a": 1}) + "\n" + call_text("g", {"b": "x" * 40})
    said = text[: len(text) - cut]
    chat = ChatWriter("tiny", "target-hash", 7, calls=True)
    [choice] = asyncio.run(chat.whole(answer(Delta(said), Ending(FinishReason.STOP, 5))))["choices"]
    assert choice["finish_reason"] == ("stop" if cut else "tool_calls")
    ended = answer(Delta(said), Ending(FinishReason.STOP, 5))
    reply = asyncio.run(ResponseWriter("tiny", {}, 7, True).whole(ended))
    assert [each["status"] for each in reply["output"]] == ["completed", "incomplete" if cut else "completed"]


def test_an_answer_of_json_beside_tools_is_no_call() -> None:
    """As the requests themselves make their writers."""
    function = {"name": "f", "parameters": {"type": "object"}}
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**chat, "response_format": {"type": "json_object"}},
        "/v1/responses": {
            "input": "x",
            "tools": [{"type": "function", **function}],
            "text": {"format": {"type": "json_object"}},
        },
    }
    for path, body in bodies.items():
        asked = PARSERS[path](json.dumps({"model": "m", **body}).encode())
        said = answer(Delta('{"a": "<tool_call>"}'), Ending(FinishReason.STOP, 5))
        whole = asyncio.run(asked.writer("m", "f", 1, str).whole(said))
        told = whole["choices"][0]["message"] if "choices" in whole else whole["output"][0]["content"][0]
        assert told.get("content", told.get("text")) == '{"a": "<tool_call>"}'


def begun(parts: AsyncIterator[Delta | Ending]) -> list[Delta | Ending]:
    async def run() -> list[Delta | Ending]:
        return [part async for part in await app.begun(parts)]

    return asyncio.run(run())


def test_a_stream_begins_with_what_is_written() -> None:
    waiting, said = Delta("", {"outrider": {"state": "connecting"}}, idle=True), Delta("a")
    for parts in ([waiting, said, ENDING], [ENDING], [waiting, ENDING], [waiting, waiting], []):
        assert begun(answer(*parts)) == parts
    with pytest.raises(ApiError, match="no"):
        begun(answer(waiting, ApiError(400, "no")))


def test_a_stream_that_takes_long_begins_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BEGIN_SECONDS", 0.02)
    waiting, failed, has_begun = Delta("", idle=True), ApiError(502, "late"), asyncio.Event()

    async def slow() -> AsyncIterator[Delta | Ending]:
        yield waiting
        await has_begun.wait()
        yield Delta("a")
        raise failed

    async def run() -> list[Any]:
        parts = list[Any]()
        stream = await app.begun(slow())
        has_begun.set()
        try:
            async for part in stream:
                parts.append(part)
        except ApiError as error:
            parts.append(error)
        return parts

    assert asyncio.run(run()) == [waiting, Delta("a"), failed]


def spelled(*pieces: bytes) -> list[TokenChances]:
    """Tokens of these bytes, as a vocabulary of bytes shows them."""
    return [TokenChances(TokenChance(piece.decode(errors="backslashreplace"), piece, -1.0)) for piece in pieces]


SMILE = "\U0001f600".encode()
#: pieces of text with the bytes of their tokens -> where the tokens begin
OFFSETS = [
    ([("ab", [b"a", b"b"])], [0, 1]),
    ([("\U0001f600a", [SMILE[:1], SMILE[1:2], SMILE[2:3], SMILE[3:], b"a"])], [0, 0, 0, 0, 1]),
    ([("x\u00e9", [b"x", b"\xc3", b"\xa9"]), ("y", [b"y"])], [0, 1, 1, 2]),
    ([("\ufffda", [b"\xff", b"a"])], [0, 1]),
    ([("\u00e9\u00e9", ["\u00e9\u00e9".encode()]), ("z", [b"z"])], [0, 2]),
    ([("ab", [b"ab", b" the ", b"stop"])], [0, 2, 2]),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("pieces", "offsets"), OFFSETS)
def test_offsets_count_characters_of_the_text(
    pieces: list[tuple[str, list[bytes]]], offsets: list[int], stream: bool
) -> None:
    parts = [Delta(text, chances=spelled(*tokens)) for text, tokens in pieces]
    writer = TextWriter("tiny", "hash", 1, False, "")
    if stream:

        async def collect() -> list[bytes]:
            return [event async for event in writer.events(answer(*parts, ENDING, *parts, ENDING))]

        events = [json.loads(event.removeprefix(b"data: ")) for event in asyncio.run(collect())[:-1]]
        choices = [choice for event in events for choice in event["choices"]]
    else:
        choices = asyncio.run(writer.whole(answer(*parts, ENDING, *parts, ENDING)))["choices"]
    for index in range(2):
        told = [choice["logprobs"] for choice in choices if choice["index"] == index and choice["logprobs"]]
        assert [offset for each in told for offset in each["text_offset"]] == offsets


def test_the_drawn_token_is_among_the_likeliest_of_a_text_completion() -> None:
    drawn, best = TokenChance("c", b"c", -9.0), [TokenChance("a", b"a", -1.0), TokenChance("b", b"b", -2.0)]
    for top, want in ((best, {"a", "b", "c"}), ([best[0], drawn], {"a", "c"}), ([], set())):
        parts = answer(Delta("c", chances=[TokenChances(drawn, top)]), ENDING)
        [choice] = asyncio.run(TextWriter("tiny", "hash", 1, False, "").whole(parts))["choices"]
        assert set(choice["logprobs"]["top_logprobs"][0]) == want
