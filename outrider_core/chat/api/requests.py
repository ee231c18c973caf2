"""Requests for chat completions: what they may contain, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any

from msgspec import Meta, Struct

from outrider_core.chat.api.constraints import ConstraintFault
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import MAX_TOP, Fields, read
from outrider_core.chat.api.replies import ChatWriter, ReplyWriter
from outrider_core.chat.api.tools import ToolUse, tool_use_of

ROLES = ("system", "developer", "user", "assistant", "tool")
#: unsupported fields that change the output -> the values with which they have no effect; null always has none
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
}


class ContentPart(Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Called(Struct):
    """What an assistant called. arguments: JSON text of an object."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call in the conversation."""

    id: str
    function: Called
    type: str = "function"


class ChatMessage(Struct):
    """One message of the conversation. tool_call_id, name: of the call that a message of role tool answers."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Any = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatRequest(Fields, kw_only=True):
    """The supported fields, within OpenAI's bounds. null is the same as absent."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @cached_property
    def tool_use(self) -> ToolUse | None:  # type: ignore[override]
        """See ApiRequest. Raises ConstraintFault; `check` has seen that it does not."""
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
        """Messages as chat templates take them. Templates know "developer" as "system"."""
        return [_as_templates_take(message) for message in self.messages]

    def writer(self, model: str, fingerprint: str, prompt_tokens: int, prompt_text: Callable[[], str]) -> ReplyWriter:
        """See ApiRequest."""
        calls, chances = self.tool_use is not None, self.top is not None
        return ChatWriter(
            model, fingerprint, prompt_tokens, self.include_usage, calls, chances, self.formed, self.must_call
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
    """Raise ApiError where one cannot be, or answers a call that nobody made."""
    made = dict[str, str]()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_message(message, where)
        for call in message.tool_calls or ():
            made[call.id] = call.function.name
        if message.role == "tool":
            if message.tool_call_id not in made:
                text = "tool_call_id must be the id of a call in an assistant's message before"
                raise ApiError(400, text, f"{where}.tool_call_id", "invalid_value")
            message.name = made[message.tool_call_id or ""]


def _check_message(message: ChatMessage, where: str) -> None:
    if message.function_call is not None or message.role == "function":
        field = "role" if message.role == "function" else "function_call"
        text = "functions are OpenAI's old form of tools; use tool_calls and role tool"
        raise ApiError(400, text, f"{where}.{field}", "unsupported_content")
    if message.role not in ROLES:
        raise ApiError(400, f"role must be one of {', '.join(ROLES)}", f"{where}.role")
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, "only an assistant has tool_calls", f"{where}.tool_calls", "invalid_value")
    if message.content is None and message.role not in ("assistant", "tool"):
        raise ApiError(400, f"a message of role {message.role} needs content", f"{where}.content")
    for index, part in enumerate(message.content if isinstance(message.content, list) else []):
        if part.type != "text" or part.text is None:
            text = 'content parts must be {"type": "text", "text": ...}; images, audio and files are not supported'
            raise ApiError(400, text, f"{where}.content[{index}]", "unsupported_content")
    for index, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            raise ApiError(400, "only functions are called here", f"{where}.tool_calls[{index}].type", "invalid_value")
        _arguments(call, f"{where}.tool_calls[{index}].function.arguments")


def _arguments(call: ToolCall, where: str) -> dict[str, Any]:
    """The arguments of a call, without halves of characters. Raises ApiError on what is no JSON object."""
    text = call.function.arguments or "{}"
    try:
        value = json.loads(text)
        if "\\u" in text:  # half a character, as JSON can spell it, is nothing that a tokenizer takes
            pairs = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(pairs.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "arguments must be the text of a JSON object", where, "invalid_value")
    return value


def _as_templates_take(message: ChatMessage) -> dict[str, Any]:
    taken: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    taken["content"] = _content(message)
    if message.tool_calls:
        taken["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call, "messages")},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        taken |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return taken


def _content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text or "" for part in message.content or ())
