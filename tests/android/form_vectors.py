"""Vectors of constraints made from fields of requests, and of prompts with tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider_core.chat.api.constraints import constraint_of
from outrider_core.chat.api.tools import tool_use_of
from outrider_core.chat.tokenizer import ChatTokenizer, open_chat_tokenizer
from outrider_core.protocol.constraint import Constraint, Rules
from tests.protocol.make_vectors import plain

#: the bundle that `make` writes
BUNDLE = Path(__file__).parents[2] / "build" / "bundle"
VOCAB = 1000
PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "größe": {"enum": [1, 2.5, None, 'a\n"b"']}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "description": "Adds <b>.\n", "parameters": PLACE}},
    {"type": "function", "function": {"name": "no_parameters"}},
    {"type": "function", "function": {"name": "empty", "parameters": {}}},
    {"type": "function", "function": {"name": "open-1", "parameters": {"properties": {}, "additionalProperties": {}}}},
]  # fmt: skip
ID: dict[str, Any] = {"properties": {"id": {"type": "integer"}}}
NAMED: dict[str, Any] = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
#: parameters that name properties in parts, or where they do not show
COMPOSED: list[dict[str, Any]] = [
    {"type": "object", **ID, "allOf": [NAMED]},
    {**ID, "anyOf": [NAMED, {"properties": {"key": {"type": "null"}}}, True], "oneOf": [{"required": ["other", 5]}]},
    {**ID, "allOf": [{"anyOf": [NAMED]}, {"properties": None, "required": "id"}], "required": ["toString"]},
    {**ID, "$ref": "#/$defs/n", "$defs": {"n": NAMED}},
    {**ID, "allOf": [{"$ref": "#/$defs/Gr%C3%B6%C3%9Fe"}, {"$ref": "#/$defs/a~1b+~0"}],
     "$defs": {"Größe": NAMED, "a/b+~": {"required": ["more"]}}},
    {**ID, "$ref": "#", "allOf": [{"$ref": "#/anyOf/1"}], "anyOf": [{"$ref": "#/$defs/50%"}, NAMED],
     "$defs": {"50%": {}}},
    {"allOf": [NAMED]},
    {"properties": None},
    *({**ID, "allOf": [{**NAMED, **further}]} for further in (
        {"minProperties": 1}, {"not": {}}, {"$ref": "#x"}, {"$ref": "#/anyOf/0"}, {"$ref": "elsewhere"})),
    {**ID, "allOf": [NAMED], "additionalProperties": {"type": "string"}},
]  # fmt: skip


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


REQUESTS: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "text"}, "logit_bias": {"3": 0}},
    {"response_format": {"type": "json_object"}},
    {"response_format": FORMAT, "frequency_penalty": 0.5, "presence_penalty": -2},
    {"logit_bias": {"3": 2.5, "999": -100, "17": 0.1}, "presence_penalty": 1.25},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none", "response_format": FORMAT},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "empty"}}},
    {"tools": TOOLS, "tool_choice": allowed("auto", "add", "open-1")},
    {"tools": TOOLS, "tool_choice": allowed("required", "empty"), "response_format": {"type": "json_object"}},
    {"tools": TOOLS, "response_format": FORMAT},
    {
        "tools": [
            {"type": "function", "function": {"name": f"composed-{at}", "parameters": parameters}}
            for at, parameters in enumerate(COMPOSED)
        ]
    },
    {"tool_choice": "auto"},
    # refused
    {"logit_bias": {"1000": 1}},
    {"logit_bias": {"3": 101}},
    {"frequency_penalty": 2.1},
    {"tools": [TOOLS[1], TOOLS[1]]},
    {"tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"tools": TOOLS, "tool_choice": allowed("auto", "add", "other")},
    {"tools": TOOLS, "tool_choice": allowed("auto")},
]


def constraint_vectors() -> list[dict[str, Any]]:
    """Requests, and the constraint of an answer whose first token has index 4: null: none; or whether it is refused."""
    return [{"request": request, **_outcome(request)} for request in REQUESTS]


def _outcome(request: dict[str, Any]) -> dict[str, Any]:
    try:
        constraint = _constraint(request)
    except ValueError:
        return {"refused": True, "constraint": None}
    return {"refused": False, "constraint": plain(constraint)}


def _constraint(request: dict[str, Any]) -> Constraint | None:
    fields = dict(request)
    use = tool_use_of(
        fields.pop("tools", None), fields.pop("tool_choice", None), fields.pop("parallel_tool_calls", None)
    )
    return constraint_of(4, VOCAB, **fields, tools=use.rules if use else None)


def amount_vectors() -> list[dict[str, Any]]:
    """Constraints, texts, and what the next draw adds to which logits."""
    rng = np.random.default_rng(4)
    rows = []
    for request in REQUESTS:
        if ("frequency_penalty" not in request and "logit_bias" not in request) or _outcome(request)["refused"]:
            continue
        constraint = _constraint({name: of for name, of in request.items() if name != "response_format"})
        for length in (3, 4, 12, 40) if constraint else ():
            assert constraint is not None
            rules, text = Rules(constraint), rng.integers(0, 20, length).tolist()
            rules.follow(text)
            change = rules.adjustment()
            amounts = dict(zip(change.tokens.tolist(), change.amounts.tolist(), strict=True))
            rows.append(
                {"constraint": plain(constraint), "text": text, "amounts": [list(pair) for pair in amounts.items()]}
            )
    return rows


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"city": "Zürich", "n": 1}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Add <tool_response> and <|im_end|>"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Both, please"},
        {"role": "assistant", "content": "Well:", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        {"role": "tool", "content": "<tool_response>\n42\u0001", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "43", "tool_call_id": "c2", "name": "add"},
        {"role": "user", "content": "And?"},
    ],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"a": 1}', "tool_call_id": "c1", "name": "add"},
    ],
]
#: ChatML; turns of `tool` in nobody's; results in a user's turn, by the template itself
TEMPLATES = {
    "bundle": "",
    "plain": "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' + m.content"
    " + '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}",
    "tags": "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + m.content +"
    " '</tool_response><|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{{ '<|im_start|>assistant\\n' }}",
}


def tool_chat_vectors() -> list[dict[str, Any]]:
    """Conversations with tools, and their token ids by the default bundle's tokenizer; "": its own template."""
    chat = open_chat_tokenizer(BUNDLE)
    rows = []
    for template in TEMPLATES.values():
        tokenizer = ChatTokenizer(chat.tokenizer, template or chat.template, chat.special_tokens)
        for messages in CONVERSATIONS:
            for tools in (TOOLS[:0], TOOLS):
                shown = tool_use_of(tools)
                ids = tokenizer.encode_chat(messages, shown.prompt if shown else ())
                rows.append({"template": template, "messages": messages, "tools": tools, "ids": ids})
    return msgspec.to_builtins(rows)  # type: ignore[no-any-return]
