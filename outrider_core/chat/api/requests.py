"""Requests for chat completions: supported fields, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any

from msgspec import Meta

from outrider_core.chat.api.constraints import ConstraintFault
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import MAX_TOP, Fields, read
from outrider_core.chat.api.replies import ChatWriter, ReplyWriter
from outrider_core.chat.api.tools import ToolUse, tool_use_of
from outrider_core.chat.messages import ChatMessage, MessageFault, check_message, taken_of

#: unsupported fields that change the output -> the values with which they have no effect; null always has none
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
}


class ChatRequest(Fields, kw_only=True):
    """The supported fields, within OpenAI's bounds. null means absent."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @cached_property
    def tool_use(self) -> ToolUse | None:  # type: ignore[override]
        """See ApiRequest. Raises ConstraintFault, except after `check`."""
        return tool_use_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def top(self) -> int | None:
        """See ApiRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def plain_prompt(self) -> str | list[int]:
        """See ApiRequest."""
        return ""

    @cached_property
    def conversation(self) -> list[dict[str, Any]]:
        """Return messages in the form of chat templates, which know "developer" as "system"."""
        return [taken_of(message, "messages") for message in self.messages]

    def writer(self, model: str, fingerprint: str, prompt_tokens: int, prompt_text: Callable[[], str]) -> ReplyWriter:
        """See ApiRequest."""
        calls, chances = self.tool_use is not None, self.top is not None
        return ChatWriter(
            model,
            fingerprint,
            prompt_tokens,
            self.include_usage,
            calls,
            chances,
            self.formed,
            self.must_call,
            self.schemas,
        )

    def check(self) -> None:
        """See Fields."""
        Fields.check(self)
        check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        try:
            self.tool_use  # noqa: B018
        except ConstraintFault as fault:
            raise ApiError(400, str(fault), fault.param, "invalid_value") from None


def parse(body: bytes) -> ChatRequest:
    """Decode and check a request body. Raises ApiError with status 400."""
    return read(body, ChatRequest, NEUTRAL)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise ApiError if a message is invalid, or answers a call that was not made."""
    made = dict[str, str]()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        try:
            check_message(message, where)
        except MessageFault as fault:
            raise ApiError(400, str(fault), fault.param, fault.code) from None
        for call in message.tool_calls or ():
            made[call.id] = call.function.name
        if message.role == "tool":
            if message.tool_call_id not in made:
                text = "tool_call_id must be the id of a call in an assistant's message before"
                raise ApiError(400, text, f"{where}.tool_call_id", "invalid_value")
            message.name = made[message.tool_call_id or ""]
