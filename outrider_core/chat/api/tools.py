"""OpenAI's fields `tools`, `tool_choice` and `parallel_tool_calls`, and calls in an answer's text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from outrider_core.chat.api.constraints import ConstraintFault
from outrider_core.chat.schema import pointed
from outrider_core.chat.tool_grammar import CALL_END, MAX_TOOLS, NAME, TAG, ToolFunction, ToolRules
from outrider_core.protocol.text import StopStrings

CHOICES = ("none", "auto", "required")
_HEAD = re.compile(rf'\s*\{{\s*"name":\s*"({NAME})",\s*"arguments":\s*')
#: keywords that may ask for properties in ways that are not examined here
_FURTHER = ("not", "if", "dependencies", "dependentSchemas", "$dynamicRef", "$recursiveRef", "minProperties")


class _Function(Struct):
    """strict has no effect: every schema is enforced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct):
    type: str
    function: _Function | None = None


class _Named(Struct):
    name: str


class _ToolChoice(Struct):
    type: Literal["function"]
    function: _Named


class _AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_ToolChoice], Meta(min_length=1)]


class _Allowed(Struct):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


class _Chosen(NamedTuple):
    """only: names of the functions that may be called, None: all. single: one call, of a named function."""

    only: tuple[str, ...] | None = None
    required: bool = False
    single: bool = False


@dataclass(frozen=True)
class ToolUse:
    """prompt: the functions in the form of chat templates. rules: the constraint on the answer."""

    prompt: list[dict[str, Any]]
    rules: ToolRules


def tool_use_of(tools: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None) -> ToolUse | None:
    """Return the tools of a request; None if none may be called. Raises ConstraintFault."""
    if tools and len(tools) > MAX_TOOLS:
        raise ConstraintFault("tools", f"{len(tools)} tools; at most {MAX_TOOLS} are allowed")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    names = [each.name for each in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConstraintFault(f"tools[{index}].function.name", f"two tools have the name {name}")
    chosen = _chosen(choice)
    if not functions:
        if chosen.only or chosen.required:
            raise ConstraintFault("tool_choice", "tool_choice asks for a call, but there are no tools")
        return None
    if choice == "none":
        return None
    only = names if chosen.only is None else chosen.only
    if unknown := next((name for name in only if name not in names), ""):
        raise ConstraintFault("tool_choice", f"tool_choice names {unknown}, which is not among the tools")
    rules = ToolRules(
        tuple(ToolFunction(each.name, _closed(each.parameters)) for each in functions if each.name in only),
        required=chosen.required,
        parallel=parallel is not False and not chosen.single,
    )
    return ToolUse([{"type": "function", "function": _shown(each)} for each in functions], rules)


def _function(tool: Any, where: str) -> _Function:
    try:
        read = msgspec.convert(tool, _Tool)
    except msgspec.ValidationError as error:
        raise ConstraintFault(where, f"{where}: {error}") from None
    if read.type != "function" or read.function is None:
        raise ConstraintFault(f"{where}.type", f"{where}: only tools of type function are supported here")
    if not re.fullmatch(NAME, read.function.name):
        raise ConstraintFault(f"{where}.function.name", f"{where}: a function's name must match {NAME}")
    if (read.function.parameters or {}).get("type", "object") != "object":
        text = f"{where}: arguments are objects, so the type of parameters must be object"
        raise ConstraintFault(f"{where}.function.parameters", text)
    if "x-guidance" in (read.function.parameters or {}):
        raise ConstraintFault(f"{where}.function.parameters", f"{where}: x-guidance is not taken here")
    return read.function


def _chosen(choice: Any) -> _Chosen:
    if choice is None or choice in CHOICES:
        return _Chosen(required=choice == "required")
    try:
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            allowed = msgspec.convert(choice, _Allowed).allowed_tools
            return _Chosen(tuple(each.function.name for each in allowed.tools), allowed.mode == "required")
        return _Chosen((msgspec.convert(choice, _ToolChoice).function.name,), required=True, single=True)
    except msgspec.ValidationError:
        pass
    ways = '{"type": "function", "function": {"name": ...}} or an allowed_tools with mode auto or required'
    raise ConstraintFault("tool_choice", f"tool_choice must be {', '.join(CHOICES)}, {ways}")


def _closed(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object, in all parts without properties that it does not name."""
    schema = {"type": "object", **(parameters or {"properties": {}})}
    names = _names(schema, schema, set())
    if isinstance(schema.get("properties"), dict) and names is not None and "additionalProperties" not in schema:
        others = {name: True for name in names if name not in schema["properties"]}
        schema |= {"properties": {**schema["properties"], **others}, "additionalProperties": False}
    return schema


def _names(schema: Any, root: dict[str, Any], seen: set[str]) -> list[str] | None:
    """Return all properties that an object of this schema names; None if that cannot be determined."""
    if not isinstance(schema, dict):
        return []
    if any(key in schema for key in _FURTHER):
        return None
    named, required = schema.get("properties"), schema.get("required")
    names = [*named] if isinstance(named, dict) else []
    names += [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    parts = [each for key in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        if (there := pointed(root, reference)) is None:
            return None
        parts.append(there)
    for part in parts:
        found = _names(part, root, seen)
        if found is None:
            return None
        names += found
    return names


def _shown(function: _Function) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    return {**shown, "parameters": function.parameters or {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class CallDelta:
    """A new part of a call. index: in the answer; id and name: with the first part. arguments: JSON text."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


class CallReader:
    """Separates calls from text in an answer while it arrives.

    formed: an answer without calls is JSON, which may hold the tag in its strings, so only an answer that begins with
    the tag calls. required: an answer consists of calls alone. White space before a call and before its arguments is
    dropped: OpenAI's client fails on arguments of white space alone. calls: number of finished ones.
    """

    def __init__(self, formed: bool = False, required: bool = False) -> None:
        self.calls, self._required = 0, required
        self._arguments = ""
        self._index = -1
        self._inside, self._named, self._argues = False, False, False
        self._formed, self._says = formed, False
        self._held = self._space = ""

    @property
    def inside(self) -> bool:
        """Return whether a call has begun and not ended."""
        return self._inside

    def push(self, piece: str) -> list[str | CallDelta]:
        """Return text and parts of calls that `piece` completes."""
        out: list[str | CallDelta] = []
        self._held += piece
        begun = self._inside or self._index >= 0
        if self._formed and not begun and (self._says or not TAG.startswith(self._held[: len(TAG)])):
            self._says = True
            said, self._held = self._held, ""
            return [said] if said else []
        while self._step(out):
            pass
        return out

    def flush(self, cut: bool = False) -> list[str | CallDelta]:
        """Return the rest at the end of the answer, perhaps in the middle of a call; cut: by a limit of tokens.

        The beginning of a tag is dropped, unless the answer ended with it by itself.
        """
        if not self._inside:
            text, self._held = "" if self._required else self._space + "" if cut else self._space + self._held, ""
            return [text] if text and self._index < 0 else []
        held, self._held = self._held, ""
        if not self._named or not held or _whole(self._arguments):
            return []
        return [CallDelta(self._index, held[:1])]  # the arguments' opening brace

    def _step(self, out: list[str | CallDelta]) -> bool:
        """Take the certain part of the held text. Returns whether there may be more."""
        if not self._inside:
            return self._say(out)
        if not self._named:
            found = _HEAD.match(self._held)
            if not found:
                return False
            self._index, self._named, self._argues, self._arguments = self._index + 1, True, False, ""
            self._held = self._held[found.end() :]
            out.append(CallDelta(self._index, "", f"call_{secrets.token_hex(12)}", found.group(1)))
            return True
        self._held = self._held if self._argues else self._held.lstrip()
        self._argues = bool(self._held)
        cut = StopStrings([CALL_END])
        sure = cut.push(self._held)
        self._held = self._held[len(sure) + len(CALL_END) :] if cut.hit else cut.flush()
        if sure:
            self._arguments += sure
            out.append(CallDelta(self._index, sure))
        if cut.hit:
            self.calls, self._inside, self._named = self.calls + 1, False, False
        return cut.hit

    def _say(self, out: list[str | CallDelta]) -> bool:
        cut = StopStrings([TAG])
        text = self._space + cut.push(self._held)
        said = text.rstrip()
        self._space = text[len(said) :]
        self._held = self._held.partition(TAG)[2] if cut.hit else cut.flush()
        if said:
            out.append(said)
        if cut.hit:
            self._inside, self._space = True, ""
        return cut.hit


def _whole(arguments: str) -> bool:
    """Return whether these are all of a call's arguments."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True
