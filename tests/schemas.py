"""Random JSON schemas whose texts are short, so that a random model comes to their end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

_names = st.text('abcdeé"\\ ', min_size=1, max_size=4)
_leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.just({"type": "string", "pattern": "^[ab]{1,3}-[0-9]{2}$"}),
    st.just({"type": "string", "format": "date"}),
    st.tuples(st.integers(-300, 0), st.integers(0, 900)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.lists(st.one_of(_names, st.integers(-9, 99), st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    _names.map(lambda value: {"const": value}),
)


def _object(fields: dict[str, dict[str, Any]], optional: int) -> dict[str, Any]:
    required = list(fields)[: len(fields) - optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _wider(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(_object, st.dictionaries(_names, inner, max_size=3), st.integers(0, 2)),
        st.tuples(inner, st.integers(0, 1), st.integers(1, 3)).map(
            lambda each: {"type": "array", "items": each[0], "minItems": each[1], "maxItems": each[2]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    )


schemas: st.SearchStrategy[dict[str, Any]] = st.recursive(_leaves, _wider, max_leaves=5)


class WideSchemas:
    """Random schemas of every keyword that llguidance knows, many of which mean nothing or contradict themselves."""

    NAMES = ("a", "b", "ab", "é", "x-y", "a b", 'q"', "n\t")
    PATTERNS = (
        "^a$", "^[ab]$", "^x-", "^[a-z]{1,3}$", "b", "^.*$", r"^\p{L}+$", r"^[\p{L}\p{N}_ .()-]+$", r"^\d{2}-\w$",
        "^(?:a|ab)$", "^[^@]+@[a-z]+$",
    )  # fmt: skip
    FORMATS = ("date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "duration")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def schema(self) -> dict[str, Any]:
        """An object or anything else, with definitions that may be recursive."""
        root = self._any(3)
        if self._rng.random() < 0.3:
            root["$defs"] = {"Größe": self._any(1), "d": self._any(2)}
        return root

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds = [self._string, self._number, self._plain, self._values]
        if depth:
            kinds += [self._object, self._object, self._object, self._array, self._composed, self._reference]
        out: dict[str, Any] = rng.choice(kinds)(depth)
        if depth and self._chance(0.1):
            out[rng.choice(("allOf", "anyOf", "oneOf"))] = [self._any(depth - 1) for _ in range(rng.randint(1, 2))]
        return out

    def _plain(self, depth: int) -> dict[str, Any]:
        return self._rng.choice(
            [{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": "integer"}]
        )

    def _values(self, depth: int) -> dict[str, Any]:
        values = [1, 0, -2, 0.5, "a", "é\t", None, True, ["a"], {"a": 1}] + ["\x01"] * self._chance(0.1)
        chosen = self._rng.sample(values, self._rng.randint(1, 4))
        return {"enum": chosen} if self._chance(0.7) else {"const": chosen[0]}

    def _string(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {"type": "string"} if self._chance(0.9) else {}
        if self._chance(0.4):
            out["pattern"] = self._rng.choice(self.PATTERNS)
        elif self._chance(0.4):
            out["format"] = self._rng.choice(self.FORMATS)
        if self._chance(0.3):
            out["minLength"] = self._rng.randint(0, 3)
        if self._chance(0.5):
            out["maxLength"] = self._rng.randint(1, 12)
        return out

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        out: dict[str, Any] = {"type": rng.choice(("integer", "number"))}
        for key in ("minimum", "exclusiveMinimum"):
            if self._chance(0.3):
                out[key] = rng.choice((0, -3, 1, 0.1, -0.5))
        for key in ("maximum", "exclusiveMaximum"):
            if self._chance(0.3):
                out[key] = rng.choice((1, 5, 100, 1.5, 0.2))
        if self._chance(0.2):
            out["multipleOf"] = rng.choice((1, 2, 3, 0.5))
        return out

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        out: dict[str, Any] = {"type": "array", "items": self._any(depth - 1), "maxItems": rng.randint(0, 4)}
        if self._chance(0.4):
            out["minItems"] = rng.randint(0, 2)
        if self._chance(0.3):
            out["prefixItems"] = [self._any(depth - 1) for _ in range(rng.randint(1, 2))]
        if self._chance(0.1):
            out["uniqueItems"] = self._chance(0.5)
        return out

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        out: dict[str, Any] = {"type": "object"} if self._chance(0.9) else {}
        names = rng.sample(self.NAMES, rng.randint(0, 3))
        if names or self._chance(0.5):
            out["properties"] = {name: self._any(depth - 1) for name in names}
        if self._chance(0.6):
            out["required"] = [name for name in names if self._chance(0.6)] + ["c"] * self._chance(0.1)
        if self._chance(0.35):
            patterns = rng.sample(self.PATTERNS, rng.randint(1, 2))
            out["patternProperties"] = {each: self._any(depth - 1) for each in patterns}
        if self._chance(0.7):
            out["additionalProperties"] = False if self._chance(0.7) else self._any(depth - 1)
        if self._chance(0.15):
            out["minProperties"] = rng.randint(0, 3)
        if self._chance(0.15):
            out["maxProperties"] = rng.randint(1, 3)
        return out

    def _composed(self, depth: int) -> dict[str, Any]:
        key = self._rng.choice(("allOf", "anyOf", "oneOf"))
        return {key: [self._any(depth - 1) for _ in range(self._rng.randint(1, 3))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": self._rng.choice(("#/$defs/d", "#/$defs/Größe", "#/$defs/Gr%C3%B6%C3%9Fe", "#"))}


_TEXT: dict[str, Any] = {"type": "string", "maxLength": 8}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 999}
#: what apps ask for, as fields
_THINGS: dict[str, dict[str, dict[str, Any]]] = {
    "person": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
    },
    "place": {
        "city": _TEXT,
        "country": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "lat": {"type": "number", "minimum": -90, "maximum": 90},
    },
    "event": {"title": _TEXT, "start": {"type": "string", "format": "date-time"}, "all_day": {"type": "boolean"}},
    "invoice": {
        "number": {"type": "string", "pattern": r"^INV-\d{4,6}$"},
        "due": {"type": "string", "format": "date"},
        "total": {"type": "number", "exclusiveMinimum": 0},
    },
    "weather": {
        "location": _TEXT,
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "search": {
        "query": {"type": "string", "minLength": 1, "maxLength": 9},
        "limit": {"type": "integer", "default": 10, "minimum": 1, "maximum": 100},
        "tags": {"type": "array", "items": _TEXT, "maxItems": 2},
    },
    "file": {"path": _TEXT, "mode": {"type": "string", "enum": ["r", "w", "a"]}, "size": _COUNT},
    "command": {
        "argv": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2},
        "cwd": {"type": ["string", "null"], "maxLength": 5},
        "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600},
    },
    "review": {"stars": {"type": "integer", "minimum": 1, "maximum": 5}, "text": _TEXT, "language": {"const": "en"}},
    "user": {
        "id": {"type": "string", "format": "uuid"},
        "login": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,7}$"},
        "roles": {"type": "array", "items": {"enum": ["admin", "dev", "guest"]}, "maxItems": 2},
    },
    "host": {
        "name": {"type": "string", "format": "hostname", "maxLength": 12},
        "ip": {"type": "string", "format": "ipv4"},
        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
    "letters": {
        "given": {"type": "string", "pattern": r"^[\p{L}\p{N}_ .()-]+$", "maxLength": 6},
        "family": {"type": "string", "pattern": r"^\p{L}+$", "maxLength": 6},
        "nick": _TEXT,
    },
    "colour": {
        "hex": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
        "alpha": {"type": "number", "minimum": 0, "maximum": 1},
        "name": {"enum": ["red", "grün", "青"]},
    },
    "money": {
        "currency": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "amount": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 99},
        "paid": {"type": "boolean"},
    },
    "point": {
        "type": {"const": "Point"},
        "coordinates": {
            "type": "array",
            "prefixItems": [{"type": "number"}, {"type": "number"}],
            "items": False,
            "minItems": 2,
        },
        "bbox": {"type": "null"},
    },
    "flags": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"enum": [True, None, 0, "x"]}},
    "step": {
        "thought": _TEXT,
        "action": {"enum": ["think", "act", "stop"]},
        "score": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    },
    "book": {
        "isbn": {"type": "string", "pattern": r"^\d{3}-\d{10}$"},
        "year": {"type": "integer", "minimum": 1450, "maximum": 2100},
        "pages": _COUNT,
    },
    "clock": {"at": {"type": "string", "format": "time"}, "every": {"enum": ["1h", "1d"]}, "zone": _TEXT},
    "schema ü": {"größe": _COUNT, "a/b": _TEXT, "c~d": {"type": "boolean"}},
}


def everyday() -> Iterator[dict[str, Any]]:
    """Schemas of the kinds that pydantic, zod, function calls, OpenAPI and configuration files bring."""
    for name, fields in _THINGS.items():
        names = list(fields)
        closed = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
        some = {**closed, "required": names[:1]}
        tagged = [
            {
                "type": "object",
                "properties": {"kind": {"const": key}, key: value},
                "required": ["kind", key],
                "additionalProperties": False,
            }
            for key, value in fields.items()
        ]
        nullable = {
            key: {"anyOf": [value, {"type": "null"}], "default": None, "title": key} for key, value in fields.items()
        }
        yield closed
        yield {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": name,
            "definitions": {name: some},
            "type": "array",
            "items": {"$ref": f"#/definitions/{quote(name)}"},
            "maxItems": 2,
        }
        yield {
            "$defs": {name: {**closed, "title": name}},
            "type": "object",
            "properties": {
                "item": {"$ref": f"#/$defs/{name}"},
                "more": {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]},
            },
            "required": ["item"],
            "additionalProperties": False,
        }
        yield {"type": "object", "properties": nullable, "title": name, "additionalProperties": False}
        yield {"anyOf": tagged}
        yield {"oneOf": tagged}
        yield {
            "type": "object",
            "patternProperties": {"^[a-z]{1,2}$": fields[names[0]]},
            "additionalProperties": False,
            "maxProperties": 2,
        }
        yield {"type": "object", "additionalProperties": fields[names[1]], "maxProperties": 2}
        yield {
            "type": "object",
            "allOf": [
                {"properties": {names[0]: fields[names[0]]}, "required": names[:1]},
                {"properties": {names[1]: fields[names[1]]}, "required": names[1:2]},
            ],
            "maxProperties": 2,
        }
        yield {
            "type": "object",
            "properties": {**fields, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
            "required": names[:1],
            "additionalProperties": False,
        }
        yield {
            "type": "object",
            "properties": fields,
            "required": names,
            "patternProperties": {f"^{names[0]}$": True},
            "additionalProperties": False,
        }
        yield {
            "type": "object",
            "properties": {
                "status": {"enum": ["ok", "error"]},
                "data": {
                    "type": ["object", "null"],
                    "properties": fields,
                    "required": names,
                    "additionalProperties": False,
                },
            },
            "required": ["status", "data"],
            "additionalProperties": False,
        }
        yield {"type": "array", "items": some, "minItems": 1, "maxItems": 2, "uniqueItems": name in ("user", "file")}
        yield {
            "type": "object",
            "properties": fields,
            "additionalProperties": {"type": "string", "maxLength": 3},
            "required": names,
            "maxProperties": 4,
        }
        yield {
            "type": "object",
            "properties": fields,
            "required": names,
            "additionalProperties": False,
            "nullable": True,
            "x-order": names,
            "examples": [{}],
            "description": "a thing",
            "deprecated": False,
        }
        if name in ("search", "host", "step"):
            yield {**closed, "if": {"properties": {names[0]: {"const": "x"}}}, "then": {"required": names}}
            yield {**closed, "not": {"required": names[:1]}}
            yield {**closed, "dependentRequired": {names[0]: names[1:2]}}
