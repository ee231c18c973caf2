"""Schemas of a public suite, and of the kinds that apps send: accepted ones are served, and outcomes are counted.

The suite is the JSON Schema Test Suite's draft 2020-12 (MIT, `tests/json_schema_suite/LICENSE`) as jsonschema 4.26.0
ships it, with the optional tests of ten formats, in one file.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex

from outrider_core.chat.grammar import Grammar, GrammarError
from tests.schemas import WideSchemas, everyday
from tests.test_grammar import GRAMMARS, TOKENIZER, ends_with, walk
from tests.tiny import EOS

SUITE = Path(__file__).parent / "json_schema_suite" / "draft2020-12.json"
WALKS = 12

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def classes_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own expressions know no \\p{L}."""
    monkeypatch.setattr("jsonschema._keywords.re", regex)
    monkeypatch.setattr("jsonschema._utils.re", regex)


def finished(grammar: Grammar, schema: dict[str, Any], walks: int = WALKS) -> Counter[str]:
    """Random answers: "valid", "long" where they do not end; anything else fails."""
    outcomes = Counter[str]()
    for seed in range(walks):
        tokens = walk(grammar.matcher(), random.Random(seed))  # asserts that each token may be followed
        if tokens[-1] != EOS:
            outcomes["long"] += 1
            continue
        text = TOKENIZER.decode(tokens, skip_special_tokens=True)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        outcomes["valid"] += 1
    return outcomes


def test_the_json_schema_test_suite(capsys: pytest.CaptureFixture[str]) -> None:
    """No invalid document passes; what is valid and does not, is narrower by what docs/api.md names."""
    outcomes = Counter[str]()
    for group in json.loads(SUITE.read_text("utf-8")):
        schema = group["schema"]
        try:
            grammar = GRAMMARS.compile(json.dumps(schema))
        except GrammarError as error:
            assert not re.search("NoExtension|too many expressions", str(error)), (schema, str(error))
            outcomes["schemas refused"] += 1
            continue
        outcomes["schemas accepted"] += 1
        for test in group["tests"]:
            passes = ends_with(grammar, json.dumps(test["data"], ensure_ascii=False))
            assert test["valid"] or not passes, (schema, test)
            outcomes["documents as they should" if passes == test["valid"] else "documents narrower"] += 1
        if "multipleOf" not in json.dumps(schema):  # which jsonschema reckons in float64
            outcomes += finished(grammar, schema)
    with capsys.disabled():
        print("\nJSON Schema Test Suite:", dict(outcomes))
    assert outcomes["schemas accepted"] > 150 and outcomes["documents narrower"] < 80


def test_everyday_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the kinds that apps send: most are accepted, and every answer that ends is valid."""
    outcomes, reasons = Counter[str](), Counter[str]()
    for schema in everyday():
        try:
            grammar = GRAMMARS.compile(json.dumps(schema))
        except GrammarError as error:
            outcomes["refused"] += 1
            reasons[str(error)[:70]] += 1
            continue
        outcomes["accepted"] += 1
        outcomes += finished(grammar, schema, 6)
    with capsys.disabled():
        print("\neveryday schemas:", dict(outcomes), dict(reasons))
    assert outcomes["accepted"] + outcomes["refused"] >= 300 and outcomes["accepted"] > 250


@pytest.mark.parametrize("part", range(4))
def test_random_schemas(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that is accepted comes to a dead end, whatever is drawn."""
    outcomes = Counter[str]()
    for seed in range(500 * part, 500 * (part + 1)):
        schema = WideSchemas(random.Random(seed)).schema()
        try:
            grammar = GRAMMARS.compile(json.dumps(schema))
        except GrammarError:
            outcomes["refused"] += 1
            continue
        outcomes["accepted"] += 1
        try:
            outcomes += finished(grammar, schema, 8)
        except (jsonschema.exceptions._WrappedReferencingError, RecursionError):  # jsonschema's own limits
            outcomes["not checked"] += 1
    with capsys.disabled():
        print("\nrandom schemas:", dict(outcomes))
    assert outcomes["accepted"] > 150
