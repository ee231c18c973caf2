"""Grammars over a vocabulary: what they allow is JSON of the schema; what cannot be obeyed is refused, and fast."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from outrider_core.chat.grammar import (
    WALK_TOKENS,
    Grammar,
    GrammarError,
    GrammarMatcher,
    Grammars,
    GrammarsUnavailable,
    TriedPattern,
    open_grammars,
)
from outrider_core.chat.schema import STEPS, Trial, prepared
from outrider_core.chat.tool_grammar import MAX_TOOLS, TAG, ToolFunction, ToolRules, call_text
from tests.schemas import schemas
from tests.tiny import EOS, json_tokenizer, tiny_tokenizer

VOCAB = 330  # some logits more than the tokenizer has tokens
TOKENIZER = json_tokenizer(320)
GRAMMARS = open_grammars(TOKENIZER.backend_tokenizer, VOCAB, [EOS])


def of(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def next_tokens(matcher: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def walk(matcher: GrammarMatcher, rng: random.Random, most: int = 400) -> list[int]:
    """Random allowed tokens until the end, or `most`."""
    tokens: list[int] = []
    while len(tokens) < most and tokens[-1:] != [EOS]:
        tokens.append(rng.choice(next_tokens(matcher)))
        matcher.advance(tokens[-1])
        assert not matcher.error
    return tokens


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whatever_is_drawn_is_json_of_the_schema(schema: dict[str, Any], seed: int) -> None:
    tokens = walk(GRAMMARS.compile(of(schema)).matcher(), random.Random(seed))
    assert tokens[-1] == EOS and max(tokens) < len(TOKENIZER)
    jsonschema.validate(json.loads(TOKENIZER.decode(tokens, skip_special_tokens=True)), schema)


def test_any_object() -> None:
    grammar, ended = GRAMMARS.compile(), 0
    for seed in range(60):
        tokens = walk(grammar.matcher(), random.Random(seed))
        if tokens[-1] == EOS:
            ended += 1
            assert isinstance(json.loads(TOKENIZER.decode(tokens, skip_special_tokens=True)), dict)
    assert ended > 20


def test_matchers_stand_alone_and_go_back() -> None:
    grammar = GRAMMARS.compile(of({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 9}))
    rng = random.Random(3)
    one, other = grammar.matcher(), grammar.matcher()
    start = next_tokens(other)
    tokens = walk(one, rng)
    assert next_tokens(other) == start and next_tokens(one) == [EOS]
    for cut in (0, len(tokens) // 2, len(tokens)):
        one.rewind(tokens[:cut])
        assert next_tokens(one) == next_tokens(fresh(grammar, tokens[:cut]))
    one.rewind([])
    assert next_tokens(one) == start


def fresh(grammar: Grammar, tokens: list[int]) -> GrammarMatcher:
    matcher = grammar.matcher()
    for token in tokens:
        matcher.advance(token)
    return matcher


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_tree_is_walked_as_each_of_its_paths(schema: dict[str, Any], seed: int) -> None:
    """What is allowed depends on the path alone, whatever other paths were asked for before."""
    grammar, rng = GRAMMARS.compile(of(schema)), random.Random(seed)
    matcher, path = grammar.matcher(), list[int]()
    for _ in range(60):
        if path and (path[-1] == EOS or rng.random() < 0.4):
            before = path
            path = path[: -rng.randrange(1, 1 + min(6, len(path)))]
            matcher.rewind(path)
            if rng.random() < 0.3:  # and back again
                path = before
                for length in (rng.randrange(len(path)), len(path)):
                    matcher.rewind(path[:length])
        allowed = next_tokens(matcher)
        assert bool(matcher.error) == bool(fresh(grammar, path).error)
        assert allowed == next_tokens(fresh(grammar, path))
        assert matcher.forced() == fresh(grammar, path).forced()
        if path[-1:] != [EOS]:
            path.append(rng.choice(allowed))
            matcher.advance(path[-1])


def test_other_tokens_of_the_same_bytes_are_told_apart() -> None:
    """llguidance's rollback allows an end of the object here where only a number may come."""
    schema = of({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar, start = GRAMMARS.compile(schema), TOKENIZER.encode('{"n"', add_special_tokens=False)
    colon, number, line, tab = (TOKENIZER.encode(text, add_special_tokens=False) for text in (":", "20", "\r", "\t"))
    matcher = fresh(grammar, [*start, *colon, *number, *line])
    next_tokens(matcher)
    matcher.rewind(start)
    path = [*start, *line, *colon, *tab]
    for token in path[len(start) :]:
        matcher.advance(token)
    assert next_tokens(matcher) == next_tokens(fresh(grammar, path))
    assert TOKENIZER.encode("}", add_special_tokens=False)[0] not in next_tokens(matcher)


def test_a_token_that_is_not_allowed_breaks_the_text_until_it_is_taken_back() -> None:
    matcher = GRAMMARS.compile(of({"type": "integer"})).matcher()
    matcher.advance(TOKENIZER.encode("{")[0])
    assert matcher.error and "\n" not in matcher.error and next_tokens(matcher) == []
    matcher.rewind([])
    assert not matcher.error and next_tokens(matcher)


WRONG: dict[str, Any] = {
    "no JSON": '{"type": ', "no object": "[]", "deep": "[" * 30_000,
    "deep objects": '{"items":' * 3000 + "{}" + "}" * 3000,
    "no such type": {"type": "str"}, "no such format": {"format": "x"}, "look-ahead": {"pattern": "(?=a)b"},
    "unique": {"uniqueItems": True}, "contains": {"contains": {"const": 1}},
    "nothing fits": {"type": "integer", "minimum": 5, "maximum": 3},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a page elsewhere": {"$ref": "https://example.com/schema.json"},
    "its own options": {"x-guidance": {"lenient": True}},
    "not": {"not": {"type": "string"}}, "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "one of two": {"oneOf": [{"type": "string", "pattern": "^a*$"}, {"type": "string", "pattern": "^[ab]*$"}]},
    "a product": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(8)]},
    "lone surrogate": '{"const": "\\ud800"}',
    "a large constant": {"const": 2**53 + 1}, "a large bound": {"type": "integer", "exclusiveMaximum": -(2**53) - 1},
    "one of large numbers": {"properties": {"a": {"enum": ["x", [2**53 + 1]]}}},
}  # fmt: skip


@pytest.mark.parametrize("schema", WRONG.values(), ids=WRONG)
def test_what_cannot_be_obeyed_is_refused_in_a_line(schema: Any) -> None:
    with pytest.raises(GrammarError) as refused:
        GRAMMARS.compile(of(schema))
    assert "\n" not in str(refused.value) and 10 < len(str(refused.value)) < 400


@pytest.mark.parametrize("parameters", [{"not": {}}, {"properties": None}, {"enum": []}, {"$ref": "#/$defs/a"}])
def test_a_refusal_of_tools_tells_the_fault_and_not_the_grammar(parameters: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as refused:
        GRAMMARS.compile_tools(ToolRules((ToolFunction("f", parameters),), required=True).as_text())
    assert "schema" in str(refused.value) and "start:" not in str(refused.value) and " | " not in str(refused.value)


def test_whole_numbers_are_told_apart_as_far_as_they_are_taken() -> None:
    for number in (2**53, -(2**53), 2**53 - 1, 0, 7):
        for schema in (
            {"const": number},
            {"enum": [number, "x"]},
            {"type": "integer", "minimum": number, "maximum": number},
        ):
            grammar = GRAMMARS.compile(of(schema))
            for other in (number - 1, number, number + 1):
                matcher = grammar.matcher()
                for token in TOKENIZER.encode(str(other)):
                    matcher.advance(token)
                assert (not matcher.error and EOS in next_tokens(matcher)) == (other == number), (schema, other)
    with pytest.raises(GrammarError, match="9007199254740993"):
        GRAMMARS.compile_tools(ToolRules((ToolFunction("f", {"const": 2**53 + 1}),), required=True).as_text())
    GRAMMARS.compile(of({"type": "integer", "default": 2**60, "properties": {"minimum": {"type": "integer"}}}))


def ends_with(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole document of the grammar."""
    matcher = fresh(grammar, TOKENIZER.encode(text, add_special_tokens=False))
    return not matcher.error and EOS in next_tokens(matcher)


TAKEN: dict[str, Any] = {"^a$": {"type": "integer"}}
DEAD_ENDS: dict[str, Any] = {
    "the only name of a pattern is listed": {"properties": {"a": {"type": "integer"}}, "required": ["a"],
                                             "patternProperties": TAKEN},
    "a listed name that is not required": {"properties": {"a": {"minimum": 3}}, "patternProperties": TAKEN},
    "a name that is required alone": {"required": ["a"], "patternProperties": TAKEN},
    "a choice of names": {"properties": {"a": {}, "b": {}}, "patternProperties": {"^(a|b)$": {"type": "integer"}}},
    "a class of names": {"properties": {"a": {}, "b": {}, "c": {}}, "patternProperties": {"^[a-c]$": {"type": "null"}}},
    "two patterns": {"properties": {"a": {}}, "patternProperties": {"^a$": {"type": "null"}, "^b": {"type": "null"}}},
    "within": {"properties": {"x": {"type": "object", "properties": {"a": {}}, "patternProperties": TAKEN,
               "additionalProperties": False}}, "required": ["x"]},
    "composed": {"allOf": [{"properties": {"a": {"type": "integer"}}, "patternProperties": TAKEN,
                            "additionalProperties": False}]},
}  # fmt: skip


@pytest.mark.parametrize("schema", DEAD_ENDS.values(), ids=DEAD_ENDS)
@pytest.mark.parametrize("closed", [False, True])
def test_names_that_a_pattern_shares_with_listed_ones_are_no_dead_end(schema: dict[str, Any], closed: bool) -> None:
    schema = {"type": "object", **schema} | ({"additionalProperties": False} if closed else {})
    grammar, ended = GRAMMARS.compile(of(schema)), 0
    for seed in range(60):
        tokens = walk(grammar.matcher(), random.Random(seed))
        if tokens[-1] == EOS:
            ended += 1
            jsonschema.validate(json.loads(TOKENIZER.decode(tokens, skip_special_tokens=True)), schema)
    assert ended > 5


LETTERS = [
    r"^[\p{L}\p{N}_ .()-]+$",
    r"^\p{L}+$",
    r"^[\p{L} ]{1,80}$",
    r"^\p{Lu}\p{Ll}*(?: \p{Lu}\p{Ll}*)*$",
    r"^[^\p{P}]+$",
    r"\p{L}",
]


@pytest.mark.parametrize("pattern", LETTERS)
@pytest.mark.parametrize("inside", [False, True])
def test_patterns_of_letters_of_all_languages_are_written(pattern: str, inside: bool) -> None:
    string: dict[str, Any] = {"type": "string", "pattern": pattern, "maxLength": 12}
    schema = {"type": "object", "properties": {"n": string}, "required": ["n"], "additionalProperties": False}
    grammar, ended = GRAMMARS.compile(of(schema if inside else string)), 0
    for seed in range(30):
        tokens = walk(grammar.matcher(), random.Random(seed))
        ended += tokens[-1] == EOS
    assert ended > 5


ESCAPED = [
    ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}'),
    ({"patternProperties": {"^.*$": {"type": "integer"}}}, '{"\\u00e9t\\u00e9": "chaud"}'),
    ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, '{"\\u0061":"x"}'),
    ({"properties": {"é": False}}, '{"\\u00e9": 1}'),
    ({"properties": {"a/b": {"type": "integer"}}}, '{"a\\/b": "x"}'),
    ({"properties": {"\x7f": {"type": "integer"}}}, '{"\\u007f": "x"}'),
    ({"properties": {"a\n": {"type": "integer"}}}, '{"a\\u000a": "x"}'),
    ({"properties": {"😀": {"type": "integer"}}}, '{"\\ud83d\\ude00": "x"}'),
]


@pytest.mark.parametrize(("schema", "text"), ESCAPED, ids=[text for _, text in ESCAPED])
def test_no_spelling_of_a_name_passes_by_its_schema(schema: dict[str, Any], text: str) -> None:
    json.loads(text)
    grammar = GRAMMARS.compile(of({"type": "object", **schema}))
    assert not ends_with(grammar, text)
    assert ends_with(grammar, "{}")


FORMATTED = [
    ("date", ["2024-02-29", "2000-02-29", "2023-02-28", "1999-12-31"],
     ["2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "0000-01-01", "2023-13-01", "2023-00-10", "2023-1-1"]),
    ("time", ["23:59:59Z", "00:00:00.5+02:00"], ["10:15:60Z", "23:59:60Z", "24:00:00Z", "10:00:00", "10:60:00Z"]),
    ("date-time", ["2024-02-29T10:00:00Z", "2023-07-01T10:00:00.123-08:00"],
     ["2023-02-29T10:00:00Z", "2023-07-01T10:00:60Z", "2023-07-01 10:00:00Z", "2023-07-01T10:00:00"]),
    ("hostname", ["a.example", "x" * 63, ".".join(["a" * 61] * 4)],
     [".".join(["a" * 61] * 5), "x" * 64, "-a.b", "a-.b", "a..b", "a_b"]),
    ("email", ["a@b.example", "a" * 64 + "@b.c"],
     ["a" * 65 + "@b.c", "a@" + ".".join(["a" * 61] * 5), "a@" + "b" * 64, "a b@c.d", "@a"]),
    ("ipv4", ["127.0.0.1"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
    ("ipv6", ["::1", "1:2:3:4:5:6:7:8"], ["1:2", ":::", "1::2::3"]),
    ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
     ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811eab4aa73b441d16380"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "right", "wrong"), FORMATTED, ids=[form for form, _, _ in FORMATTED])
@pytest.mark.parametrize(
    "beside", [{}, {"pattern": "."}, {"maxLength": 300}, {"type": "string", "minLength": 1}], ids=str
)
def test_formats_are_what_they_name(form: str, right: list[str], wrong: list[str], beside: dict[str, Any]) -> None:
    grammar = GRAMMARS.compile(of({"format": form, **beside}))
    assert [text for text in right if not ends_with(grammar, json.dumps(text))] == []
    assert [text for text in wrong if ends_with(grammar, json.dumps(text))] == []


BOUNDS = [
    ({"exclusiveMaximum": 1}, ["0.9", "0.999", "-5"], ["1", "1.0", "0.99999999999999999999"]),
    ({"exclusiveMinimum": 0}, ["0.001", "2"], ["0", "0.0", "-0", "0." + "0" * 340 + "1"]),
    ({"exclusiveMinimum": 1, "maximum": 3}, ["1.5", "3"], ["1.00000000000000000001", "1"]),
    ({"minimum": 0.2, "exclusiveMaximum": 0.3}, ["0.2", "0.29"], ["0.3", "0.29999999999999999999"]),
    ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.25", "1.000001"], ["1", "1.0", "1.000000"]),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25", "0.4"], ["0", "-0", "0.0", "0.5"]),
    ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.25"], ["-1", "-1.0"]),
    ({"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.1}, ["0.5", "0.1"], ["0", "0.0", "0.25"]),
    ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ["-0.25", "-0.4"], ["0", "-0", "-0.0", "-0.5"]),
    ({"minimum": 1, "exclusiveMinimum": True}, ["1.5"], ["1", "1.00000000000000000001"]),
    ({"exclusiveMaximum": -1.5}, ["-1.6"], ["-1.5", "-1.50000000000000000000001"]),
    ({"exclusiveMaximum": 1e6}, ["999999", "0.25"], ["1000000", "999999.9999999"]),
]  # fmt: skip


@pytest.mark.slow
def test_bounds_hold_at_their_ends() -> None:
    values = ("-1.5", "-1", "-0.2", "0", "0.25", "0.5", "1", "1.5")
    texts = [
        value + tail for value in (*values, "0.9", "9", "11", "-0", "100") for tail in ("", ".0", ".5", "0", "5", "9")
    ]
    texts = sorted(text for text in texts if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text))
    for low, high in itertools.combinations(values, 2):
        for kinds in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            schema = {"type": "number", kinds[0]: float(low), kinds[1]: float(high)}
            grammar = GRAMMARS.compile(of(schema))
            for text in texts:
                if ends_with(grammar, text):
                    value, ends = Decimal(text), (Decimal(low), Decimal(high))
                    assert ends[0] <= value <= ends[1], (schema, text)
                    assert kinds[0] == "minimum" or value > ends[0], (schema, text)
                    assert kinds[1] == "maximum" or value < ends[1], (schema, text)


@pytest.mark.parametrize(("bounds", "right", "wrong"), BOUNDS, ids=[str(bounds) for bounds, _, _ in BOUNDS])
@pytest.mark.parametrize("kind", ["number", ["number", "null"], None])
def test_exclusive_bounds_hold_for_the_numbers_that_are_read(
    bounds: dict[str, Any], right: list[str], wrong: list[str], kind: Any
) -> None:
    grammar = GRAMMARS.compile(of(bounds | ({"type": kind} if kind else {})))
    assert [text for text in right if not ends_with(grammar, text)] == []
    assert [text for text in wrong if ends_with(grammar, text)] == []


REFERENCES = [
    "#/$defs/Größe",
    "#/$defs/Gr%C3%B6%C3%9Fe",
    "#/$defs/a~1b",
    "#/$defs/a b",
    "#/$defs/日本",
    "#/$defs/x%25y",
]


@pytest.mark.parametrize("reference", REFERENCES)
def test_references_by_any_name_are_followed(reference: str) -> None:
    names = ("Größe", "a/b", "a b", "日本", "x%y")
    schema = {"$ref": reference, "$defs": {name: {"type": "integer"} for name in names}}
    grammar = GRAMMARS.compile(
        of({"type": "object", "properties": {"$ref": schema}, "required": ["$ref"], "$defs": schema["$defs"]})
    )
    assert ends_with(grammar, '{"$ref": 3}') and not ends_with(grammar, '{"$ref": "x"}')


SERVED_NOT: dict[str, tuple[Any, str]] = {
    "no end": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, r"\$ref"),
    "no end by two": ({"$ref": "#/$defs/a", "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}}, r"\$ref"),
    "too many ways": ({"allOf": [{"anyOf": [{"properties": {f"{part}{i}": {}}} for i in range(30)]} for part in "ab"]},
                      "anyOf"),
    "counted names": ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties"),
    "a control character": ({"const": "a\x01b"}, "const"), "another": ({"enum": [{"a": ["\x7f"]}]}, "enum"),
    "one in a pattern": ({"type": "string", "pattern": "^a\\x01b$"}, "pattern"),
    "infinite": ('{"type": "number", "maximum": 1e999}', "maximum"),
    "multiples beyond 32 bits": ({"allOf": [{"multipleOf": 70001}, {"multipleOf": 70003}]}, "multipleOf"),
    "a pattern without strings": ({"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "pattern"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "named"), SERVED_NOT.values(), ids=SERVED_NOT)
def test_what_could_not_be_served_is_refused_by_its_keyword(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        GRAMMARS.compile(of(schema))


SERVED: dict[str, Any] = {
    "a tree": {"type": "object", "properties": {"left": {"$ref": "#"}, "v": {"type": "integer"}}, "required": ["v"],
               "additionalProperties": False},
    "a list of itself": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    "no end where there need be none": {"type": "array", "prefixItems": [{"type": "null"}],
                                        "items": {"$ref": "#/$defs/a"}, "maxItems": 3,
                                        "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "a property that has no end": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"type": "null"}},
                                   "additionalProperties": False, "$defs": {"a": {"type": "object", "properties": {
                                       "a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}},
    "itself or nothing": {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                          "required": ["a"], "additionalProperties": False},
    "what asks for nothing": {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 2.0,
                              "minContains": 0, "unevaluatedItems": True, "then": {"minItems": 5}},
    "many words": {"anyOf": [{"type": "string", "const": f"w{i}"} for i in range(900)]},
    "two choices of ten": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"{part}{i}": {"type": "null"}},
                                                 "required": [f"{part}{i}"], "maxProperties": 2} for i in range(10)]}
                                     for part in "ab"]},
    "many kinds": {"anyOf": [{"type": "object", "properties": {"kind": {"const": f"k{i}"}, "a": {"type": "null"}},
                              "required": ["kind"], "additionalProperties": False} for i in range(100)]},
}  # fmt: skip


@pytest.mark.parametrize("schema", SERVED.values(), ids=SERVED)
def test_what_can_be_served_is_not_refused(schema: dict[str, Any]) -> None:
    grammar, ended = GRAMMARS.compile(of(schema)), 0
    for seed in range(10):
        tokens = walk(grammar.matcher(), random.Random(seed))
        if tokens[-1] == EOS:
            ended += 1
            jsonschema.validate(json.loads(TOKENIZER.decode(tokens, skip_special_tokens=True)), schema)
    assert ended > 3


FREED = [{"properties": {"p": {"format": "path"}}}, {"properties": {"p": {"format": "binary"}}},
         {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]},
         {"not": {}}, {"properties": None}, {"$ref": "#/$defs/a"}, {"const": 2**53 + 1}]  # fmt: skip


@pytest.mark.parametrize("parameters", FREED, ids=str)
def test_a_function_that_cannot_be_obeyed_is_in_nobodys_way(parameters: dict[str, Any]) -> None:
    good = ToolFunction("good", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    both = (ToolFunction("bad", parameters), good)
    for rules in (ToolRules(both), ToolRules(both, required=True), ToolRules(both[:1])):
        grammar = GRAMMARS.compile_tools(rules.as_text())
        assert ends_with(grammar, call_text("bad", {"any": ["thing"]}))
        assert not ends_with(grammar, call_text("good", {"n": "x"}))
        assert ends_with(grammar, "no call at all") is not rules.required
    with pytest.raises(GrammarError, match="bad"):
        GRAMMARS.compile_tools(ToolRules(both[:1], required=True).as_text())


HOSTILE: dict[str, Any] = {
    "many ways": {"anyOf": [{"properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]} for i in range(300)]},
    "a counted pattern": {"type": "string", "pattern": "^([a-z]{1,50}[0-9]{1,50}){1,50}$"},
    "a pattern that explodes": {"type": "string", "pattern": "(.*a){20,30}.*b.{500}"},
    "a long string": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
    "a long list": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    "a long choice": {"enum": ["x" * length for length in range(240)]},
    "all optional": {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(600)}},
    "large numbers": {"type": "integer", "multipleOf": 7919, "minimum": 1, "maximum": 10**15},
    "many ways twice": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"{part}{i}": {"type": "string"}}}
                                             for i in range(14)]} for part in "ab"]},
    "doubling": json.dumps({"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
                            | {"d40": {"type": "null"}}, "$ref": "#/$defs/d0"}),
}  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_hostile_schemas_end_in_time(schema: Any) -> None:
    """Fuel bounds the work; the seconds here only catch what fuel does not bound."""
    begun = time.process_time()
    try:
        matcher = GRAMMARS.compile(of(schema)).matcher()
    except GrammarError:
        return
    finally:
        assert time.process_time() - begun < 2.0
    begun, rng, steps = time.process_time(), random.Random(1), 0
    for _ in range(100):
        steps += 1
        allowed = next_tokens(matcher)
        if matcher.error or allowed == [EOS]:
            break
        matcher.advance(rng.choice(allowed))
    assert time.process_time() - begun < 0.05 * steps + 0.5


def endless_patterns(count: int, first: int = 0) -> dict[str, Any]:
    """Each is walked to where walks are cut off."""
    patterns = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,60}}x{i}.*$"} for i in range(first, first + count)}
    return {"type": "object", "properties": patterns}


def escaped_spellings(name: str, count: int) -> list[dict[str, str]]:
    """References to one definition."""
    spelled = itertools.product(*((letter, f"%{ord(letter):02x}") for letter in name))
    return [{"$ref": "#/$defs/" + "".join(each)} for each in itertools.islice(spelled, count)]


def long_chain(links: int, parts: int) -> dict[str, Any]:
    """Of definitions, each looked at again in half as many rounds as there are links."""
    names = [f"d{at:03}" for at in range(links)]
    order = [name for pair in zip(names[::-1], names, strict=True) for name in pair][:links]
    chain: dict[str, Any] = {order[0]: {"type": "integer"}}
    for name, before in itertools.pairwise(order[::-1]):
        fields = {str(at): {} for at in range(parts)} | {"r": {"$ref": f"#/$defs/{before}"}}
        chain[name] = {"type": "object", "required": list(fields), "properties": fields}
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": dict(sorted(chain.items()))}


COSTLY: dict[str, dict[str, Any]] = {
    "patterns": endless_patterns(50),
    "patterns of names": {"patternProperties": {f"^[a-z]{{1,60}}x{i}.*$": {} for i in range(50)}},
    "names and patterns": {"properties": {f"n{i}": {} for i in range(300)},
                           "patternProperties": {f"^n{i}$": {"maxLength": i} for i in range(20)}},
    "a chain": long_chain(120, 150),
    "multiples": {"anyOf": [{"multipleOf": i + 1} for i in range(1200)]},
}  # fmt: skip


#: what a schema is of: the answer, the arguments of a function, the text beside functions
ROADS: dict[str, Callable[[dict[str, Any]], object]] = {
    "answer": lambda schema: GRAMMARS.compile(of(schema)),
    "function": lambda schema: GRAMMARS.compile_tools(ToolRules((ToolFunction("f", schema),)).as_text()),
    "text": lambda schema: GRAMMARS.compile_tools(ToolRules((ToolFunction("f", {}),), text=schema).as_text()),
}
TRIED = [
    pytest.param(road, kind, marks=() if road == "answer" or kind == "patterns" else pytest.mark.slow)
    for road in ROADS
    for kind in COSTLY
]


@pytest.mark.parametrize(("road", "kind"), TRIED)
def test_schemas_too_costly_to_try_are_refused_after_so_many_steps(
    road: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, real = list[None](), GrammarMatcher.allowed
    monkeypatch.setattr(GrammarMatcher, "allowed", lambda matcher: (masks.append(None), real(matcher))[1])
    with pytest.raises(GrammarError, match=r"too costly to test.*; simplify"):
        ROADS[road](COSTLY[kind])
    assert len(masks) <= STEPS + 1


def test_functions_share_what_trying_them_may_take() -> None:
    """None of them becomes any object by the others' cost."""
    functions = [ToolFunction(f"f{at}", endless_patterns(8, 8 * at)) for at in range(6)]
    for each in functions:
        GRAMMARS.compile_tools(ToolRules((each,)).as_text())
    with pytest.raises(GrammarError, match=r"function f\d cannot be obeyed: .* too costly"):
        GRAMMARS.compile_tools(ToolRules(tuple(functions)).as_text())


def test_a_pattern_is_tried_once_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, real = list[str](), TriedPattern.__init__

    def counted(self: TriedPattern, grammars: Grammars, pattern: str, trial: Trial) -> None:
        tried.append(pattern)
        real(self, grammars, pattern, trial)

    monkeypatch.setattr(TriedPattern, "__init__", counted)
    schema = {"properties": {name: {"pattern": "^[ab]$"} for name in "xy"}, "patternProperties": {"^[cd]$": {}}}
    text = json.dumps(schema)
    GRAMMARS.compile(text)
    assert sorted(tried) == ["^[ab]$", "^[cd]$"]
    tried.clear()
    GRAMMARS.compile_tools(ToolRules((ToolFunction("f", schema), ToolFunction("g", schema)), text=schema).as_text())
    assert sorted(tried) == ["^[ab]$", "^[cd]$"]


def test_spellings_of_one_reference_are_one() -> None:
    def steps(spellings: int) -> int:
        large = {"type": "object", "required": [str(at) for at in range(400)]}
        trial = Trial()
        prepared({"anyOf": escaped_spellings("abcdefgh", spellings), "$defs": {"abcdefgh": large}}, _no_pattern, trial)
        return trial.steps

    assert steps(200) <= steps(1) + 200


def _no_pattern(pattern: str, trial: Trial) -> TriedPattern:
    raise AssertionError(pattern)


def test_as_many_everyday_functions_as_there_may_be_are_tried() -> None:
    fields = {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"}, "day": {"type": "string", "format": "date"}}
    schema = {"type": "object", "properties": fields, "required": ["name"], "additionalProperties": False}
    functions = tuple(ToolFunction(f"f{at}", schema) for at in range(MAX_TOOLS))
    grammar = GRAMMARS.compile_tools(ToolRules(functions).as_text())
    assert ends_with(grammar, call_text("f99", {"name": "Ada"}))
    assert not ends_with(grammar, call_text("f99", {"name": "ada"}))


@pytest.mark.parametrize("walks", [1, 3, 20])
def test_trying_ends_with_the_walk_in_which_nobody_waits_any_more(walks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    masks, real = list[None](), GrammarMatcher.allowed
    monkeypatch.setattr(GrammarMatcher, "allowed", lambda matcher: (masks.append(None), real(matcher))[1])
    asked = iter([False] * walks)
    with pytest.raises(CancelledError):
        GRAMMARS.compile(of(endless_patterns(10)), lambda: next(asked, True))
    assert len(masks) <= walks * WALK_TOKENS


@pytest.mark.parametrize("most", [300, 2000, 20_000])
def test_long_strings_with_a_bound_stay_within_the_limits(most: int) -> None:
    """Counting makes the lexer many states, which are limited for the sake of hostile patterns."""
    matcher = GRAMMARS.compile(of({"type": "string", "maxLength": most})).matcher()
    text = '"' + "the cat sat on the mat, and " * 500
    length = 0
    for token in TOKENIZER.encode(text[: min(most, 6000) + 1]):
        assert token in next_tokens(matcher), matcher.error
        matcher.advance(token)
        length += 1
    assert length > min(most, 6000) / 4 and not matcher.error


def mutations() -> Iterator[str]:
    rng, base = random.Random(5), json.dumps(list(WRONG.values())[4:] + list(HOSTILE.values())[1:5])
    for _ in range(300):
        text, cut = json.dumps({"properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/x"}}, "$defs": {}}), 0
        for _ in range(rng.randint(1, 4)):
            at, cut = rng.randrange(len(text)), rng.randrange(len(base))
            text = (
                text[:at]
                + rng.choice([base[cut : cut + rng.randrange(9)], "", rng.choice('{}[]",:0')])
                + text[at + 1 :]
            )
        yield text or "{"


def test_mutated_schemas_compile_or_raise_grammar_errors() -> None:
    refused = 0
    for text in mutations():
        try:
            GRAMMARS.compile(of(text))
        except GrammarError:
            refused += 1
    assert refused > 200


def test_where_grammars_are_not_to_be_had() -> None:
    with pytest.raises(GrammarsUnavailable, match="does not take this tokenizer"):
        open_grammars(tiny_tokenizer().backend_tokenizer, 199, [EOS])
    with pytest.raises(GrammarsUnavailable, match="ends an answer"):
        open_grammars(TOKENIZER.backend_tokenizer, VOCAB, [])


def test_several_tokens_that_end_an_answer() -> None:
    grammars: Grammars = open_grammars(TOKENIZER.backend_tokenizer, VOCAB, [0, EOS])
    matcher = grammars.compile(of({"const": 1})).matcher()
    matcher.advance(TOKENIZER.encode("1")[0])
    assert next_tokens(matcher) == [0, EOS]
    matcher.advance(0)
    assert next_tokens(matcher) == [0, EOS] and not matcher.error


def test_a_tag_that_is_one_token_begins_a_call() -> None:
    """As of Qwen's tokenizers, where it is an added token but not special."""
    tokenizer = json_tokenizer().backend_tokenizer
    tokenizer.add_tokens([AddedToken(TAG, normalized=False, special=False)])
    grammars, tag = open_grammars(tokenizer, 321, [EOS]), tokenizer.token_to_id(TAG)
    function = ToolFunction("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for required in (True, False):
        matcher = grammars.compile_tools(ToolRules((function,), required=required).as_text()).matcher()
        matcher.allowed()
        matcher.advance(tag)
        assert not matcher.error and next_tokens(matcher) == tokenizer.encode("\n", add_special_tokens=False).ids
