"""`/v1/completions`: continues text or token ids as they are, without a chat template."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import Fields, read
from outrider_core.chat.api.replies import DONE, AnswerParts, Delta, ReplyWriter, TokenChances, Usage, event, extended

#: see `outrider_core.chat.api.requests.NEUTRAL`
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
}
MAX_LOGPROBS = 5
#: OpenAI's default
USUAL_TOKENS = 16


class CompletionRequest(Fields, kw_only=True):
    """The supported fields. prompt: one text, or the token ids of one."""

    NAMES: ClassVar[Mapping[str, str]] = {r"^messages\b": "prompt"}

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def conversation(self) -> list[dict[str, Any]] | None:
        """See ApiRequest."""
        return None

    @property
    def plain_prompt(self) -> str | list[int]:
        """See ApiRequest."""
        return self.prompt  # type: ignore[return-value]  # `check` has seen that it is

    @property
    def top(self) -> int | None:
        """See ApiRequest."""
        return self.logprobs

    @property
    def length(self) -> int | None:
        """See ApiRequest. -1: limited by the context alone."""
        asked = (self.max_completion_tokens, self.max_tokens)
        return USUAL_TOKENS if asked == (None, None) else Fields.length.fget(self)  # type: ignore[attr-defined]

    def writer(self, model: str, fingerprint: str, prompt_tokens: int, prompt_text: Callable[[], str]) -> ReplyWriter:
        """See ApiRequest."""
        echo = prompt_text() if self.echo else ""
        return TextWriter(model, fingerprint, prompt_tokens, self.include_usage, echo)

    def check(self) -> None:
        """See Fields."""
        Fields.check(self)
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = self.prompt = prompt[0]  # type: ignore[assignment]
        if isinstance(prompt, list) and not all(isinstance(token, int) and token >= 0 for token in prompt):
            text = "prompt takes one text or one list of token ids; send several as several requests"
            raise ApiError(400, text, "prompt", "unsupported_content")
        if not prompt:
            raise ApiError(400, "the prompt is empty", "prompt", "invalid_value")
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "log probabilities are available for drawn tokens only: leave out echo", "echo")


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode and check a request body. Raises ApiError with status 400."""
    return read(body, CompletionRequest, NEUTRAL)


class TextWriter:
    """See ReplyWriter. echo: prefix of each choice's text."""

    def __init__(self, model: str, fingerprint: str, prompt_tokens: int, usage: bool, echo: str) -> None:
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._usage, self._shows_usage, self._echo = Usage(prompt_tokens), usage, echo

    async def whole(self, answer: AnswerParts) -> dict[str, Any]:
        """See ReplyWriter."""
        choices, extensions = list[dict[str, Any]](), list[Mapping[str, Any]]()
        text, chances = [self._echo], list[TokenChances]()
        async for part in answer:
            if isinstance(part, Delta):
                text.append(part.text)
                chances += part.chances
                continue
            self._usage.add(part)
            told = _Offsets().told("".join(text), chances)
            choices.append(_choice(len(choices), "".join(text), part.finish_reason, told))
            extensions.append(part.extension)
            text, chances = [self._echo], []
        last = extensions[0] if len(extensions) == 1 else {}
        return {**self._head, "choices": extended(choices, extensions), "usage": self._usage.body(), **last}

    async def events(self, answer: AnswerParts) -> AsyncIterator[bytes]:
        """See ReplyWriter."""
        unknown: dict[str, Any] = {"usage": None} if self._shows_usage else {}
        index, echo, offsets = 0, self._echo, _Offsets()
        try:
            async for part in answer:
                fields = {**self._head, **unknown, **part.extension}
                if isinstance(part, Delta):
                    told = offsets.told(part.text, part.chances)
                    yield event({**fields, "choices": [_choice(index, echo + part.text, None, told)]})
                    echo = ""
                else:
                    self._usage.add(part)
                    yield event({**fields, "choices": [_choice(index, echo, part.finish_reason)]})
                    index, echo, offsets = index + 1, self._echo, _Offsets()
            if self._shows_usage:
                yield event({**self._head, "choices": [], "usage": self._usage.body()})
        except ApiError as error:
            yield event(error.body())
        yield DONE


class _Offsets:
    """Offsets of one choice's tokens in its text, in characters.

    A token that begins within a character has that character's offset; one after a stop string, the text's length.
    """

    def __init__(self) -> None:
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._told = self._known = 0

    def told(self, text: str, chances: Sequence[TokenChances]) -> dict[str, Any] | None:
        """Return `logprobs` of the tokens that come with more `text`; None if there are none."""
        self._known += len(text)
        offsets = list[int]()
        for each in chances:
            offsets.append(min(self._told, self._known))
            self._told += len(self._characters.decode(each.drawn.data))
        return _logprobs(chances, offsets) if offsets else None


def _logprobs(chances: Sequence[TokenChances], offsets: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": [each.drawn.text for each in chances],
        "token_logprobs": [each.drawn.logprob for each in chances],
        "top_logprobs": [{one.text: one.logprob for one in each.listed} for each in chances],
        "text_offset": list(offsets),
    }


def _choice(index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
