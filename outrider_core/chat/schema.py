"""Rewrite a JSON schema for the grammar library, with the same meaning, or a narrower one where the library errs.

llguidance enforces some formats and bounds too loosely, and accepts some schemas whose text it can then never finish
(`docs/decisions/grammar-library.md` has the list). Such a schema is rewritten here, or refused with the keyword at
fault, so that every accepted schema can be served. Nothing here depends on a clock: every replica refuses the same
ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from decimal import Decimal
from itertools import combinations
from typing import Any, Protocol
from urllib.parse import quote, unquote

#: numbers are compared as float64, which cannot distinguish all whole numbers beyond this
EXACT = 2**53
#: most decimals of a number with an exclusive bound
DECIMALS = 6
#: most parser items where all alternatives are open: 100 objects of 5 optional properties are 2,700
MAX_WIDTH = 3000
NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
#: keywords that hold a schema, several of them, or several by name
ONE = ("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames",
       "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
#: formats that llguidance enforces too loosely -> patterns used instead: existing days, no leap seconds
FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {"format": "hostname", "maxLength": 253},
    "email": {
        "format": "email",
        "maxLength": 254,
        "pattern": r"^[^@]{1,64}@(?:\[.*|[^.@]{1,63}(?:\.[^.@]{1,63})*)$",
    },
}
#: characters that the library omits from a text that it must write
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPED_CONTROL = re.compile(
    r"(?<!\\)(?:\\\\)*\\(?:v|0|c[A-Za-z]|x(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|u00(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF]))"
)
#: keywords without effect -> at which values
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
#: parser items of an object beside four for each possible next property, and keywords that mark such a schema
_OBJECT, _OBJECTS = 7, {"properties", "patternProperties", "additionalProperties", "items", "prefixItems"}
#: rounds in which recursive definitions are examined
_ROUNDS = 64
#: most steps of testing the schemas of a request, of some 50 to 150 us each
STEPS = 16_384
#: characters of a schema matched against a pattern of names per step
NAMED_CHARACTERS = 512
#: parts of a schema, pairs and the like examined per step
PARTS = 32


class SchemaFault(ValueError):
    """This schema cannot be served; the message names the keyword."""


class TooCostly(SchemaFault):
    """The schemas of this request together take too many steps to test."""


class Trial:
    """The budget for testing the schemas of one request. It counts steps, so that every replica refuses the same ones.

    steps: taken so far. cancelled: returns whether the result is no longer needed, asked between walks.
    """

    def __init__(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.steps, self.cancelled = 0, cancelled
        self.patterns = dict[str, Pattern]()  # tested so far
        self._parts = 0

    def step(self, steps: int = 1) -> None:
        """Count steps. Raises TooCostly."""
        self.steps += steps
        if self.steps > STEPS:
            raise TooCostly(
                "the schemas of the request together are too costly to test; simplify patterns, "
                "patternProperties or $ref"
            )

    def part(self) -> None:
        """Count something small; PARTS of them are one step. Raises TooCostly."""
        self._parts += 1
        if self._parts % PARTS == 0:
            self.step()

    def go_on(self) -> None:
        """Call before lengthy work. Raises CancelledError."""
        if self.cancelled():
            raise CancelledError


class Pattern(Protocol):
    """A regular expression of a schema. Both methods raise SchemaFault if it cannot be served."""

    def strings(self) -> list[str]:
        """Return some strings that match it; fewer, or none, if they are long."""

    def matches(self, text: str) -> bool:
        """Return whether `text` matches it."""


def prepared(
    schema: dict[str, Any], pattern: Callable[[str, Trial], Pattern], trial: Trial
) -> tuple[dict[str, Any], int]:
    """Return the schema for llguidance, and the parser items at its widest place.

    Raises SchemaFault, CancelledError, or RecursionError if it is nested too deeply.
    """
    _check_numbers(schema)
    shaped: dict[str, Any] = _Shaper(pattern, trial).shaped(schema)
    _check_multiples(shaped, trial)
    shape = _Shape(shaped, trial)
    width = shape.check()
    finite: dict[str, Any] = shape.finite(shaped)
    return finite, width


def pointed(root: dict[str, Any], reference: str) -> Any:
    """Return the part that a reference within a schema leads to; None if it is not a path that exists."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    there: Any = root
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(there, list) and key.isdecimal() and int(key) < len(there):
            there = there[int(key)]
        elif isinstance(there, dict) and key in there:
            there = there[key]
        else:
            return None
    return there


class _Shaper:
    """Rewrites what the library enforces too loosely, keyword by keyword."""

    def __init__(self, pattern: Callable[[str, Trial], Pattern], trial: Trial) -> None:
        self._make, self._trial = pattern, trial

    def shaped(self, schema: Any) -> Any:
        """Return `schema` rewritten with all its parts; invalid parts are left for the library to refuse."""
        if not isinstance(schema, dict):
            return schema
        self._trial.part()
        out = {key: self._value(key, value) for key, value in _without_idle(schema).items()}
        self._string(out)
        _numbers(out)
        if "patternProperties" in out:
            self._names(out)
        if out.get("minProperties") is not None:
            _counted(out)
        return out

    def _value(self, key: str, value: Any) -> Any:
        if key == "$ref" and isinstance(value, str):
            return quote(value, safe="#/%:?@!$&'()*+,;=~-._[]")
        if key in NAMED and isinstance(value, dict):
            return {name: self.shaped(each) for name, each in value.items()}
        if key in LISTED and isinstance(value, list):
            return [self.shaped(each) for each in value]
        if key in ONE:
            return self.shaped(value)
        if key in ("const", "enum"):
            _check_text(key, value)
        if key in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _string(self, schema: dict[str, Any]) -> None:
        given = schema.get("pattern")
        if isinstance(given, str):
            self._check(given)
        form = schema.get("format")
        more = FORMATS.get(form) if isinstance(form, str) else None
        if more is None:
            return
        del schema["format"]
        if more.keys() & schema.keys():
            kind = {"type": schema["type"]} if "type" in schema else {}
            schema["allOf"] = [*_listed(schema, "allOf"), {**kind, **more}]
        else:
            schema |= more

    def _check(self, pattern: str) -> None:
        """Raise SchemaFault if no string of the pattern can be written."""
        outside = _CLASS.sub("", pattern)
        if _CONTROL.search(outside) or _ESCAPED_CONTROL.search(outside):
            raise SchemaFault(f"pattern {pattern!r} asks for a control character, which is not supported here")
        self._pattern(pattern).strings()

    def _pattern(self, pattern: str) -> Pattern:
        """Return the pattern, compiled once for a request."""
        if pattern not in self._trial.patterns:
            self._trial.go_on()
            self._trial.patterns[pattern] = self._make(pattern, self._trial)
        return self._trial.patterns[pattern]

    def _names(self, schema: dict[str, Any]) -> None:
        """Check patterns of names that only listed properties match: the library would begin one more and never end."""
        patterns, properties = schema["patternProperties"], schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list):
            return
        names = [*properties, *(name for name in required if isinstance(name, str) and name not in properties)]
        for pattern, inner in list(patterns.items()):
            self._check(pattern)
            found = self._pattern(pattern).strings()
            if not names or not found or any(each not in names for each in found):
                continue
            copied = len(str(inner)) // NAMED_CHARACTERS
            for name in names:
                if self._pattern(pattern).matches(name):
                    self._trial.step(copied)
                    properties = {**properties, name: {"allOf": [properties.get(name, True), inner]}}
            schema |= {"properties": properties, "additionalProperties": False}
            del patterns[pattern]
        if not patterns:
            del schema["patternProperties"]


def _without_idle(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without keywords that have no effect, some of which the library refuses."""
    idle = {
        key
        for key, values in _IDLE.items()
        if key in schema and any(type(schema[key]) is type(each) and schema[key] == each for each in values)
    }
    if "if" not in schema:
        idle |= {"then", "else"}
    elif "then" not in schema and "else" not in schema:
        idle.add("if")
    if "contains" not in schema:
        idle |= {"minContains", "maxContains"}
    return {key: value for key, value in schema.items() if key not in idle}


def _numbers(schema: dict[str, Any]) -> None:
    """Make exclusive bounds hold for the float64 that is read: decimals end where it differs from the bound.

    The bound nearer to 0 becomes inclusive: of two bounds with the same whole part the library lets it pass.
    """
    if schema.get("type") == "integer":
        return
    exclusive = dict[str, float]()
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        limit = schema.get(bound) if schema.get(key) is True else schema.get(key)  # the form of draft 4
        if isinstance(limit, int | float) and not isinstance(limit, bool):
            exclusive[key] = limit
    if not exclusive:
        return
    decimals = max(0, min(DECIMALS, 15 - len(str(int(max(map(abs, exclusive.values())))))))
    step = Decimal(10) ** -decimals
    schema.setdefault("multipleOf", float(step) if decimals else 1)
    for key, bound, direction in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        if key not in exclusive or direction * exclusive[key] < 0:
            continue
        limits = [float(Decimal(str(exclusive[key])) + direction * step)]
        if isinstance(schema.get(bound), int | float) and schema[key] is not True:
            limits.append(schema[bound])
        del schema[key]
        schema[bound] = max(limits) if direction > 0 else min(limits)


def _check_multiples(schema: Any, trial: Trial) -> None:
    """Raise SchemaFault if the library's common multiple of two would not fit its 32 bits."""
    keys, values = set[str](), set[float]()
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            keys |= one.keys()
            value = one.get("multipleOf")
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.add(abs(value))
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    if not keys & {"allOf", "anyOf", "oneOf", "$ref"}:
        return
    for one, other in combinations(map(Decimal, map(str, values)), 2):
        trial.part()
        scale = Decimal(10) ** max(0, -min(_exponent(one), _exponent(other)))
        if one * scale * other * scale >= 2**32:
            raise SchemaFault(f"multipleOf {one} and {other}: their common multiple is too large")


def _exponent(number: Decimal) -> int:
    exponent = number.normalize().as_tuple().exponent
    return exponent if isinstance(exponent, int) else 0


def _counted(schema: dict[str, Any]) -> None:
    """Refuse a minProperties that is not enforced: the library counts a name that it writes twice as two."""
    least, required = schema["minProperties"], schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list):
        return
    if least > len({each for each in required if isinstance(each, str)}) + 1:
        raise SchemaFault(f"minProperties {least} is above the number of required properties by more than one")


def _check_numbers(schema: Any) -> None:
    """Raise SchemaFault if it compares with a whole number that float64 cannot distinguish from its neighbours."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(name or (key if key in NUMBERS else ""), one) for key, one in value.items()]
        elif isinstance(value, list):
            left += [(name, one) for one in value]
        elif name and isinstance(value, int) and abs(value) > EXACT:
            raise SchemaFault(f"{name} has {value}: whole numbers beyond 2**53 cannot be distinguished here")
        elif isinstance(value, float) and not math.isfinite(value):
            raise SchemaFault(f"{name or 'a number'} is beyond what float64 holds")


def _check_text(key: str, value: Any) -> None:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str) and _CONTROL.search(one):
            raise SchemaFault(f"{key} has {one!r}, with a control character, which is not supported here")


class _Shape:
    """Checks a schema before it is compiled, for texts without an end and too many alternatives at one place."""

    def __init__(self, root: dict[str, Any], trial: Trial) -> None:
        self._root, self._trial = root, trial
        self._targets: dict[str, Any] = {}  # by reference
        # by the target's identity: one that has many spellings is examined once
        self._ends: set[int] = set()
        self._widths: dict[int, tuple[int, int, int]] = {}

    def check(self) -> int:
        """Return the parser items at the widest place. Raises SchemaFault."""
        found = map(self._at, dict.fromkeys(_references(self._root)))
        places = {id(place): place for place in found if place is not None}
        for turn in range(_ROUNDS):
            self._trial.go_on()
            before = len(self._ends)
            for key in list(places) if turn % 2 else reversed(places):
                if key not in self._ends and self._finite(places[key]):
                    self._ends.add(key)
            if len(self._ends) == before:
                break
        else:
            self._ends |= set(places)
        if not self._finite(self._root):
            raise SchemaFault("$ref requires itself without an end: no finite text obeys it")
        width = max(self._width(self._root)[1:])
        if width > MAX_WIDTH:
            text = f"anyOf, oneOf and optional properties leave {width} ways open at once; at most {MAX_WIDTH} may be"
            raise SchemaFault(text)
        return width

    def finite(self, schema: Any) -> Any:
        """Return `schema` with false in place of references that require themselves without an end."""
        if isinstance(schema, list):
            return [self.finite(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if self._endless(schema):
            return False
        named = {key: schema[key] for key in NAMED if isinstance(schema.get(key), dict)}
        return {
            **{key: self.finite(value) if key in ONE + LISTED else value for key, value in schema.items()},
            **{key: {name: self.finite(each) for name, each in value.items()} for key, value in named.items()},
        }

    def _at(self, reference: Any) -> Any:
        if not isinstance(reference, str):
            return None
        if reference not in self._targets:
            self._targets[reference] = pointed(self._root, reference)
        return self._targets[reference]

    def _endless(self, schema: dict[str, Any]) -> bool:
        """Return whether it refers to something without an end, according to `self._ends`."""
        there = self._at(schema.get("$ref"))
        return there is not None and id(there) not in self._ends

    def _finite(self, schema: Any) -> bool:
        """Return whether some text obeys it, according to `self._ends` for references."""
        self._trial.part()
        if not isinstance(schema, dict):
            return True
        if self._endless(schema):
            return False
        if not all(map(self._finite, _listed(schema, "allOf"))):
            return False
        if any(schema.get(key) and not any(map(self._finite, _listed(schema, key))) for key in ("anyOf", "oneOf")):
            return False
        if schema.get("type") == "object" and isinstance(schema.get("properties", {}), dict):
            required = [each for each in _listed(schema, "required") if isinstance(each, str)]
            return all(self._finite(schema.get("properties", {}).get(name)) for name in required)
        if schema.get("type") == "array" and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0:
            first = _listed(schema, "prefixItems") or _listed(schema, "items") or [schema.get("items")]
            return all(map(self._finite, first[: schema["minItems"]]))
        return True

    def _width(self, schema: Any) -> tuple[int, int, int]:
        """Return (alternatives, parser items if all of them are open, those of the widest place inside)."""
        self._trial.part()
        if not isinstance(schema, dict):
            return 1, 0, 0
        parts = [schema.get(key) for key in ONE] + _listed(schema, "items") + _listed(schema, "prefixItems")
        for key in ("properties", "patternProperties"):
            if isinstance(named := schema.get(key), dict):
                parts += named.values()
        inside = max((max(self._width(each)[1:]) for each in parts if isinstance(each, dict)), default=0)
        found = 1, _OBJECT + 4 * _longest_choice(schema) if schema.keys() & _OBJECTS else 0, inside
        if (there := self._at(schema.get("$ref"))) is not None:
            if id(there) not in self._widths:
                self._widths[id(there)] = 1, 0, 0  # a recursive one adds no alternative
                self._widths[id(there)] = self._width(there)
            found = _both(found, self._widths[id(there)])
        for each in _listed(schema, "allOf"):
            found = _both(found, self._width(each))
        for key in ("anyOf", "oneOf"):
            if options := [self._width(each) for each in _listed(schema, key)]:
                found = _both(found, tuple(map(sum, zip(*options, strict=True))))  # type: ignore[arg-type]
        return found


def _both(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    """Combine two schemas that a text obeys together: every alternative of one with each of the other."""
    ways = one[0] * other[0]
    width = other[0] * one[1] + one[0] * other[1] - (ways * _OBJECT if one[1] and other[1] else 0)
    return ways, width, other[0] * one[2] + one[0] * other[2]


def _longest_choice(schema: dict[str, Any]) -> int:
    """Return the largest number of properties that may come next at one place."""
    properties, required = schema.get("properties"), _listed(schema, "required")
    run = longest = 0
    for name in properties if isinstance(properties, dict) else ():
        run = 0 if name in required else run + 1
        longest = max(longest, run)
    return longest


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _references(schema: Any) -> Iterator[str]:
    """Yield every `$ref` in it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            elif key in ONE + LISTED:
                yield from _references(value)
            elif key in NAMED and isinstance(value, dict):
                for each in value.values():
                    yield from _references(each)
