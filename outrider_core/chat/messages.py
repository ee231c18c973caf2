"""Read the messages of a conversation, for the endpoints and the Python API.

They arrive in OpenAI's form and are returned in the form of chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

ROLES = ("system", "developer", "user", "assistant", "tool")
#: roles that templates know by another name
_KNOWN_AS = {"developer": "system"}


class MessageFault(ValueError):
    """A message is invalid. param: the field at fault, from "messages" on; code: a stable name for programs."""

    def __init__(self, param: str, text: str, code: str | None = "invalid_value") -> None:
        super().__init__(text)
        self.param, self.code = param, code


class ContentPart(Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Called(Struct):
    """A function's name and arguments: an object, or its JSON text."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Struct):
    """A call in the conversation."""

    id: str
    function: Called
    type: str = "function"


class ChatMessage(Struct):
    """A message of the conversation. tool_call_id, name: of the call that a message of role tool answers."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Any = None
    tool_call_id: str | None = None
    name: str | None = None


def as_templates_take(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with text as content, arguments as objects and roles that templates know.

    Fields that are not OpenAI's stay as they are. Raises MessageFault that names the message.
    """
    taken = list[dict[str, Any]]()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        try:
            read = msgspec.convert(_with_ids(message), ChatMessage)
        except msgspec.ValidationError as error:
            raise MessageFault(where, f"{where}: {error}") from None
        check_message(read, where)
        taken.append(_whole({**message, **taken_of(read, where)}))
    return taken


def _whole(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with half characters, which tokenizers reject, replaced by a mark."""
    text = ""
    try:
        text = json.dumps(message, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        whole: dict[str, Any] = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return whole
    except (TypeError, ValueError, RecursionError):  # not JSON: the template refuses it
        pass
    return message


def _with_ids(message: Any) -> Any:
    """Return the message with an id for each call; only results that name calls need ids."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [{"id": "", **call} if isinstance(call, Mapping) else call for call in calls]}


def check_message(message: ChatMessage, where: str) -> None:
    """Raise MessageFault if a message is invalid by itself. where: its name."""
    if message.function_call is not None or message.role == "function":
        field = "role" if message.role == "function" else "function_call"
        text = "functions are OpenAI's old form of tools; use tool_calls and role tool"
        raise MessageFault(f"{where}.{field}", text, "unsupported_content")
    if message.role not in ROLES:
        raise MessageFault(f"{where}.role", f"role must be one of {', '.join(ROLES)}, not {message.role!r}", None)
    if message.tool_calls and message.role != "assistant":
        raise MessageFault(f"{where}.tool_calls", "only an assistant has tool_calls")
    if message.content is None and message.role not in ("assistant", "tool"):
        raise MessageFault(f"{where}.content", f"a message of role {message.role} needs content", None)
    for index, part in enumerate(message.content if isinstance(message.content, list) else []):
        if part.type != "text" or part.text is None:
            text = 'content parts must be {"type": "text", "text": ...}; images, audio and files are not supported'
            raise MessageFault(f"{where}.content[{index}]", text, "unsupported_content")
    for index, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            raise MessageFault(f"{where}.tool_calls[{index}].type", "only functions can be called here")
        _arguments(call, f"{where}.tool_calls[{index}].function.arguments")


def taken_of(message: ChatMessage, where: str) -> dict[str, Any]:
    """Return a checked message in the form of chat templates."""
    taken: dict[str, Any] = {"role": _KNOWN_AS.get(message.role, message.role), "content": _content(message)}
    if message.tool_calls:
        taken["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call, where)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        answered = {"tool_call_id": message.tool_call_id, "name": message.name}
        taken |= {field: value for field, value in answered.items() if value is not None}
    return taken


def _content(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text or "" for part in message.content or ())


def _arguments(call: ToolCall, where: str) -> dict[str, Any]:
    """Return the arguments of a call, without half characters. Raises MessageFault if they are not a JSON object."""
    given = call.function.arguments
    if isinstance(given, dict):
        return given
    text = given or "{}"
    try:
        value = json.loads(text)
        if "\\u" in text:  # JSON can spell half a character, which tokenizers reject
            pairs = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(pairs.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise MessageFault(where, "arguments must be the text of a JSON object")
    return value
