"""OpenAI's fields `tools`, `tool_choice` and `parallel_tool_calls`, and the calls that an answer's text holds."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from outrider_core.chat.api.constraints import ConstraintFault
from outrider_core.chat.tool_grammar import CALL_END, MAX_TOOLS, NAME, TAG, ToolFunction, ToolRules
from outrider_core.protocol.text import StopStrings

CHOICES = ("none", "auto", "required")
_HEAD = re.compile(rf'\s*\{{\s*"name":\s*"({NAME})",\s*"arguments":\s*')


class _Function(Struct):
    """strict changes nothing: every schema is obeyed."""

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
    """prompt: the functions as chat templates take them. rules: what the answer is held to."""

    prompt: list[dict[str, Any]]
    rules: ToolRules


def tool_use_of(tools: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None) -> ToolUse | None:
    """None where no tool may be called. Raises ConstraintFault."""
    if tools and len(tools) > MAX_TOOLS:
        raise ConstraintFault("tools", f"{len(tools)} tools; at most {MAX_TOOLS} are taken")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    names = [each.name for each in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConstraintFault(f"tools[{index}].function.name", f"two tools have the name {name}")
    chosen = _chosen(choice)
    if not functions:
        if chosen.only or chosen.required:
            raise ConstraintFault("tool_choice", "tool_choice asks for a call, and there are no tools")
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
        raise ConstraintFault(f"{where}.type", f"{where}: only tools of type function are called here")
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
    """The schema of a call's arguments: an object, and without more properties than it names."""
    schema = {"type": "object", **(parameters or {"properties": {}})}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _shown(function: _Function) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    return {**shown, "parameters": function.parameters or {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class CallDelta:
    """What is new of a call. index: in the answer; id and name: with the first piece. arguments: JSON text."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


class CallReader:
    """Cuts an answer's text into what is said and what is called, while it arrives.

    formed: an answer that calls nothing is JSON, which may hold the tag in its strings: only one that begins with the
    tag calls. White space before a call and before its arguments belongs to neither: OpenAI's client fails on arguments
    of nothing else. calls: that have ended.
    """

    def __init__(self, formed: bool = False) -> None:
        self.calls = 0
        self._index = -1
        self._inside, self._named, self._argues = False, False, False
        self._formed, self._says = formed, False
        self._held = self._space = ""

    @property
    def inside(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._inside

    def push(self, piece: str) -> list[str | CallDelta]:
        """Text and parts of calls that `piece` completes."""
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

    def flush(self) -> list[str | CallDelta]:
        """What is left where the answer ends, perhaps in the middle of a call."""
        if not self._inside:
            text, self._held = self._space + self._held, ""
            return [text] if text and (self._index < 0 or text.strip()) else []
        held, self._held = self._held, ""
        return [CallDelta(self._index, held)] if self._named and held and "<" not in held else []

    def _step(self, out: list[str | CallDelta]) -> bool:
        """Take what is sure of the held text. Returns whether more may be."""
        if not self._inside:
            return self._say(out)
        if not self._named:
            found = _HEAD.match(self._held)
            if not found:
                return False
            self._index, self._named, self._argues = self._index + 1, True, False
            self._held = self._held[found.end() :]
            out.append(CallDelta(self._index, "", f"call_{secrets.token_hex(12)}", found.group(1)))
            return True
        self._held = self._held if self._argues else self._held.lstrip()
        self._argues = bool(self._held)
        cut = StopStrings([CALL_END])
        sure = cut.push(self._held)
        self._held = self._held[len(sure) + len(CALL_END) :] if cut.hit else cut.flush()
        if sure:
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
