"""The constraint on an answer beside its sampling parameters: biases, penalties, a grammar. It applies to every draw.

A constraint changes the logits before `outrider_core.protocol.sampling` sees them, and it depends on the answer's
tokens so far and on nothing else: at each node of a tree on the node's own path. So an answer through trees is the
answer of plain decoding under the same constraint. Per token, in float64 and in this order:

    logit + bias[token] - count[token] * frequency_penalty - (presence_penalty if count[token] > 0)

and minus infinity if the grammar does not allow the token. `count` counts the answer, never the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from outrider_core.protocol.prefix import common_prefix

MAX_BIASES = 1024
#: largest bias either way, as in OpenAI's API
MAX_BIAS = 100.0
#: most characters of a JSON schema
MAX_SCHEMA = 1 << 15
#: kinds of grammar: none, any JSON object, JSON that a schema describes, text or calls of functions
GRAMMAR_NONE, GRAMMAR_JSON_OBJECT, GRAMMAR_JSON_SCHEMA, GRAMMAR_TOOLS = 0, 1, 2, 3
#: constraints that a verifier supports, as bits of WELCOME's `constraints`
OBEYS_BIAS, OBEYS_JSON, OBEYS_TOOLS = 1, 2, 4

_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_Vector = Annotated[bytes, Meta(max_length=4 * MAX_BIASES)]


class Constraint(msgspec.Struct, array_like=True, frozen=True):
    """begin: index of the answer's first token. bias_tokens, biases: uint32 ids and float32 amounts, little-endian.

    grammar: GRAMMAR_*; schema: the JSON schema of GRAMMAR_JSON_SCHEMA as text, or the `ToolRules` of GRAMMAR_TOOLS as
    JSON (`chat.tool_grammar`). Raises ValueError on contradictory fields, which a decoder turns into its own error.
    """

    begin: Annotated[int, Meta(ge=0, lt=2**31)]
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    bias_tokens: _Vector = b""
    biases: _Vector = b""
    grammar: Annotated[int, Meta(ge=0, lt=256)] = GRAMMAR_NONE
    schema: Annotated[str, Meta(max_length=MAX_SCHEMA)] = ""

    def __post_init__(self) -> None:
        if not (abs(self.frequency_penalty) <= 2.0 and abs(self.presence_penalty) <= 2.0):
            raise ValueError("a penalty must be a number from -2 to 2")
        if len(self.bias_tokens) != len(self.biases) or len(self.biases) % 4:
            raise ValueError("biases need as many float32 amounts as uint32 token ids")
        ids, amounts = np.frombuffer(self.bias_tokens, "<u4"), np.frombuffer(self.biases, "<f4")
        if not (np.abs(amounts) <= MAX_BIAS).all():
            raise ValueError(f"a bias must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if len(np.unique(ids)) < len(ids):
            raise ValueError("a token has two biases")
        if self.grammar > GRAMMAR_TOOLS:
            raise ValueError(f"grammar {self.grammar} is not known here")
        if bool(self.schema) != (self.grammar in (GRAMMAR_JSON_SCHEMA, GRAMMAR_TOOLS)):
            raise ValueError("a schema belongs to the grammars of a JSON schema and of tools, and to no other")

    @property
    def bias(self) -> dict[int, float]:
        """Return the amounts by token id."""
        ids, amounts = np.frombuffer(self.bias_tokens, "<u4"), np.frombuffer(self.biases, "<f4")
        return dict(zip(ids.tolist(), amounts.tolist(), strict=True))

    @property
    def needs(self) -> int:
        """The OBEYS_* bits that a verifier must have."""
        biased = bool(self.biases or self.frequency_penalty or self.presence_penalty)
        obeys = (0, OBEYS_JSON, OBEYS_JSON, OBEYS_TOOLS)[self.grammar]
        return biased * OBEYS_BIAS | obeys


def pack_bias(bias: Mapping[int, float]) -> tuple[bytes, bytes]:
    """Return (bias_tokens, biases) of a Constraint."""
    return np.array(list(bias), "<u4").tobytes(), np.array(list(bias.values()), "<f4").tobytes()


class Adjustment(NamedTuple):
    """Changes to the logits of one draw.

    tokens int64 [n], without repetitions; amounts float64 [n], added to their logits. allowed: uint32
    [ceil(vocab / 32)], bit t % 32 of word t // 32 for token t; None: every token.
    """

    tokens: NDArray[np.int64]
    amounts: NDArray[np.float64]
    allowed: NDArray[np.uint32] | None = None

    def mask(self, vocab: int) -> NDArray[np.bool_] | None:
        """Return the allowed tokens, bool [vocab]; None: all of them. Tokens beyond the bits of `allowed` are not."""
        if self.allowed is None:
            return None
        bits = np.unpackbits(self.allowed.astype("<u4", copy=False).view(np.uint8), count=vocab, bitorder="little")
        return bits.view(np.bool_)


def adjusted(logits: NDArray[np.floating], adjustment: Adjustment) -> NDArray[np.float64]:
    """Return a copy of logits [vocab] with the adjustment applied."""
    x: NDArray[np.float64] = logits.astype(np.float64)
    x[adjustment.tokens] += adjustment.amounts
    mask = adjustment.mask(len(x))
    return x if mask is None else np.where(mask, x, -np.inf)


class Matcher(Protocol):
    """A grammar at the end of one text. After an error it allows nothing until `rewind` or a new matcher."""

    @property
    def error(self) -> str:
        """Return why the text cannot continue, in words for people; "" while it can."""

    def allowed(self) -> NDArray[np.uint32]:
        """Return the tokens that may come next, as `Adjustment.allowed`."""

    def forced(self) -> list[int]:
        """Return tokens that spell the only continuation; empty if there are several."""

    def advance(self, token: int) -> None:
        """Add `token` to the text."""

    def rewind(self, tokens: Sequence[int]) -> None:
        """Go back to the state after `tokens` alone."""


class Disobeyed(ValueError):
    """No token may follow the text under its constraint; the message says why."""


class Rules:
    """Applies a constraint at the end of one text, which it follows token by token.

    matcher: of the constraint's grammar, at the beginning of the answer; None if there is none.
    """

    def __init__(self, constraint: Constraint, matcher: Matcher | None = None) -> None:
        if (constraint.grammar != GRAMMAR_NONE) != (matcher is not None):
            raise ValueError("a grammar needs its matcher")
        self.constraint, self._matcher, self._bias = constraint, matcher, constraint.bias
        self._answer: list[int] = []
        self._counts = Counter[int]()

    @property
    def broken(self) -> str:
        """Return why nothing can be drawn any more, "" while something can."""
        return self._matcher.error if self._matcher else ""

    def follow(self, tokens: Sequence[int]) -> None:
        """Go to the end of `tokens`, prompt and answer, from any earlier place."""
        answer = list(tokens[self.constraint.begin :])
        same = common_prefix(answer, self._answer)
        if same < len(self._answer):
            self._answer = answer[:same]
            self._counts = Counter(self._answer)
            if self._matcher:
                self._matcher.rewind(self._answer)
        for token in answer[same:]:
            self.advance(token)

    def advance(self, token: int) -> None:
        """Add `token` to the answer."""
        self._answer.append(token)
        self._counts[token] += 1
        if self._matcher:
            self._matcher.advance(token)

    def forced(self) -> list[int]:
        """See Matcher.forced; empty without a grammar."""
        return self._matcher.forced() if self._matcher else []

    def adjusted(self, logits: NDArray[np.floating], text: Sequence[int]) -> NDArray[np.float64]:
        """Adjust logits [vocab] for the draw of the token after `text`. Raises Disobeyed if no token is allowed."""
        self.follow(text)
        changed = adjusted(logits, self.adjustment())
        if self.broken or not np.isfinite(changed).any():
            raise Disobeyed(self.broken or "the constraint allows no token here")
        return changed

    def vocab(self, least: int) -> int:
        """Return the number of tokens that the grammar knows, at least `least`."""
        return max(least, 32 * len(self._matcher.allowed()) if self._matcher else 0, 1 + max(self._bias, default=0))

    def adjustment(self) -> Adjustment:
        """Return the changes to the next draw."""
        amounts, constraint = dict(self._bias), self.constraint
        if constraint.frequency_penalty or constraint.presence_penalty:
            for token, count in self._counts.items():
                amount = amounts.get(token, 0.0) - count * constraint.frequency_penalty
                amounts[token] = amount - constraint.presence_penalty
        allowed = self._matcher.allowed() if self._matcher else None
        return Adjustment(np.array(list(amounts), np.int64), np.array(list(amounts.values()), np.float64), allowed)
