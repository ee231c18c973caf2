"""Compile a constraint's grammar to masks of allowed tokens, by llguidance.

It is optional: if it is not installed, or does not support the tokenizer, `open_grammars` raises and the verifier does
not offer grammars. Schemas may come from strangers: size, time and memory of compiling and of every mask are bounded by
fuel, not by a clock, so that every replica refuses the same ones.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider_core.chat.schema import Pattern, SchemaFault, TooCostly, Trial, prepared
from outrider_core.chat.tool_grammar import ToolFunction, lark_of, read_tools

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: most whitespace between two tokens of JSON, so that no answer consists of it
WHITESPACE = r"[ \n\t\r]{1,32}"
#: a few milliseconds per mask and some tens for compiling; counted strings make many states of about 150 bytes
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,  # letters of all languages take 50,000 at the begin of a string
    "step_max_items": 200_000,
    "max_items_in_row": 5_000,  # `schema.MAX_WIDTH` plus what it does not count
    "max_lexer_states": 100_000,
    "max_grammar_size": 100_000,
}
#: without \\u: a property's name in that spelling would be another property to the library
JSON_OPTIONS = {
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": '"\\\\bfnrt',
}
#: copies of a matcher kept for going back: 2 KB each at the beginning of an answer, 180 KB after 3,800 tokens
COPIES = 16
#: compiled grammars kept for each user
KEPT = 8
#: most bytes of a compiled grammar: fixed, and for each character of its schema
GRAMMAR_BYTES, CHARACTER_BYTES = 1 << 20, 100
ANY_OBJECT = '{"type": "object"}'
#: random texts per compiled schema, tokens of each, and share of steps that close something if possible
WALKS, WALK_TOKENS, CLOSING = 8, 64, 0.4
#: a mask costs one step, plus one per STEP_TOKENS tokens checked one by one and one per STEP_ITEMS parser items
STEP_TOKENS, STEP_ITEMS = 2048, 64
#: steps of compiling a pattern or a schema; of matching a text, plus one per STEP_FOLLOWED tokens
COMPILING, MATCHING, STEP_FOLLOWED = 32, 4, 4
_CHARACTERS, _CLOSERS = "".join(map(chr, range(33, 127))), '"}],:'
_NONE = np.empty(0, np.int64)
_REMARK = re.compile(r"<non-verbose/>|^\s*(\d+ \||\^)")
INSTALL = "this needs the package llguidance: pip install 'outrider[cloud]'"


class GrammarError(ValueError):
    """This grammar cannot be obeyed; the message says why."""


class GrammarTooCostly(GrammarError):
    """The schemas of a request together take too many steps to test."""


class GrammarsUnavailable(RuntimeError):
    """Grammars are unavailable here; the message says what to do."""


class Grammars:
    """Compiles grammars for one vocabulary. See `open_grammars`."""

    def __init__(self, vocabulary: LLTokenizer, vocab_size: int) -> None:
        self._vocabulary, self._words = vocabulary, -(-vocab_size // 32)
        self._ends = np.array(vocabulary.eos_tokens, np.int64)
        self._characters, self._closers = self._single(_CHARACTERS), self._single(_CLOSERS)
        self._text = self._within_text()

    def compile(self, schema: str = ANY_OBJECT, cancelled: Callable[[], bool] = lambda: False) -> Grammar:
        """Compile a grammar of JSON that obeys a JSON schema.

        Raises GrammarError if it is invalid, unsupported, too large or too costly to test, and CancelledError soon
        after it is `cancelled`.
        """
        try:
            read = json.loads(schema)
            if not isinstance(read, dict):
                raise GrammarError("the schema must be a JSON object")
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema cannot be read: {_line(str(error))}") from None
        return self._of_schema(read, "the schema cannot be obeyed", WALKS, Trial(cancelled))[0]

    def compile_tools(self, tools: str, cancelled: Callable[[], bool] = lambda: False) -> Grammar:
        """Compile a grammar of text or calls of functions, from `ToolRules.as_text`. Raises as `compile` does.

        A function whose schema cannot be obeyed gets any object, unless the answer has to call one such. All of them
        together may be too costly to test.
        """
        trial, width = Trial(cancelled), 0
        try:
            rules = read_tools(tools)
            if rules.text is not None:
                text, width = self._shaped(rules.text, trial)
                rules = replace(rules, text=text)
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the tools cannot be read: {_line(str(error))}") from None
        functions, faults = list[ToolFunction](), list[str]()
        for each in rules.functions:
            fault = f"the schema of the function {each.name} cannot be obeyed"
            try:
                walks = max(1, WALKS // len(rules.functions))
                _, shaped, items = self._of_schema(each.parameters, fault, walks, trial)
                functions.append(ToolFunction(each.name, shaped))
                width = max(width, items)
            except GrammarTooCostly:
                raise
            except GrammarError as error:
                faults.append(str(error))
                functions.append(ToolFunction(each.name, json.loads(ANY_OBJECT)))
        if rules.required and len(faults) == len(functions):
            raise GrammarError(faults[0])
        lark = lark_of(replace(rules, functions=tuple(functions)), JSON_OPTIONS)
        return self._tried(self._made(lark), "the tools' schemas cannot be obeyed", 1, trial, width)

    def _of_schema(
        self, schema: dict[str, Any], fault: str, walks: int, trial: Trial
    ) -> tuple[Grammar, dict[str, Any], int]:
        """Return a tested grammar with its shape and width. Raises GrammarError, which begins with `fault`."""
        from llguidance import LLMatcher

        try:
            shaped, width = self._shaped(schema, trial)
            trial.step(COMPILING)
            text = LLMatcher.grammar_from_json_schema(json.dumps(shaped), overrides=JSON_OPTIONS)
        except TooCostly as error:
            raise GrammarTooCostly(f"{fault}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{fault}: {_line(str(error))}") from None
        return self._tried(self._made(text), fault, walks, trial, width), shaped, width

    def _shaped(self, schema: dict[str, Any], trial: Trial) -> tuple[dict[str, Any], int]:
        """See `schema.prepared`; it raises the same."""
        if "x-guidance" in schema:
            raise SchemaFault("x-guidance is not taken here")
        return prepared(schema, self._pattern, trial)

    def _pattern(self, pattern: str, trial: Trial) -> Pattern:
        return TriedPattern(self, pattern, trial)

    def _made(self, text: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        return Grammar(LLMatcher(self._vocabulary, text, log_level=0, limits=limits), self._words)

    def _tried(self, grammar: Grammar, fault: str, walks: int, trial: Trial, width: int) -> Grammar:
        """Return the grammar if none of `walks` random texts gets stuck where no token may follow."""
        for seed in range(walks):
            try:
                text, _, why = self.walk(grammar.matcher(), seed, trial, width)
            except TooCostly as error:
                raise GrammarTooCostly(f"{fault}: {error}") from None
            if why:
                place = f" behind {text[-60:]!r}" if text else ""
                raise GrammarError(f"{fault}: {why}{place}")
        return grammar

    def walk(self, matcher: GrammarMatcher, seed: int, trial: Trial, width: int = 0) -> tuple[str, bool, str]:
        """Write random text that `matcher` allows, the same for a seed: (text, whether it has ended, why it got stuck).

        width: parser items at the widest place of its schema. Raises TooCostly and CancelledError.
        """
        trial.go_on()
        rng, tokens, ended = random.Random(seed), list[int](), False
        while not ended and len(tokens) < WALK_TOKENS:
            words = matcher.allowed()
            trial.step(self.steps(words) + width // STEP_ITEMS)
            if matcher.error or not words.any():
                return self._vocabulary.decode_str(tokens), False, matcher.error or "no token may follow"
            ended = len(_of(words, self._ends)) > 0
            if not ended:
                tokens.append(self._choice(words, rng))
                matcher.advance(tokens[-1])
        return self._vocabulary.decode_str(tokens), ended, matcher.error

    def _choice(self, words: NDArray[np.uint32], rng: random.Random) -> int:
        """Choose an allowed token, of one character if possible, preferably one that closes something."""
        closers = _of(words, self._closers) if rng.random() < CLOSING else _NONE
        chosen = closers if len(closers) else _of(words, self._characters)
        if not len(chosen):
            chosen = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return int(chosen[rng.randrange(len(chosen))])

    def steps(self, words: NDArray[np.uint32]) -> int:
        """Return the steps of a mask. llguidance allows tokens of any text at once, and checks others one by one."""
        if np.bitwise_count(self._text & ~words).sum() * 16 <= np.bitwise_count(self._text).sum():
            return 1
        return 1 + int(np.bitwise_count(words).sum()) // STEP_TOKENS

    def _within_text(self) -> NDArray[np.uint32]:
        """The mask within a string of any text."""
        from llguidance import LLMatcher

        schema = json.dumps({"type": "string"})
        matcher = self._made(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)).matcher()
        for token in self.tokens('"a'):
            matcher.advance(token)
        return matcher.allowed()

    def tokens(self, text: str) -> list[int]:
        """Return tokens that spell `text`."""
        ids: list[int] = self._vocabulary.greedy_tokenize(text)
        return ids

    def ends(self, matcher: GrammarMatcher, trial: Trial) -> bool:
        """Return whether the text may end here. Raises TooCostly."""
        words = matcher.allowed()
        trial.step(self.steps(words))
        return not matcher.error and len(_of(words, self._ends)) > 0

    def _single(self, characters: str) -> NDArray[np.int64]:
        """Return those of `characters` that are a single token."""
        spelled = map(self.tokens, characters)
        return np.array([ids[0] for ids in spelled if len(ids) == 1], np.int64)


class TriedPattern:
    """`schema.Pattern`, computed with the grammar of the pattern's strings."""

    def __init__(self, grammars: Grammars, pattern: str, trial: Trial) -> None:
        from llguidance import LLMatcher

        self._grammars, self._pattern, self._trial = grammars, pattern, trial
        trial.step(COMPILING)
        schema = json.dumps({"type": "string", "pattern": pattern})
        self._grammar = grammars._made(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))
        self._strings: list[str] | None = None

    def strings(self) -> list[str]:
        """See Pattern."""
        if self._strings is None:
            found = [self._grammars.walk(self._grammar.matcher(), seed, self._trial) for seed in range(WALKS)]
            if why := next((why for _, _, why in found if why), ""):
                raise SchemaFault(f"no string of the pattern {self._pattern!r} can be written: {why}")
            self._strings = [json.loads(text) for text, ended, _ in found if ended]
        return self._strings

    def matches(self, text: str) -> bool:
        """See Pattern."""
        self._trial.go_on()
        matcher, tokens = self._grammar.matcher(), self._grammars.tokens(json.dumps(text, ensure_ascii=False))
        self._trial.step(MATCHING + len(tokens) // STEP_FOLLOWED)
        for token in tokens:
            matcher.advance(token)
        return self._grammars.ends(matcher, self._trial)


class CompiledGrammars:
    """The compiled grammars of one user, at most KEPT; the least recently used one is forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, bool], Grammar] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Upper estimate of their memory, as measured: 0.1 to 0.8 MB each, and 100 bytes per character."""
        return sum(GRAMMAR_BYTES + CHARACTER_BYTES * len(text) for text, _ in list(self._kept))

    def get(
        self, grammars: Grammars, text: str, tools: bool = False, cancelled: Callable[[], bool] = lambda: False
    ) -> Grammar:
        """Return the grammar of the schema `text`, "": any object, or of `tools`. Raises as `compile` does."""
        key = text, tools
        grammar = self._kept.get(key)
        if grammar is None:
            compiled = grammars.compile_tools if tools else grammars.compile
            grammar = compiled(text or ANY_OBJECT, cancelled)
            self._kept[key] = grammar
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return grammar


class Grammar:
    """A compiled grammar. Use does not change it, and its matchers are independent."""

    def __init__(self, start: LLMatcher, words: int) -> None:
        self._start, self._words = start, words

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer."""
        return GrammarMatcher(self._start, self._words)


class GrammarMatcher:
    """Implements `outrider_core.protocol.constraint.Matcher`. words: of a mask. One thread at a time.

    It goes back by copies. llguidance's own rollback leaves traces: after other tokens that spell the same bytes, it
    returned the mask of the text before (1.9.1; tests/test_grammar.py).
    """

    def __init__(self, start: LLMatcher, words: int) -> None:
        self._words = words
        self._now = start.deep_copy()
        self._copies = [(0, start)]  # earlier states, by tokens since the beginning, all on the way here

    @property
    def error(self) -> str:
        """See Matcher."""
        if not self._now.is_error():
            return ""
        return _line(self._now.get_error()) or "the answer has left its grammar"

    def allowed(self) -> NDArray[np.uint32]:
        """See Matcher. When the JSON is complete, the tokens that end an answer."""
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
            if len(self._copies) > COPIES:  # drop one with close neighbours
                places = [length for length, _ in self._copies]
                del self._copies[min(range(1, COPIES), key=lambda at: places[at + 1] - places[at - 1])]


def check_grammars(eos_ids: Sequence[int]) -> None:
    """Raise GrammarsUnavailable if `open_grammars` would lack something, without loading anything."""
    if importlib.util.find_spec("llguidance") is None:
        raise GrammarsUnavailable(INSTALL)
    if not eos_ids:
        raise GrammarsUnavailable("the model has no token that ends an answer")


def open_grammars(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Grammars:
    """Open grammars for a model with this tokenizer, this number of logits and these ids that end an answer.

    It takes about 0.2 s, and 40 MB for a vocabulary of 50,000. Raises GrammarsUnavailable.
    """
    check_grammars(eos_ids)
    from llguidance import LLTokenizer

    try:
        plain = Tokenizer.from_str(tokenizer.to_str())
        plain.no_truncation()
        plain.no_padding()
        text = _with_plain_text(plain.to_str())
        vocabulary = LLTokenizer(text, vocab_size, list(eos_ids), LLTokenizer.json_slices())
    except Exception as error:  # errors of a kind of tokenizer that llguidance does not know
        raise GrammarsUnavailable(f"llguidance does not take this tokenizer: {_line(str(error))}") from None
    return Grammars(vocabulary, vocab_size)


def _with_plain_text(tokenizer: str) -> str:
    """Return a tokenizer.json in which added tokens that are not special, such as `<tool_call>`, are ordinary text.

    llguidance takes `<...>` for special, and never for a grammar's text.
    """
    state = json.loads(tokenizer)
    vocabulary = state["model"]["vocab"]
    for token in state["added_tokens"] if isinstance(vocabulary, dict) else ():
        if not token["special"]:
            vocabulary.setdefault(token["content"], token["id"])
    if isinstance(vocabulary, dict):
        state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    return json.dumps(state)


def _of(words: NDArray[np.uint32], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of `tokens` that a mask allows."""
    allowed: NDArray[np.int64] = tokens[(words[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 == 1]
    return allowed


def _line(text: str) -> str:
    """Join the lines of a message, without the parser's own remarks and the grammar around the fault."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _REMARK.search(line)]
    return " ".join(lines)[:300]
