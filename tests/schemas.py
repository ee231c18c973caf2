"""Random JSON schemas whose texts are short, so that a random model comes to their end."""

from __future__ import annotations

import random
from typing import Any

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
