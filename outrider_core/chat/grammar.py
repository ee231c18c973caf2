"""Grammars of constraints over a model's vocabulary: which tokens may come next. llguidance does the work.

It is optional: where it is not installed, or cannot take the tokenizer apart, `open_grammars` says so and the verifier
does not offer grammars. A schema is a stranger's: size, time and memory of compiling it and of every mask are bounded
by fuel, not by a clock, so that every replica refuses the same ones.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider_core.chat.tool_grammar import lark_of, read_tools

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: between two tokens of JSON at most so much whitespace, so that no answer is made of it
WHITESPACE = r"[ \n\t\r]{1,32}"
#: a few milliseconds of work per mask and some tens for compiling; counted strings make many states, of about 150 bytes
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 100_000,
}
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "coerce_one_of": False, "lenient": False}
#: copies of a matcher that it keeps to go back to: 2 KB each at the beginning of an answer, 180 KB after 3,800 tokens
COPIES = 16
#: compiled grammars kept, of a user
KEPT = 8
#: numbers are compared as float64, which tells no whole numbers beyond this apart
EXACT = 2**53
NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ANY_OBJECT = '{"type": "object"}'
_REMARK = re.compile(r"<non-verbose/>|^\s*(\d+ \||\^)")
INSTALL = "this needs the package llguidance: pip install 'outrider[cloud]'"


class GrammarError(ValueError):
    """This grammar cannot be obeyed; the message says why."""


class GrammarsUnavailable(RuntimeError):
    """No grammar can be obeyed here; the message says what to do."""


class Grammars:
    """Compiles grammars for one vocabulary. See `open_grammars`."""

    def __init__(self, vocabulary: LLTokenizer, vocab_size: int) -> None:
        self._vocabulary, self._words = vocabulary, -(-vocab_size // 32)

    def compile(self, schema: str = ANY_OBJECT) -> Grammar:
        """For JSON of a JSON schema. Raises GrammarError where that means nothing, is unsupported or is too large."""
        from llguidance import LLMatcher

        try:
            read = json.loads(schema)
            if not isinstance(read, dict):
                raise GrammarError("the schema must be a JSON object")
            if "x-guidance" in read:
                raise GrammarError("x-guidance is not taken here")
            _check_numbers(read)
            text = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema cannot be read: {_line(str(error))}") from None
        return self._made(text, "the schema cannot be obeyed")

    def compile_tools(self, tools: str) -> Grammar:
        """For text or calls of functions, of `ToolRules.as_text`. Raises GrammarError as `compile` does."""
        try:
            rules = read_tools(tools)
            _check_numbers([rules.text, *(each.parameters for each in rules.functions)])
            text = lark_of(rules, JSON_OPTIONS)
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the tools cannot be read: {_line(str(error))}") from None
        return self._made(text, "the tools' schemas cannot be obeyed")

    def _made(self, text: str, fault: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        grammar = Grammar(LLMatcher(self._vocabulary, text, log_level=0, limits=limits), self._words)
        probe = grammar.matcher()
        if not probe.error:
            probe.allowed()  # what no text satisfies shows here
        if probe.error:
            raise GrammarError(f"{fault}: {probe.error}")
        return grammar


class CompiledGrammars:
    """The grammars that one user has asked for, at most KEPT of them, the least recently used one forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, bool], Grammar] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, grammars: Grammars, text: str, tools: bool = False) -> Grammar:
        """For the schema `text`, "" for any object, or with `tools` for those tools. Raises GrammarError."""
        key = text, tools
        grammar = self._kept.get(key)
        if grammar is None:
            grammar = grammars.compile_tools(text) if tools else grammars.compile(text or ANY_OBJECT)
            self._kept[key] = grammar
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return grammar


class Grammar:
    """A compiled grammar. It is not changed by use, and every matcher of it stands alone."""

    def __init__(self, start: LLMatcher, words: int) -> None:
        self._start, self._words = start, words

    def matcher(self) -> GrammarMatcher:
        """At the beginning of an answer."""
        return GrammarMatcher(self._start, self._words)


class GrammarMatcher:
    """`outrider_core.protocol.constraint.Matcher`. words: of a mask. One thread at a time.

    It goes back by copies. llguidance's own rollback leaves traces: asked for a mask behind other tokens that spell the
    same bytes, it gave that of the text before (1.9.1; tests/test_grammar.py).
    """

    def __init__(self, start: LLMatcher, words: int) -> None:
        self._words = words
        self._now = start.deep_copy()
        self._copies = [(0, start)]  # where it was, by tokens since the beginning: all on the way to where it is

    @property
    def error(self) -> str:
        """See Matcher."""
        if not self._now.is_error():
            return ""
        return _line(self._now.get_error()) or "the answer has left its grammar"

    def allowed(self) -> NDArray[np.uint32]:
        """See Matcher. Where the JSON is complete, the tokens that end an answer."""
        bits = np.zeros(self._words, np.uint32)
        if not self._now.is_error():
            self._now.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._now.is_error():
            bits[:] = 0
        return bits

    def forced(self) -> list[int]:
        """See Matcher."""
        if self._now.is_error() or self._now.is_stopped():
            return []
        run: list[int] = self._now.compute_ff_tokens()
        return run

    def advance(self, token: int) -> None:
        """See Matcher."""
        self._now.consume_token(token)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See Matcher."""
        while self._copies[-1][0] > len(tokens):
            self._copies.pop()
        length, there = self._copies[-1]
        self._now = there.deep_copy()
        if length < len(tokens):
            for token in tokens[length:]:  # an end of text, too, which consume_tokens refuses
                self._now.consume_token(token)
            self._copies.append((len(tokens), self._now.deep_copy()))
            if len(self._copies) > COPIES:  # one whose neighbours are near
                places = [length for length, _ in self._copies]
                del self._copies[min(range(1, COPIES), key=lambda at: places[at + 1] - places[at - 1])]


def check_grammars(eos_ids: Sequence[int]) -> None:
    """Raise GrammarsUnavailable where `open_grammars` needs what is not there, without loading anything."""
    if importlib.util.find_spec("llguidance") is None:
        raise GrammarsUnavailable(INSTALL)
    if not eos_ids:
        raise GrammarsUnavailable("the model has no token that ends an answer")


def open_grammars(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Grammars:
    """For a model with this tokenizer, so many logits and these ids that end an answer.

    It takes about 0.2 s, and 40 MB for a vocabulary of 50,000. Raises GrammarsUnavailable.
    """
    check_grammars(eos_ids)
    from llguidance import LLTokenizer

    try:
        plain = Tokenizer.from_str(tokenizer.to_str())
        plain.no_truncation()
        plain.no_padding()
        vocabulary = LLTokenizer(plain.to_str(), vocab_size, list(eos_ids), LLTokenizer.json_slices())
    except Exception as error:  # whatever a tokenizer of a kind that it does not know makes of it
        raise GrammarsUnavailable(f"llguidance does not take this tokenizer: {_line(str(error))}") from None
    return Grammars(vocabulary, vocab_size)


def _check_numbers(schema: Any) -> None:
    """Raise GrammarError where a schema compares with a whole number that cannot be told from its neighbours."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(name or (key if key in NUMBERS else ""), one) for key, one in value.items()]
        elif isinstance(value, list):
            left += [(name, one) for one in value]
        elif name and isinstance(value, int) and abs(value) > EXACT:
            raise GrammarError(f"{name} has {value}: whole numbers beyond 2**53 are not told apart here")


def _line(text: str) -> str:
    """The lines of a message as one, without the parser's own remarks and the grammar around the fault."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _REMARK.search(line)]
    return " ".join(lines)[:300]
