"""`/v1/responses`, its stateless part: each request brings the whole conversation, nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from outrider_core.chat.api.constraints import ConstraintFault
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import MAX_TOP, Fields, Tokens, read
from outrider_core.chat.api.replies import ReplyWriter
from outrider_core.chat.api.requests import ChatRequest, check_messages
from outrider_core.chat.api.response_writer import ResponseWriter
from outrider_core.chat.api.spellings import is_empty
from outrider_core.chat.api.tools import ToolUse, tool_use_of
from outrider_core.chat.messages import ChatMessage, ContentPart, ToolCall

#: see `outrider_core.chat.api.requests.NEUTRAL`
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": "none"}),
    "max_tool_calls": (),
    "n": (1,),
    "response_format": (),
}
#: kinds of content parts; all hold text
TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"


class Item(Struct):
    """An item of `input`: a message, a call, or a call's result."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class Format(Struct):
    """Format within `text`, flat where chat completions nest it."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class Text(Struct):
    """verbosity and the like have no effect."""

    format: Format | None = None


class ResponseRequest(Fields, kw_only=True):
    """The supported fields; fields of `Fields` that OpenAI lacks here work as in chat completions."""

    NAMES: ClassVar[Mapping[str, str]] = {
        r"^messages\b": "input",
        r"^logprobs\b": "include",
        r"^response_format(\.json_schema)?\b": "text.format",
        r"\.function\.": ".",
    }

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    text: Text | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None

    @cached_property
    def _chat(self) -> ChatRequest:
        """Return the same request as a chat completion."""
        return ChatRequest(model=self.model, messages=self._messages())

    @property
    def conversation(self) -> list[dict[str, Any]] | None:
        """See ApiRequest."""
        return self._chat.conversation

    @property
    def plain_prompt(self) -> str | list[int]:
        """See ApiRequest."""
        return ""

    @property
    def top(self) -> int | None:
        """See ApiRequest."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def length(self) -> int | None:
        """See ApiRequest."""
        return self.max_output_tokens if (self.max_output_tokens or 0) > 0 else Fields.length.fget(self)  # type: ignore[attr-defined]

    @cached_property
    def tool_use(self) -> ToolUse | None:  # type: ignore[override]
        """See ApiRequest. Raises ConstraintFault; `check` has seen that it does not."""
        nested = [{"type": tool.get("type"), "function": tool} for tool in self.tools or ()]
        return tool_use_of(nested, _nested_choice(self.tool_choice), self.parallel_tool_calls)

    @classmethod
    def formed_as(cls, fields: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
        """See Fields."""
        text = fields.get("text")
        if isinstance(text, dict) and not is_empty(text.get("format")):
            raise ApiError(
                400, "text.format and another field ask for a form: send one", "text.format", "invalid_value"
            )
        return {"text": {"format": {"type": form["type"], **form.get("json_schema", {})}}}

    def writer(self, model: str, fingerprint: str, prompt_tokens: int, prompt_text: Callable[[], str]) -> ReplyWriter:
        """See ApiRequest."""
        calls = self.tool_use is not None
        return ResponseWriter(model, self._echoed(), prompt_tokens, calls, self.formed, self.must_call, self.schemas)

    def check(self) -> None:
        """See Fields."""
        if self.max_output_tokens == 0:
            raise ApiError(400, "max_output_tokens must be above 0; leave it out for no limit", "max_output_tokens")
        Fields.check(self)
        if not self.input:
            raise ApiError(400, "the input is empty", "input", "invalid_value")
        if unknown := set(self.include or ()) - {LOGPROBS}:
            text = f"include takes {LOGPROBS}, not {min(unknown)}"
            raise ApiError(400, text, "include", "unsupported_parameter")
        self.response_format = self._response_format()
        try:
            check_messages(self._chat.messages)
            self.tool_use  # noqa: B018
        except ConstraintFault as fault:
            raise ApiError(400, str(fault), fault.param, "invalid_value") from None
        except ApiError as error:  # chat completions merge a call with its message, so places differ
            raise ApiError(400, f"input: {error.message}", "input", error.code) from None

    def _response_format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.type != "json_schema":
            return {"type": form.type} if form else None
        if form.schema is None:
            raise ApiError(400, "text.format of type json_schema needs schema", "text.format.schema", "invalid_value")
        return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema, "strict": form.strict}}

    def _messages(self) -> list[ChatMessage]:
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, ChatMessage("user", self.input)]
        for index, item in enumerate(self.input):
            _append(messages, item, f"input[{index}]")
        return messages

    def _echoed(self) -> dict[str, Any]:
        """Return the fields of the request that a reply repeats."""
        form = self.text.format if self.text and self.text.format else Format("text")
        shown = {key: value for key, value in msgspec.to_builtins(form).items() if value is not None}
        return {
            "frequency_penalty": self.frequency_penalty or 0.0,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": self.presence_penalty or 0.0,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": shown},
            "tool_choice": self.tool_choice or "auto",
            "tools": [{**dict.fromkeys(("description", "parameters", "strict")), **tool} for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }


def _nested_choice(choice: Any) -> Any:
    """Return `tool_choice` in the nested form of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {"mode": choice.get("mode"), "tools": [_nested_choice(each) for each in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if isinstance(choice.get("name"), str):
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice


def parse_response(body: bytes) -> ResponseRequest:
    """Decode and check a request body. Raises ApiError with status 400."""
    with ResponseRequest.named():
        return read(body, ResponseRequest, NEUTRAL)


def _append(messages: list[ChatMessage], item: Item, where: str) -> None:
    """Add an item of `input` to the messages. Raises ApiError."""
    match item.type:
        case "message":
            if item.role is None or item.role == "tool":
                raise ApiError(400, f"{where} needs the role of a message", f"{where}.role", "invalid_value")
            messages.append(ChatMessage(item.role, _texts(item.content, f"{where}.content")))
        case "function_call":
            if item.call_id is None or item.name is None:
                raise ApiError(400, f"{where} needs call_id and name", where, "invalid_value")
            call = msgspec.convert(
                {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments or "{}"}},
                type=ToolCall,
            )
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage("assistant"))
            calls = messages[-1].tool_calls = messages[-1].tool_calls or []
            calls.append(call)
        case "function_call_output":
            content = _texts(item.output, f"{where}.output")
            messages.append(ChatMessage("tool", content, tool_call_id=item.call_id))
        case _:
            text = f"{where}: items of type message, function_call and function_call_output are taken"
            raise ApiError(400, text, f"{where}.type", "unsupported_content")


def _texts(content: str | list[ContentPart] | None, where: str) -> str | list[ContentPart] | None:
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if part.type not in TEXTS:
            text = "content parts must be text; images, audio and files are not supported"
            raise ApiError(400, text, f"{where}[{index}]", "unsupported_content")
    return [ContentPart("text", part.text) for part in content]
