"""Grammars over a vocabulary: what they allow is JSON of the schema; what cannot be obeyed is refused, and fast."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.chat.grammar import (
    Grammar,
    GrammarError,
    GrammarMatcher,
    Grammars,
    GrammarsUnavailable,
    open_grammars,
)
from outrider_core.chat.tool_grammar import ToolFunction, ToolRules
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
        GRAMMARS.compile_tools(ToolRules((ToolFunction("f", parameters),)).as_text())
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
        GRAMMARS.compile_tools(ToolRules((ToolFunction("f", {"const": 2**53 + 1}),)).as_text())
    GRAMMARS.compile(of({"type": "integer", "default": 2**60, "properties": {"minimum": {"type": "integer"}}}))


HOSTILE: dict[str, Any] = {
    "many ways": {"anyOf": [{"properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]} for i in range(300)]},
    "a counted pattern": {"type": "string", "pattern": "^([a-z]{1,50}[0-9]{1,50}){1,50}$"},
    "a pattern that explodes": {"type": "string", "pattern": "(.*a){20,30}.*b.{500}"},
    "a long string": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
    "a long list": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    "a long choice": {"enum": ["x" * length for length in range(240)]},
    "all optional": {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(600)}},
    "large numbers": {"type": "integer", "multipleOf": 7919, "minimum": 1, "maximum": 10**15},
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
