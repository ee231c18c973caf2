"""Trees under an answer's rules: without forbidden tokens, and with those that a grammar forces."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.chat.grammar import open_grammars
from outrider_core.drafting.drafter import Draft, Drafter, TreeShape
from outrider_core.protocol.constraint import GRAMMAR_JSON_SCHEMA, Constraint, Rules, pack_bias
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT
from tests.android.drafter_vectors import HashEngine
from tests.tiny import EOS, json_tokenizer

TOKENIZER = json_tokenizer()
VOCAB = len(TOKENIZER)
GRAMMARS = open_grammars(TOKENIZER.backend_tokenizer, VOCAB, [EOS])
NAME = "temperature"
SCHEMA = json.dumps(
    {"type": "object", "properties": {NAME: {"type": "integer"}}, "required": [NAME], "additionalProperties": False}
)
PROMPT = [5, 6, 7]
SHAPE = TreeShape(nodes=48, depth=10)


def rules_of(**bias: float) -> Rules:
    amounts = {int(token[1:]): amount for token, amount in bias.items()}
    constraint = Constraint(len(PROMPT), 0.5, 0.25, *pack_bias(amounts), GRAMMAR_JSON_SCHEMA, SCHEMA)
    return Rules(constraint, GRAMMARS.compile(SCHEMA).matcher())


def drafter_of(ids: list[int] | None = None) -> Drafter:
    known = np.array(ids or range(VOCAB))
    return Drafter(HashEngine(len(known)), known, RowShape(1, 2), 1, 200, row_cost=0.0)


def paths_of(draft: Draft) -> list[list[int]]:
    return [[draft.tree.tokens[at] for at in draft.tree.path(node)] for node in range(len(draft.tree))]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    warm=st.booleans(),
    written=st.sampled_from(["", "{", '{"', '{"temperature"', '{"temperature":4']),
)
def test_every_path_is_allowed(seed: int, warm: bool, written: str) -> None:
    text = [*PROMPT, *TOKENIZER.encode(written, add_special_tokens=False)]
    sampling = Sampling(1.0 if warm else 0.0, seed=seed)
    draft = drafter_of().draft(text, sampling, SHAPE, rules=rules_of(t9=1.5))
    assert len(draft.tree) and list(draft.scores) == sorted(draft.scores, reverse=True)
    judge = rules_of()
    for path in paths_of(draft):
        for length, token in enumerate(path):
            judge.follow([*text, *path[:length]])
            mask = judge.adjustment().mask(VOCAB)
            assert mask is not None and mask[token], path
    assert len({tuple(path) for path in paths_of(draft)}) == len(draft.tree), "a path occurs twice"


@pytest.mark.parametrize("ids", [None, [EOS, 40, 41]], ids=["all tokens", "hardly any"])
def test_what_is_forced_costs_no_step(ids: list[int] | None) -> None:
    """Behind the quote stands the only property's name, whatever the drafter knows of its tokens."""
    text = [*PROMPT, *TOKENIZER.encode('{"', add_special_tokens=False)]
    judge = rules_of()
    judge.follow(text)
    run = judge.forced()
    assert len(run) > 4 and TOKENIZER.decode(run).startswith(NAME)
    drafter = drafter_of(ids)
    draft = drafter.draft(text, Sampling(), TreeShape(nodes=48, gain=10.0), rules=rules_of())  # the root alone
    assert draft.steps == 1 and run in paths_of(draft)
    again = drafter.draft([*text, *run], Sampling(), SHAPE, rules=rules_of())
    assert len(again.tree) > 0 or ids


def test_a_tree_of_other_rules_is_drafted_anew() -> None:
    drafter, rules = drafter_of(), rules_of()
    first = drafter.draft(PROMPT, Sampling(), SHAPE, rules=rules)
    went_on = [*PROMPT, first.tree.tokens[first.tree.path(0)[0]]]
    assert drafter.draft(went_on, Sampling(), SHAPE, rules=rules).ahead
    assert not drafter.draft(went_on, Sampling(), SHAPE).ahead
    whole = replace(SHAPE, gain=0.0)  # what a drafter has seen decides what its steps are worth, but not the best tree
    fresh = drafter_of().draft(went_on, Sampling(), whole, rules=rules_of())
    assert drafter.draft(went_on, Sampling(), whole, rules=rules).tree == fresh.tree
    assert first.tree.children[ROOT + 1]


def test_penalties_count_tokens_that_the_drafter_does_not_know() -> None:
    rules = Rules(Constraint(1, 1.0))
    token, _ = drafter_of([3, 4, 5]).next_token([3, VOCAB - 1, 4], Sampling(), rules)
    assert token in (3, 4, 5)
