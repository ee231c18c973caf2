"""The parts of an answer, the code that all reply writers share, and the writer for chat completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.tools import CallDelta, CallReader
from outrider_core.protocol.ending import FinishReason


@dataclass(frozen=True)
class TokenChance:
    """A token's text, its UTF-8 bytes and the natural logarithm of its probability."""

    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True)
class TokenChances:
    """A drawn token, and the most likely tokens at its place, likeliest first."""

    drawn: TokenChance
    top: Sequence[TokenChance] = ()

    @property
    def listed(self) -> Sequence[TokenChance]:
        """The likeliest tokens, then the drawn one if it is not among them: the form of text completions."""
        if not self.top or any(one.data == self.drawn.data for one in self.top):
            return self.top
        return [*self.top, self.drawn]


@dataclass(frozen=True)
class Delta:
    """A new part of an answer: text or a part of a call.

    extension: further fields of the chunk, beside OpenAI's own. chances: of the tokens drawn since the last Delta.
    idle: nothing has been written yet.
    """

    text: str
    extension: Mapping[str, Any] = field(default_factory=dict)
    call: CallDelta | None = None
    chances: Sequence[TokenChances] = ()
    idle: bool = False


@dataclass(frozen=True)
class Ending:
    """The end of a complete choice; any other end is an ApiError.

    completion_tokens: tokens drawn, the one that ends the answer included.

    drafted: tokens that were verified as drafts; accepted: those among them that the target drew too.
    """

    finish_reason: FinishReason
    completion_tokens: int
    extension: Mapping[str, Any] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0


#: any number of Deltas, then one Ending, for each choice; ApiError if the answer fails
AnswerParts = AsyncIterator[Delta | Ending]


class ReplyWriter(Protocol):
    """Writes the reply to one request. id: of the reply."""

    id: str

    async def whole(self, answer: AnswerParts) -> dict[str, Any]:
        """Return the whole answer as one object. Raises ApiError if it fails."""

    def events(self, answer: AnswerParts) -> AsyncIterator[bytes]:
        """Yield all server-sent events as bytes. A later error can only be an event itself."""


async def with_calls(
    answer: AnswerParts,
    formed: bool = False,
    required: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> AnswerParts:
    """Separate the calls from the text of an answer. formed, required: see CallReader.

    It ends with TOOL_CALLS if it calls functions and all calls are complete. schemas: of the functions' arguments, by
    name; calls that violate them are named in the extension.
    """
    reader, carried, calls = CallReader(formed, required), Delta(""), list[CallDelta]()
    async for part in answer:
        if isinstance(part, Delta):
            found = reader.push(part.text)
            carried = Delta("", part.extension, None, [*carried.chances, *part.chances])
        else:
            found = reader.flush(cut=part.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS))
        for one in found:
            text, call = (one, None) if isinstance(one, str) else ("", one)
            yield Delta(text, carried.extension, call, carried.chances)
            carried = Delta("")
            if call is not None and call.id:
                calls.append(call)
            elif call is not None:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + call.arguments)
        if isinstance(part, Ending):
            if carried.chances:
                yield carried
            if invalid := await _invalid(calls[: reader.calls], schemas or {}):
                own = {**part.extension.get("outrider", {}), "invalid_calls": invalid}
                part = replace(part, extension={**part.extension, "outrider": own})
            called = reader.calls and not reader.inside and part.finish_reason == FinishReason.STOP
            yield replace(part, finish_reason=FinishReason.TOOL_CALLS) if called else part
            reader, carried, calls = CallReader(formed, required), Delta(""), []
        elif carried.extension:
            yield carried
            carried = Delta("")


async def _invalid(calls: Sequence[CallDelta], schemas: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return calls that violate their functions' schemas, which the grammar may not have enforced."""
    if not any(call.name in schemas for call in calls):
        return []
    from outrider_core.chat.api.call_checks import fault_of

    faults = [await asyncio.to_thread(fault_of, call.arguments, schemas.get(call.name, {})) for call in calls]
    return [
        {"index": call.index, "name": call.name, "why": why} for call, why in zip(calls, faults, strict=True) if why
    ]


def told(
    calls: bool, formed: bool, required: bool, schemas: Mapping[str, Mapping[str, Any]] | None
) -> Callable[[AnswerParts], AnswerParts]:
    """Return `with_calls` for a request with tools, and `as_it_is` for one without."""
    if not calls:
        return as_it_is
    return partial(with_calls, formed=formed, required=required, schemas=schemas)


def as_it_is(answer: AnswerParts) -> AnswerParts:
    """Return the answer unchanged, for a request without tools."""
    return answer


class Usage:
    """Token counts of a reply: the prompt once, drawn and drafted tokens of all choices."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.drawn, self.drafted, self.accepted = prompt, 0, 0, 0

    def add(self, ending: Ending) -> None:
        """Add the counts of a finished choice."""
        self.drawn += ending.completion_tokens
        self.drafted += ending.drafted
        self.accepted += ending.accepted

    @property
    def extension(self) -> dict[str, int]:
        """Return the counts that are not OpenAI's."""
        return {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}

    def body(self) -> dict[str, Any]:
        """Return the counts in the form of chat and text completions."""
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.drawn}
        return {**counts, "total_tokens": self.prompt + self.drawn, "outrider": self.extension}


class ChatWriter:
    """Chat completions. fingerprint: identifies the model and its arithmetic. usage: a stream ends with token counts.

    calls: the answer may call functions. chances: log probabilities were requested. formed, required, schemas: see
    with_calls.
    """

    def __init__(
        self,
        model: str,
        fingerprint: str,
        prompt_tokens: int,
        usage: bool = False,
        calls: bool = False,
        chances: bool = False,
        formed: bool = False,
        required: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._usage, self._shows_usage = Usage(prompt_tokens), usage
        self._chances, self._told = chances, told(calls, formed, required, schemas)

    async def whole(self, answer: AnswerParts) -> dict[str, Any]:
        """See ReplyWriter."""
        choices, choice = list[dict[str, Any]](), _WholeChoice()
        extensions = list[Mapping[str, Any]]()
        async for part in self._told(answer):
            if isinstance(part, Delta):
                choice.add(part)
                continue
            self._usage.add(part)
            chances = {"content": choice.chances, "refusal": None} if self._chances else None
            choices.append(
                {
                    "index": len(choices),
                    "message": choice.message(),
                    "logprobs": chances,
                    "finish_reason": part.finish_reason,
                }
            )
            extensions.append(part.extension)
            choice = _WholeChoice()
        return {
            **self._head,
            "object": "chat.completion",
            "choices": extended(choices, extensions),
            "usage": self._usage.body(),
            **(extensions[0] if len(extensions) == 1 else {}),
        }

    async def events(self, answer: AnswerParts) -> AsyncIterator[bytes]:
        """See ReplyWriter."""
        unknown: dict[str, Any] = {"usage": None} if self._shows_usage else {}
        index, begun = 0, False
        try:
            async for part in _from_the_start(self._told(answer)):
                if part is None or not begun:
                    yield self._chunk(index, {"role": "assistant", "content": ""}, unknown)
                    begun = True
                if isinstance(part, Delta):
                    yield self._chunk(index, _delta(part), {**unknown, **part.extension}, chances=part.chances)
                elif part is not None:
                    self._usage.add(part)
                    yield self._chunk(index, {}, {**unknown, **part.extension}, part.finish_reason)
                    index, begun = index + 1, False
            if self._shows_usage:
                yield self._chunk(index, None, {"usage": self._usage.body()})
        except ApiError as error:
            yield event(error.body())
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any] | None,
        fields: Mapping[str, Any],
        finish_reason: FinishReason | None = None,
        chances: Sequence[TokenChances] = (),
    ) -> bytes:
        """Return a chunk. delta: new content; None for the chunk of token counts, which has no choice."""
        logprobs = {"content": [chances_of(each) for each in chances], "refusal": None} if chances else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        choices = [] if delta is None else [choice]
        return event({**self._head, "object": "chat.completion.chunk", "choices": choices, **fields})


class _WholeChoice:
    """Collects one choice of a whole answer."""

    def __init__(self) -> None:
        self._text = list[str]()
        self._calls = list[dict[str, Any]]()
        self._arguments = list[list[str]]()
        self.chances = list[dict[str, Any]]()

    def add(self, part: Delta) -> None:
        self._text.append(part.text)
        self.chances += [chances_of(each) for each in part.chances]
        if part.call is None:
            return
        if part.call.id:
            self._calls.append({"id": part.call.id, "type": "function", "name": part.call.name})
            self._arguments.append([])
        self._arguments[-1].append(part.call.arguments)

    def message(self) -> dict[str, Any]:
        text = "".join(self._text)
        said: dict[str, Any] = {"role": "assistant", "refusal": None, "annotations": []}
        if not self._calls:
            return {**said, "content": text}
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": "".join(pieces)}}
            for call, pieces in zip(self._calls, self._arguments, strict=True)
        ]
        return {**said, "content": text or None, "tool_calls": calls}


async def _from_the_start(answer: AnswerParts) -> AsyncIterator[Delta | Ending | None]:
    """Yield None as soon as the reply may begin, then the answer."""
    yield None
    async for part in answer:
        yield part


def _delta(part: Delta) -> dict[str, Any]:
    if part.call is None:
        return {"content": part.text} if part.text else {}
    call = part.call
    function = {"name": call.name, "arguments": call.arguments} if call.id else {"arguments": call.arguments}
    head = {"index": call.index, "id": call.id, "type": "function"} if call.id else {"index": call.index}
    return {"tool_calls": [{**head, "function": function}]}


def chances_of(chances: TokenChances) -> dict[str, Any]:
    """Return log probabilities in the form of chat completions and responses."""
    return {**_chance(chances.drawn), "top_logprobs": [_chance(each) for each in chances.top]}


def _chance(chance: TokenChance) -> dict[str, Any]:
    return {"token": chance.text, "logprob": chance.logprob, "bytes": list(chance.data)}


def extended(choices: list[dict[str, Any]], extensions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the choices of a whole reply; with several, each has its own extension, otherwise the reply has it."""
    if len(choices) == 1:
        return choices
    return [{**choice, **extension} for choice, extension in zip(choices, extensions, strict=True)]


DONE = b"data: [DONE]\n\n"


def event(value: Any, name: str = "") -> bytes:
    """Encode a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


def model_card(name: str) -> dict[str, Any]:
    """Return the served model as `/v1/models` describes it, created now."""
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "outrider"}


def model_list(cards: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the reply of `/v1/models`."""
    return {"object": "list", "data": list(cards)}
