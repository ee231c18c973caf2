"""An answer under a constraint, through trees, evictions and replicas, is plain decoding under the same constraint."""

from __future__ import annotations

import os
import random

import pytest

from outrider_core.protocol.constraint import Constraint, Rules, pack_bias
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Error, Verdict
from tests.cloud.drive import VLLM, Kind, expected_path, made_for, make_verifier, random_tree, started
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG

pytestmark = pytest.mark.gpu

VOCAB = 199
#: the oracle runs this far ahead: more than a tree is deep
SPARE = 10
PROMPT = [1, 10, 20, 30, 20]
BEGIN = len(PROMPT)
CONSTRAINTS = {
    "bias": Constraint(BEGIN, 0.0, 0.0, *pack_bias({7: 5.0, 9: -100.0, 150: 2.5})),
    "frequency": Constraint(BEGIN, 1.9),
    "presence": Constraint(BEGIN, 0.0, 1.3),
    "rewards": Constraint(BEGIN, -0.6, -1.1, *pack_bias({token: 0.1 * token for token in range(40)})),
}
each_engine = pytest.mark.parametrize("engine", ["torch", VLLM])
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(1.0, seed=4), "cut": Sampling(0.8, 50, 0.9, 0.01, seed=5)}


@each_engine
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_trees_change_nothing(constraint: Constraint, sampling: Sampling, engine: Kind) -> None:
    model = tiny_model(seed=7, vocab=VOCAB, **made_for(engine))
    truth = plain_decode(model, PROMPT, sampling, 40 + SPARE, eos_ids=(), rules=Rules(constraint))
    assert truth != plain_decode(model, PROMPT, sampling, 40 + SPARE, eos_ids=())
    rng = random.Random(str(constraint))
    replicas = [make_verifier(model, (), engine=engine) for _ in range(2)]
    with started(replicas[0]) as one, started(replicas[1]) as two:
        home, session, tokens, seq, accepted = one, os.urandom(16), list(PROMPT), 0, 0
        home.open(session, tokens, 0, sampling, rules=Rules(constraint))
        while len(rest := truth[len(tokens) - BEGIN :]) > SPARE:
            if rng.random() < 0.3:  # another replica, or the same one from an earlier place
                home = rng.choice([one, two])
                tokens = tokens[: max(BEGIN, len(tokens) - rng.randrange(4))]
                rest = truth[len(tokens) - BEGIN :]
                home.open(session, tokens, seq, sampling, rules=Rules(constraint))
            seq += 1
            tree = random_tree(rng, rest, VOCAB)
            verdict = home.verify(session, seq, len(tokens), tree).get(timeout=HANG)
            assert isinstance(verdict, Verdict), verdict
            path = list(verdict.accepted)
            assert path == expected_path(tree, rest)
            emitted = [tree.tokens[node] for node in path] + [verdict.bonus]
            assert emitted == rest[: len(emitted)]
            tokens += emitted
            accepted += len(path)
    assert accepted > 8


def test_a_repeated_verify_under_another_constraint_is_drawn_anew() -> None:
    model = tiny_model(seed=7, vocab=VOCAB)
    with started(make_verifier(model, ())) as direct:
        answers = []
        for constraint in (CONSTRAINTS["bias"], CONSTRAINTS["bias"], Constraint(BEGIN, 0, 0, *pack_bias({77: 100.0}))):
            direct.open(bytes(16), PROMPT, 0, rules=Rules(constraint))
            verdict = direct.verify(bytes(16), 1, BEGIN, TokenTree()).get(timeout=HANG)
            assert isinstance(verdict, Verdict) and not isinstance(verdict, Error)
            answers.append(verdict.bonus)
        assert answers[0] == answers[1] and answers[2] == 77 != answers[1]
