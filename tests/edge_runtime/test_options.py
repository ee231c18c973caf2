"""Keywords are typed, and are those of the dataclass and the method that they stand for."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_type_hints

from edge_runtime.blocking import BlockingRuntime
from edge_runtime.options import AnswerKeywords, RuntimeKeywords, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime


def test_the_constructor_takes_few_arguments() -> None:
    assert len(inspect.signature(EdgeRuntime).parameters) <= 6


def test_runtime_keywords_are_the_fields_of_the_options() -> None:
    hints = get_type_hints(RuntimeOptions)
    assert get_type_hints(RuntimeKeywords) == {field.name: hints[field.name] for field in fields(RuntimeOptions)}


def test_answer_keywords_are_those_of_generate() -> None:
    parameters = inspect.signature(EdgeRuntime.generate, eval_str=True).parameters.values()
    keywords = {each.name: each.annotation for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert get_type_hints(AnswerKeywords) == keywords


def test_both_runtimes_have_the_same_methods() -> None:
    own = {"answer"}  # for those who need no events
    blocking = {name for name, _ in inspect.getmembers(BlockingRuntime, inspect.isfunction) if name[0] != "_"}
    edge = {name for name, _ in inspect.getmembers(EdgeRuntime, inspect.isfunction) if name[0] != "_"}
    assert blocking - own <= edge
