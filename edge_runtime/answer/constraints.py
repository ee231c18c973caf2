"""Apply an answer's constraint to the device's own writers: rules for biases, penalties and grammars.

Grammars need llguidance, which the device may lack, and time to compile: that happens in a thread, and the device
writes nothing under a grammar before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

from tokenizers import Tokenizer

from outrider_core.chat.grammar import (
    CompiledGrammars,
    Grammar,
    GrammarError,
    Grammars,
    GrammarsUnavailable,
    check_grammars,
    open_grammars,
)
from outrider_core.protocol.constraint import GRAMMAR_NONE, GRAMMAR_TOOLS, Constraint, Rules


class ConstraintUnsupported(ValueError):
    """No writer can obey the answer's constraint. The message is one line."""


class ConstraintSupport:
    """Supports writers with this tokenizer, this many tokens and these ids that end an answer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._grammars: Grammars | None = None  # takes 40 MB, so it is opened for the first answer that needs one
        self._compiled = CompiledGrammars()
        self._lock = threading.Lock()

    def missing(self, constraint: Constraint) -> str:
        """Return why the device cannot write under `constraint`; "" if it can, as far as is known without compiling."""
        try:
            if constraint.grammar != GRAMMAR_NONE:
                check_grammars(self._eos_ids)
        except GrammarsUnavailable as error:
            return str(error)
        return ""

    async def rules(self, constraint: Constraint, writers: int) -> list[Rules]:
        """Return rules at the beginning of the answer for this many writers, each with its own thread.

        Raises GrammarError.

        Compiling ends soon after this is cancelled.
        """
        left = threading.Event()
        try:
            return await asyncio.to_thread(self._rules, constraint, writers, left.is_set)
        finally:
            left.set()

    def _rules(self, constraint: Constraint, writers: int, cancelled: Callable[[], bool]) -> list[Rules]:
        if constraint.grammar == GRAMMAR_NONE:
            return [Rules(constraint) for _ in range(writers)]
        try:
            with self._lock:
                grammar = self._grammar(constraint, cancelled)
            return [Rules(constraint, grammar.matcher()) for _ in range(writers)]
        except GrammarsUnavailable as error:
            raise GrammarError(str(error)) from None
        except (GrammarError, CancelledError):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise GrammarError(f"compiling the schema failed: {type(error).__name__}") from None

    def _grammar(self, constraint: Constraint, cancelled: Callable[[], bool]) -> Grammar:
        if self._grammars is None:
            self._grammars = open_grammars(self._tokenizer, self._vocab_size, self._eos_ids)
        return self._compiled.get(self._grammars, constraint.schema, constraint.grammar == GRAMMAR_TOOLS, cancelled)
