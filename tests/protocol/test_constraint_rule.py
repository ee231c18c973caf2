"""Biases and penalties by OpenAI's definitions, against a naive rule; what a Constraint refuses; how Rules follow."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider_core.protocol.constraint import (
    GRAMMAR_JSON_OBJECT,
    GRAMMAR_JSON_SCHEMA,
    GRAMMAR_TOOLS,
    MAX_BIASES,
    OBEYS_BIAS,
    OBEYS_JSON,
    OBEYS_TOOLS,
    Adjustment,
    Constraint,
    Rules,
    adjusted,
    pack_bias,
)

VOCAB = 40
tokens = st.integers(0, VOCAB - 1)
amounts = st.floats(-100, 100, width=32)
constraints = st.builds(
    lambda begin, frequency, presence, bias: Constraint(begin, frequency, presence, *pack_bias(bias)),
    st.integers(0, 4), st.floats(-2, 2), st.floats(-2, 2), st.dictionaries(tokens, amounts, max_size=6),
)  # fmt: skip


def naive(logits: NDArray[np.float64], constraint: Constraint, text: Sequence[int]) -> list[float]:
    """OpenAI's formula: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, plus the bias."""
    answer = list(text[constraint.begin :])
    changed = []
    for token, logit in enumerate(logits.tolist()):
        count = answer.count(token)
        change = constraint.bias.get(token, 0.0) - count * constraint.frequency_penalty
        changed.append(logit + (change - (count > 0) * constraint.presence_penalty))
    return changed


@given(constraints, st.lists(st.lists(tokens, max_size=12), min_size=1, max_size=6), st.integers(0, 1000))
def test_rules_follow_any_text_to_the_same_place(constraint: Constraint, texts: list[list[int]], seed: int) -> None:
    """Texts in any order, longer, shorter or other than the one before: only the last one counts."""
    rules, logits = Rules(constraint), np.random.default_rng(seed).normal(0, 3, VOCAB)
    for text in texts:
        rules.follow(text)
        assert adjusted(logits, rules.adjustment()).tolist() == naive(logits, constraint, text)


def test_the_prompt_is_not_counted() -> None:
    rules = Rules(Constraint(3, presence_penalty=1.0))
    rules.follow([5, 5, 6, 7])
    assert dict(zip(*(part.tolist() for part in rules.adjustment()[:2]), strict=True)) == {7: -1.0}


class OddMatcher:
    """Only odd tokens; counts what it is asked, and breaks on an even one."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.error = ""
        self.rewound = 0

    def allowed(self) -> NDArray[np.uint32]:
        return np.array([0 if self.error else 0xAAAAAAAA], np.uint32)

    def forced(self) -> list[int]:
        return []

    def advance(self, token: int) -> None:
        self.seen.append(token)
        self.error = self.error or ("" if token % 2 else f"{token} is even")

    def rewind(self, tokens: Sequence[int]) -> None:
        self.seen, self.error, self.rewound = [], "", self.rewound + 1
        for token in tokens:
            self.advance(token)


def test_a_matcher_follows_the_answer_alone() -> None:
    matcher = OddMatcher()
    rules = Rules(Constraint(2, grammar=GRAMMAR_JSON_OBJECT), matcher)
    rules.follow([4, 6, 1, 3])
    assert matcher.seen == [1, 3] and matcher.rewound == 0 and not rules.broken
    rules.follow([4, 6, 1, 3, 5])
    assert matcher.seen == [1, 3, 5] and matcher.rewound == 0
    rules.advance(8)
    assert rules.broken == "8 is even"
    assert np.isinf(adjusted(np.zeros(32), rules.adjustment())).all()
    rules.follow([4, 6, 1, 7])
    assert matcher.seen == [1, 7] and matcher.rewound == 1 and not rules.broken
    # tokens beyond the mask's bits are not allowed
    assert np.flatnonzero(np.isfinite(adjusted(np.zeros(35), rules.adjustment()))).tolist() == list(range(1, 32, 2))


def test_a_mask_and_its_bits() -> None:
    rng = np.random.default_rng(0)
    for vocab in (1, 31, 32, 33, 199):
        want = rng.random(vocab) < 0.3
        words = np.zeros(-(-vocab // 32), np.uint32)
        for token in np.flatnonzero(want):
            words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        none = np.array([], np.int64), np.array([], np.float64)
        mask = Adjustment(*none, words).mask(vocab)
        assert mask is not None and mask.tolist() == want.tolist()
        assert Adjustment(*none).mask(vocab) is None


def test_a_grammar_needs_its_matcher() -> None:
    with pytest.raises(ValueError, match="matcher"):
        Rules(Constraint(0, grammar=GRAMMAR_JSON_OBJECT))
    with pytest.raises(ValueError, match="matcher"):
        Rules(Constraint(0), OddMatcher())


@given(constraints)
def test_needs_and_bias(constraint: Constraint) -> None:
    bias = constraint.bias
    assert Constraint(0, 0.0, 0.0, *pack_bias(bias)).bias == bias
    some = bool(bias or constraint.frequency_penalty or constraint.presence_penalty)
    assert constraint.needs == (OBEYS_BIAS if some else 0)
    schema = msgspec.structs.replace(constraint, grammar=GRAMMAR_JSON_SCHEMA, schema="{}")
    assert schema.needs == constraint.needs | OBEYS_JSON
    tools = msgspec.structs.replace(constraint, grammar=GRAMMAR_TOOLS, schema="[]")
    assert tools.needs == constraint.needs | OBEYS_TOOLS


NAN = struct.pack("<f", float("nan"))
WRONG: list[list[object]] = [
    [-1], [2**31], ["0"], [0, 2.01], [0, 0.0, -2.01], [0, float("nan")], [0, 0.0, float("inf")],
    [0, 0, 0, b"\1\0\0\0", b""], [0, 0, 0, b"\1\0\0", b"\1\0\0"], [0, 0, 0, b"\1\0\0\0", NAN],
    [0, 0, 0, b"\1\0\0\0", struct.pack("<f", 100.1)], [0, 0, 0, b"\1\0\0\0" * 2, b"\0" * 8],
    [0, 0, 0, bytes(4 * MAX_BIASES + 4), bytes(4 * MAX_BIASES + 4)], [0, 0, 0, b"", b"", 3],
    [0, 0, 0, b"", b"", GRAMMAR_JSON_SCHEMA], [0, 0, 0, b"", b"", GRAMMAR_JSON_OBJECT, "{}"],
    [0, 0, 0, b"", b"", 0, "{}"],
    [0, 0, 0, b"", b"", GRAMMAR_JSON_SCHEMA, "x" * (2**15 + 1)],
]  # fmt: skip


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_contradicts_itself_is_refused_while_decoding(fields: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Constraint)


def test_random_trees_and_counts() -> None:
    """Rules that walk down a random path and are taken back give what rules that begin anew give."""
    rng = random.Random(1)
    constraint = Constraint(1, 0.7, -0.4, *pack_bias({3: 2.5, 9: -100.0}))
    text, logits = [1, 2, 3], np.zeros(VOCAB)
    walked = Rules(constraint)
    for _ in range(200):
        walked.follow(text)
        for _ in range(rng.randrange(5)):
            walked.advance(rng.randrange(6))
            adjusted(logits, walked.adjustment())
        text = text[: rng.randrange(1, len(text) + 1)] if rng.random() < 0.1 else [*text, rng.randrange(6)]
        walked.follow(text)
        assert adjusted(logits, walked.adjustment()).tolist() == naive(logits, constraint, text)
