"""Turn OpenAI's fields for formats, biases and penalties into a `Constraint`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from outrider_core.chat.tool_grammar import ToolRules
from outrider_core.protocol.constraint import (
    GRAMMAR_JSON_OBJECT,
    GRAMMAR_JSON_SCHEMA,
    GRAMMAR_NONE,
    GRAMMAR_TOOLS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_SCHEMA,
    Constraint,
    pack_bias,
)

#: kinds of `response_format` -> grammar
FORMATS = {"text": GRAMMAR_NONE, "json_object": GRAMMAR_JSON_OBJECT, "json_schema": GRAMMAR_JSON_SCHEMA}
MAX_PENALTY = 2.0


class ConstraintFault(ValueError):
    """A field has an impossible value; param: its name."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(why)
        self.param = param


class _JsonSchema(Struct):
    """name, description, strict: OpenAI's fields. They have no effect: every schema is enforced strictly."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(Struct):
    type: str
    json_schema: _JsonSchema | None = None


def constraint_of(
    begin: int,
    vocab_size: int,
    response_format: Mapping[str, Any] | None = None,
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    tools: ToolRules | None = None,
) -> Constraint | None:
    """Return the constraint of an answer whose first token has index `begin`; None if no field changes the answer.

    logit_bias: by token id, an integer or its decimal text. tools: from `outrider_core.chat.api.tools.tool_use_of`.
    Raises ConstraintFault.
    """
    grammar, schema = _grammar(response_format)
    if tools is not None:
        grammar, schema = GRAMMAR_TOOLS, _tools(tools, grammar, schema)
    bias = _bias(logit_bias, vocab_size)
    frequency = _penalty("frequency_penalty", frequency_penalty)
    presence = _penalty("presence_penalty", presence_penalty)
    if grammar == GRAMMAR_NONE and not (bias or frequency or presence):
        return None
    return Constraint(begin, frequency, presence, *pack_bias(bias), grammar, schema)


def field_of(constraint: Constraint | None) -> str | None:
    """Return the name, in chat completions, of the field that caused `constraint`."""
    if constraint is None:
        return None
    if constraint.grammar == GRAMMAR_NONE:
        return "logit_bias" if constraint.biases else "frequency_penalty"
    return "tools" if constraint.grammar == GRAMMAR_TOOLS else "response_format"


def _grammar(response_format: Mapping[str, Any] | None) -> tuple[int, str]:
    """Return (GRAMMAR_*, the schema as text)."""
    if response_format is None:
        return GRAMMAR_NONE, ""
    try:
        asked = msgspec.convert(response_format, _ResponseFormat)
    except msgspec.ValidationError as error:
        raise ConstraintFault("response_format", f"response_format: {error}") from None
    if asked.type not in FORMATS:
        raise ConstraintFault("response_format.type", f"response_format.type must be one of {', '.join(FORMATS)}")
    grammar = FORMATS[asked.type]
    if grammar != GRAMMAR_JSON_SCHEMA:
        return grammar, ""
    if asked.json_schema is None:
        raise ConstraintFault("response_format.json_schema", "response_format of type json_schema needs json_schema")
    try:
        schema = msgspec.json.encode(asked.json_schema.schema).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintFault("response_format.json_schema.schema", f"the schema is not JSON: {error}") from None
    if len(schema) > MAX_SCHEMA:
        text = f"the schema has {len(schema)} characters; at most {MAX_SCHEMA} are allowed"
        raise ConstraintFault("response_format.json_schema.schema", text)
    return grammar, schema


def _tools(tools: ToolRules, grammar: int, schema: str) -> str:
    """Return the tools as text, with the required form of an answer without calls."""
    form = {"type": "object"} if grammar == GRAMMAR_JSON_OBJECT else msgspec.json.decode(schema or "null")
    try:
        text = msgspec.structs.replace(tools, text=form).as_text()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintFault("tools", f"the tools are not JSON: {error}") from None
    if len(text) > MAX_SCHEMA:
        raise ConstraintFault(
            "tools", f"the tools' schemas have {len(text)} characters; at most {MAX_SCHEMA} are allowed"
        )
    return text


def _bias(logit_bias: Mapping[int, float] | Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Return the amounts by token id, without those of 0."""
    bias: dict[int, float] = {}
    for key, amount in (logit_bias or {}).items():
        try:
            token = int(key) if isinstance(key, str) else operator.index(key)
        except (TypeError, ValueError):
            raise ConstraintFault("logit_bias", f"logit_bias has token ids as keys; {key!r} is not one") from None
        if not 0 <= token < vocab_size:
            text = f"logit_bias names token {token}; the model has tokens 0 to {vocab_size - 1}"
            raise ConstraintFault("logit_bias", text)
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not abs(amount) <= MAX_BIAS:
            text = f"logit_bias of token {token} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            raise ConstraintFault("logit_bias", text)
        if amount:
            bias[token] = amount
    if len(bias) > MAX_BIASES:
        raise ConstraintFault("logit_bias", f"logit_bias has {len(bias)} entries; at most {MAX_BIASES} are allowed")
    return bias


def _penalty(name: str, penalty: float | None) -> float:
    number = 0.0 if penalty is None else penalty
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= MAX_PENALTY:
        raise ConstraintFault(name, f"{name} must be a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
    return float(number)
