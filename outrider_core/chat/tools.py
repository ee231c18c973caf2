"""Write conversations with tools for chat templates that cannot, in plain turns and a form of our own.

The functions are described at the end of the system's turn, calls are in the assistant's turns as models write them
(`outrider_core.chat.tool_grammar`), and a result is a turn of role `tool`. If the template has no such turns, it is a
user's turn of `<tool_response>` alone: then other content must not hold that tag, and the result is JSON that escapes
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outrider_core.chat.tool_grammar import call_text

SYSTEM = """You may call functions. They are described in <tools></tools>, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write exactly this, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{...}}}}
</tool_call>"""
RESULT_TAG = "<tool_response>"
RESPONSE = RESULT_TAG + "\n{}\n</tool_response>"
_TAG = re.compile(r"<(/?\s*tool_response)", re.IGNORECASE)
#: a conversation to test a template with
_PROBE = {"type": "function", "function": {"name": "probe_f", "description": "probe_d", "parameters": {}}}
_CALL = {"id": "probe_id", "type": "function", "function": {"name": "probe_f", "arguments": {"probe_a": 1}}}
_TRIED: list[dict[str, Any]] = [
    {"role": "user", "content": "probe_u"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "probe_r", "tool_call_id": "probe_id", "name": "probe_f"},
]
_FORM = re.compile(
    r'<tool_call>\s*\{"name":\s*"probe_f",\s*"arguments":\s*\{"probe_a":\s*1\}\}\s*</tool_call>(?!.*probe_f)',
    re.DOTALL,
)

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, Sequence[dict[str, Any]]], str]


def uses_tools(messages: Messages, tools: Sequence[Any]) -> bool:
    """Return whether there are tools, calls or results to write."""
    return bool(tools) or any(each["role"] == "tool" or each.get("tool_calls") for each in messages)


def writes_tools(render: Render) -> bool:
    """Return whether a template writes functions, results, and calls in the form that answers have here."""
    try:
        text = render(_TRIED, [_PROBE])
    except Exception:  # templates raise any exception
        return False
    shown = text.partition("probe_u")[0]
    return "probe_d" in shown and "probe_r" in text and _FORM.search(text) is not None


def takes_results(render: Render) -> bool:
    """Return whether a template writes turns of role `tool` that differ from a user's."""
    tried: list[dict[str, Any]] = [
        _TRIED[0],
        {"role": "assistant", "content": "probe_c"},
        {"role": "tool", "content": "probe_r"},
    ]
    try:
        text = render(tried, [])
        other = render([*tried[:2], {"role": "user", "content": "probe_r"}], [])
    except Exception:
        return False
    return "probe_r" in text and text != other


def without_results(messages: Messages) -> list[dict[str, Any]]:
    """Break the tag of results in all content, for templates that write results as text into a user's turn."""
    return [
        {**each, "content": _TAG.sub(r"&lt;\1", each["content"])}
        if each["role"] != "assistant" and isinstance(each.get("content"), str)
        else each
        for each in messages
    ]


def plain_messages(messages: Messages, tools: Sequence[dict[str, Any]], results: bool) -> list[dict[str, Any]]:
    """Return the conversation with content alone. results: it may hold turns of role `tool`."""
    plain = list[dict[str, Any]]()
    previous = ""
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            calls = (each["function"] for each in message.get("tool_calls") or ())
            content = _joined([content, *(call_text(each["name"], each["arguments"]) for each in calls)])
        elif role == "tool" and not results:
            content = RESPONSE.format(json.dumps(content, ensure_ascii=False).replace("<", "\\u003c"))
        elif not results:
            content = _TAG.sub(r"&lt;\1", content)
        if role == previous == "tool" and not results:
            plain[-1]["content"] = _joined([plain[-1]["content"], content])
        else:
            plain.append({"role": "user" if role == "tool" and not results else role, "content": content})
        previous = role
    if tools:
        described = SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{described}".lstrip()}
        else:
            plain.insert(0, {"role": "system", "content": described})
    return plain


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)
