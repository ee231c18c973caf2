"""Replies to chat completions, as one JSON object or as a stream of chunks, and the list of models."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from outrider_core.chat_api.errors import ApiError


class FinishReason(StrEnum):
    """Why an answer ended: by itself or at a stop string, or at a limit of tokens."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Delta:
    """What is new in an answer. extension: further fields of the chunk, beside OpenAI's own."""

    text: str
    extension: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """The end of an answer. completion_tokens: tokens drawn, the one that ends the answer included."""

    finish_reason: FinishReason
    completion_tokens: int
    extension: Mapping[str, Any] = field(default_factory=dict)


#: any number of Deltas, then one Ending; ApiError where the answer fails
Answer = AsyncIterator[Delta | Ending]


class CompletionWriter:
    """Writes the reply to one request. fingerprint: names what draws the text. prompt_tokens: for the token counts."""

    def __init__(self, model: str, fingerprint: str, prompt_tokens: int) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._prompt_tokens = prompt_tokens

    async def completion(self, answer: Answer) -> dict[str, Any]:
        """The whole answer as one object. Raises ApiError where it fails."""
        text = list[str]()
        async for part in answer:
            text.append(part.text if isinstance(part, Delta) else "")
        assert isinstance(part, Ending)
        message = {"role": "assistant", "content": "".join(text)}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": part.finish_reason}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage(part),
            **part.extension,
        }

    async def chunks(self, answer: Answer, include_usage: bool) -> AsyncIterator[bytes]:
        """The data of all server-sent events. An error that comes now can only be an event itself."""
        unknown: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            yield self._chunk({"role": "assistant", "content": ""}, unknown)
            async for part in answer:
                if isinstance(part, Delta):
                    yield self._chunk({"content": part.text} if part.text else {}, {**unknown, **part.extension})
                    continue
                yield self._chunk({}, {**unknown, **part.extension}, part.finish_reason)
                if include_usage:
                    yield self._chunk(None, {"usage": self._usage(part)})
        except ApiError as error:
            yield msgspec.json.encode(error.body())
        yield b"[DONE]"

    def _chunk(
        self,
        delta: Mapping[str, str] | None,
        fields: Mapping[str, Any],
        finish_reason: FinishReason | None = None,
    ) -> bytes:
        """delta: what is new; None for the chunk of token counts, which has no choice."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        choices = [] if delta is None else [choice]
        return msgspec.json.encode({**self._head, "object": "chat.completion.chunk", "choices": choices, **fields})

    def _usage(self, ending: Ending) -> dict[str, int]:
        prompt, drawn = self._prompt_tokens, ending.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def model_card(name: str) -> dict[str, Any]:
    """The served model as `/v1/models` describes it; it counts as created now."""
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "outrider"}


def model_list(card: Mapping[str, Any]) -> dict[str, Any]:
    """The reply of `/v1/models` where one model is served."""
    return {"object": "list", "data": [card]}
