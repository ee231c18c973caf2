"""The form in which a model calls functions, and its grammar: text, or calls whose arguments obey their schemas.

A call is written exactly as Hermes and Qwen models do:

    <tool_call>
    {"name": "NAME", "arguments": {...}}
    </tool_call>

Several follow each other on lines of their own. Text before them is free except for the tag itself; nothing follows
them. JSON text has no raw newline, so `}` and the closing tag on a line of its own always end a call.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

TAG, END_TAG = "<tool_call>", "</tool_call>"
#: the end of a call, whatever its JSON holds, as that has no raw newline
CALL_END = "}\n" + END_TAG
MAX_TOOLS = 128
#: most calls of one answer
MAX_CALLS = 16
NAME = r"[A-Za-z0-9_-]{1,64}"


class ToolFunction(Struct, frozen=True, array_like=True):
    """parameters: the JSON schema of the arguments, an object."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$")]
    parameters: dict[str, Any]


class ToolRules(Struct, frozen=True, array_like=True):
    """Calls that an answer may make. required: it must call and writes nothing else. parallel: more than once.

    text: JSON schema that an answer without calls obeys; None: any text.
    """

    functions: Annotated[tuple[ToolFunction, ...], Meta(min_length=1, max_length=MAX_TOOLS)]
    required: bool = False
    parallel: bool = True
    text: dict[str, Any] | None = None

    def as_text(self) -> str:
        """Return the text that `read_tools` takes.

        Raises TypeError, ValueError or RecursionError on values not in JSON.
        """
        return msgspec.json.encode(self).decode()


def read_tools(text: str) -> ToolRules:
    """Read the text of `as_text`. Raises ValueError, msgspec.ValidationError among them, on anything else."""
    rules = msgspec.json.decode(text, type=ToolRules)
    if any(not re.fullmatch(NAME, each.name) for each in rules.functions):  # `$` of a pattern lets a newline pass
        raise ValueError(f"a function's name must match {NAME}")
    if len({each.name for each in rules.functions}) < len(rules.functions):
        raise ValueError("two functions have the same name")
    schemas = [each.parameters for each in rules.functions] + ([rules.text] if rules.text is not None else [])
    if any("x-guidance" in schema for schema in schemas):
        raise ValueError("x-guidance is not taken here")
    return rules


def lark_of(rules: ToolRules, options: dict[str, Any]) -> str:
    """Return the grammar in llguidance's dialect of Lark. options: of JSON, as its `x-guidance` has them."""
    calls = " | ".join(f"call_{index}" for index in range(len(rules.functions)))
    more = f" (AGAIN call){{0,{MAX_CALLS - 1}}}" if rules.parallel else ""
    lines = ["%llguidance {}"]
    if rules.required:
        lines += [f'start: "{TAG}" call{more}']
    elif rules.text is not None:
        lines += [f'start: text | "{TAG}" call{more}', f"text: {_json(rules.text, options)}"]
    else:
        # before a tag both alternatives continue; the lazy one ends with the first tag
        lines += [f"start: TEXT | tagged call{more}", f"tagged[lazy]: /(?s:.*){TAG}/"]
        lines += [f"TEXT: /(?s:.*)/ & ~/(?s:.*){TAG}(?s:.*)/"]
    lines += [f'call: "\\n{{\\"name\\": \\"" ({calls}) "}}\\n{END_TAG}"']
    for index, each in enumerate(rules.functions):
        lines += [f'call_{index}: "{each.name}\\", \\"arguments\\": " {_json(each.parameters, options)}']
    if rules.parallel:
        lines += [f'AGAIN: "\\n{TAG}"']
    return "\n".join(lines) + "\n"


def ends_with_call(text: str) -> bool:
    """Return whether an answer under such a grammar has called functions, all of them completely."""
    return text.endswith(CALL_END)


def call_text(name: str, arguments: Any) -> str:
    """Return a call in the form of models."""
    return f"{TAG}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{END_TAG}"


def _json(schema: dict[str, Any], options: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": options})
