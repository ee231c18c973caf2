"""Prepare the rules of constrained answers in separate threads: a large schema delays its sender alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from cloud.engine.fair_worker import FairWorker
from cloud.telemetry import log
from outrider_core.chat.grammar import (
    CompiledGrammars,
    Grammar,
    GrammarError,
    Grammars,
    GrammarsUnavailable,
    check_grammars,
    open_grammars,
)
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.protocol.constraint import (
    GRAMMAR_TOOLS,
    OBEYS_BIAS,
    OBEYS_JSON,
    OBEYS_TOOLS,
    Constraint,
    Rules,
)

#: accounts whose compiled grammars are kept
ACCOUNTS = 64
#: memory of all compiled grammars; the accounts that asked longest ago lose theirs first
KEPT_BYTES = 256 << 20
#: accounts whose grammars are compiled at the same time
THREADS = 4


class ConstraintDesk:
    """Compiles the grammars of constraints and follows their answers' text, serving accounts in turn.

    obeys: OBEYS_*, the supported constraints; `open` adds the grammars. offered: some are supported.
    """

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], offered: bool = True) -> None:
        self._vocab_size, self._eos_ids = vocab_size, tuple(eos_ids)
        self.obeys = OBEYS_BIAS if offered else 0
        self._tokenizer: ChatTokenizer | None = None
        self._grammars: Grammars | None = None  # takes memory, so it is opened for the first answer that needs one
        self._compiled: OrderedDict[str, CompiledGrammars] = OrderedDict()
        self._worker, self._lock = FairWorker("constraints", THREADS), threading.Lock()
        self._closed = False

    def open(self, tokenizer: ChatTokenizer | None) -> None:
        """Offer grammars too, if there is a tokenizer and the installed packages allow it."""
        if not self.obeys:
            return
        try:
            if tokenizer is None:
                raise GrammarsUnavailable("the target has no tokenizer")
            check_grammars(self._eos_ids)
            self._tokenizer = tokenizer
            self.obeys = OBEYS_BIAS | OBEYS_JSON | OBEYS_TOOLS
        except GrammarsUnavailable as error:
            log.info("no structured output here", why=str(error))

    def check(self, constraint: Constraint, length: int) -> str:
        """Return why it is refused at once for a text of `length` tokens, prompt included; "" if it is not."""
        if not self.obeys:
            return "this verifier's target runs on another server, which does not support biases, penalties or schemas"
        if constraint.needs & ~self.obeys:
            return "this verifier offers no structured output; its log says why"
        if constraint.begin > length:
            return f"the constraint begins at token {constraint.begin}; there are {length}"
        if max(constraint.bias, default=0) >= self._vocab_size:
            return f"a bias of token {max(constraint.bias)}; the vocabulary has {self._vocab_size}"
        return ""

    def prepare(
        self, account: str, constraint: Constraint, tokens: Sequence[int], cancelled: Callable[[], bool]
    ) -> Future[Rules]:
        """Return rules at the end of `tokens`, for a constraint that `check` accepted. `cancelled`: from any thread.

        The future raises GrammarError if the schema cannot be obeyed, or if `tokens` have not obeyed it. It is
        cancelled, or raises CancelledError, soon after its last waiter leaves or the desk is closed.
        """

        def given_up() -> bool:
            return self._closed or cancelled()

        return self._worker.submit(account, partial(self._prepare, account, constraint, tokens, given_up), given_up)

    def close(self) -> None:
        """End the threads; cancel waiting and running work."""
        self._closed = True
        self._worker.close()

    def _prepare(
        self, account: str, constraint: Constraint, tokens: Sequence[int], cancelled: Callable[[], bool]
    ) -> Rules:
        try:
            grammar = self._grammar(account, constraint, cancelled) if constraint.grammar else None
            rules = Rules(constraint, grammar.matcher() if grammar else None)
            rules.follow(tokens)
            if rules.broken:
                raise GrammarError(f"the answer so far does not obey its constraint: {rules.broken}")
            return rules
        except (GrammarError, CancelledError):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            log.error("constraint failed", error=type(error).__name__)
            raise GrammarError("the constraint cannot be obeyed: compiling it failed") from None

    def _grammar(self, account: str, constraint: Constraint, cancelled: Callable[[], bool]) -> Grammar:
        """Return the grammar, compiled now or earlier for this account."""
        with self._lock:
            grammars = self._opened()
            mine = self._compiled.setdefault(account, CompiledGrammars())
            self._compiled.move_to_end(account)
            while len(self._compiled) > ACCOUNTS:
                self._compiled.popitem(last=False)
        grammar = mine.get(grammars, constraint.schema, constraint.grammar == GRAMMAR_TOOLS, cancelled)
        with self._lock:
            while len(self._compiled) > 1 and sum(each.bytes for each in self._compiled.values()) > KEPT_BYTES:
                self._compiled.popitem(last=False)
        return grammar

    def _opened(self) -> Grammars:
        assert self._tokenizer is not None
        if self._grammars is None:
            try:
                self._grammars = open_grammars(self._tokenizer.tokenizer, self._vocab_size, self._eos_ids)
            except GrammarsUnavailable as error:
                self.obeys = OBEYS_BIAS
                log.error("no structured output here", why=str(error))
                raise GrammarError(f"this verifier offers no structured output: {error}") from None
        return self._grammars
