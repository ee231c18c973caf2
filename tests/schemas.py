"""Random JSON schemas whose texts are short, so that a random model comes to their end."""

from __future__ import annotations

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
