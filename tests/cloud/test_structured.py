"""Structured output through trees, replicas and sockets: valid against its schema, and plain constrained decoding's."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from queue import Queue
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from cloud.engine import constraints, masks
from cloud.engine.constraints import ACCOUNTS, ConstraintDesk
from cloud.server.connection import Connection
from cloud.server.limits import Account, AccountLimits
from cloud.server.service import Verifier
from outrider_core.chat.grammar import ANY_OBJECT, KEPT, GrammarError, Grammars, open_grammars
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.protocol.constraint import (
    GRAMMAR_JSON_OBJECT,
    GRAMMAR_JSON_SCHEMA,
    OBEYS_BIAS,
    OBEYS_JSON,
    OBEYS_TOOLS,
    Constraint,
    Rules,
    pack_bias,
)
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import (
    ERR_BOUNDS,
    ERR_MALFORMED,
    ERR_UNKNOWN,
    FINISH_EOS,
    Error,
    Features,
    Generate,
    Open,
    Opened,
    Verdict,
    Verify,
    encode,
    pack_ids,
    pack_tree,
)
from tests.cloud.drive import HELLO, Client, Direct, make_verifier, random_tree, serve, started
from tests.schemas import schemas
from tests.tiny import EOS, json_tokenizer, plain_decode, tiny_model
from tests.waiting import HANG
from tests.walks import HeldWalks

VOCAB = 320
MODEL = tiny_model(seed=5, vocab=VOCAB)
TOKENIZER = json_tokenizer(VOCAB)
GRAMMARS = open_grammars(TOKENIZER.backend_tokenizer, VOCAB, [EOS])
PROMPT = [1, 10, 20, 30, 20]
BEGIN = len(PROMPT)
MOST = 240
#: about half of whose answers the tiny model ends within a few tokens, and half later
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def held_to(schema: Any, **more: Any) -> Constraint:
    return Constraint(BEGIN, grammar=GRAMMAR_JSON_SCHEMA, schema=json.dumps(schema), **more)


def rules(constraint: Constraint) -> Rules:
    return Rules(constraint, GRAMMARS.compile(constraint.schema or ANY_OBJECT).matcher())


def truth_of(constraint: Constraint, sampling: Sampling) -> list[int]:
    """Plain decoding under the constraint, to its end."""
    truth = plain_decode(MODEL, PROMPT, sampling, MOST, rules=rules(constraint))
    assert truth[-1] == EOS, len(truth)
    return truth


def assert_valid(tokens: Sequence[int], schema: Any) -> None:
    assert tokens[-1] == EOS
    jsonschema.validate(json.loads(TOKENIZER.decode(list(tokens[:-1]))), schema)


def accepted_of(tree: TokenTree, rest: Sequence[int]) -> list[int]:
    """Nodes of a tree that the answer's rest goes through; the token that ends it is never one of them."""
    path: list[int] = []
    for token in rest:
        child = tree.child(path[-1] if path else ROOT, token)
        if child is None or token == EOS:
            break
        path.append(child)
    return path


def json_verifier(**settings: Any) -> Verifier:
    values = {"max_model_len": 400, "kv_tokens": 4096}
    verifier = make_verifier(MODEL, **{**values, **settings})
    verifier.tokenizer = chat_tokenizer_of(TOKENIZER)
    return verifier


@pytest.fixture(scope="module")
def replicas() -> Any:
    made = [make_verifier(MODEL, max_model_len=400) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "COSTLY_SECONDS", HANG)  # on a busy machine too, no path ends because a mask is late
        for verifier in made:
            verifier.engine.mask_seconds = HANG
        with started(made[0]) as one, started(made[1]) as two:
            yield one, two


any_schema = given(schema=schemas, seed=st.integers(0, 2**63 - 1))
OFTEN = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@any_schema
@OFTEN
def test_random_schemas_through_trees(
    replicas: tuple[Direct, Direct], temperature: float, schema: dict[str, Any], seed: int
) -> None:
    """At T = 0 and T = 1: cut at any token, resumed anywhere, the answer is plain decoding's, and valid."""
    through_trees(replicas, Sampling(temperature, seed=seed), schema)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@any_schema
@settings(OFTEN, max_examples=250)
def test_five_hundred_random_schemas(
    replicas: tuple[Direct, Direct], temperature: float, schema: dict[str, Any], seed: int
) -> None:
    through_trees(replicas, Sampling(temperature, seed=seed), schema)


def through_trees(replicas: tuple[Direct, Direct], sampling: Sampling, schema: dict[str, Any]) -> None:
    constraint = held_to(schema)
    truth = plain_decode(MODEL, PROMPT, sampling, MOST, rules=rules(constraint))
    assume(truth[-1] == EOS)  # a random model may write long arrays and strings
    rng = random.Random(sampling.seed)
    home, session, tokens, seq = replicas[0], os.urandom(16), list(PROMPT), 0
    home.open(session, tokens, 0, sampling, rules=rules(constraint))
    while tokens[-1] != EOS:
        if rng.random() < 0.2:
            home, tokens = rng.choice(replicas), tokens[: max(BEGIN, len(tokens) - rng.randrange(3))]
            home.open(session, tokens, seq, sampling, rules=rules(constraint))
        seq, rest = seq + 1, truth[len(tokens) - BEGIN :]
        tree = random_tree(rng, rest, VOCAB)
        verdict = home.verify(session, seq, len(tokens), tree).get(timeout=HANG)
        assert isinstance(verdict, Verdict), verdict
        path = list(verdict.accepted)
        assert path == accepted_of(tree, rest)
        tokens += [tree.tokens[node] for node in path] + [verdict.bonus]
        assert (verdict.finish == FINISH_EOS) == (tokens[-1] == EOS)
    assert tokens[BEGIN:] == truth
    assert_valid(truth, schema)


def test_over_sockets_and_resumed_in_the_middle_on_another_replica() -> None:
    """OPEN, VERIFY right behind it, a cut in mid-JSON, the rest from a verifier that never saw the answer's start."""
    constraint = held_to(
        PERSON, frequency_penalty=0.3, bias_tokens=pack_bias({40: 1.5})[0], biases=pack_bias({40: 1.5})[1]
    )
    sampling = Sampling(1.0, seed=11)
    truth = truth_of(constraint, sampling)
    assert len(truth) > 12
    cut, session = len(truth) // 2, os.urandom(16)
    with serve(json_verifier()) as first, serve(json_verifier()) as second:
        with Client(first) as client:
            assert client.welcome.constraints == OBEYS_BIAS | OBEYS_JSON | OBEYS_TOOLS
            client.send(Open(0, session, 0, pack_ids(PROMPT), 0, sampling, constraint))
            client.send(Verify(0, 1, BEGIN, *pack_tree(TokenTree.chain(truth[: cut - 1]))))
            assert isinstance(client.any(), Opened)
            verdict = client.receive(Verdict)
            assert list(verdict.accepted) == list(range(cut - 1)) and verdict.bonus == truth[cut - 1]
        with Client(second) as client:
            tokens = PROMPT + truth[:cut]
            client.send(Open(3, session, 1, pack_ids(tokens), 0, sampling, constraint))
            client.receive(Opened)
            tokens += client.generate(2, len(tokens), 300, stream=3)
    assert tokens[BEGIN:] == truth
    assert_valid(truth, PERSON)


def test_any_json_object() -> None:
    constraint = Constraint(BEGIN, grammar=GRAMMAR_JSON_OBJECT)
    ended = 0
    for seed in range(12):
        truth = plain_decode(MODEL, PROMPT, Sampling(1.0, seed=seed), MOST, rules=rules(constraint))
        if truth[-1] == EOS:
            ended += 1
            assert isinstance(json.loads(TOKENIZER.decode(truth[:-1])), dict)
    assert ended


REFUSED = {
    "no JSON": (Constraint(1, grammar=GRAMMAR_JSON_SCHEMA, schema="{"), "the schema cannot be read"),
    "unsupported": (Constraint(1, grammar=GRAMMAR_JSON_SCHEMA, schema='{"not": {}}'), "cannot be obeyed"),
    "begins behind the text": (Constraint(BEGIN + 1), "the constraint begins at token 6"),
    "a token beyond the vocabulary": (Constraint(0, 0.0, 0.0, *pack_bias({VOCAB: 1.0})), f"a bias of token {VOCAB}"),
    "a text that disobeys": (Constraint(1, grammar=GRAMMAR_JSON_OBJECT), "does not obey its constraint"),
}


def test_refusals_are_errors_of_their_stream_and_leave_nothing_behind() -> None:
    verifier = json_verifier()
    with serve(verifier) as address, Client(address) as client:
        for number, (constraint, why) in enumerate(REFUSED.values()):
            client.send(Open(number, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling(), constraint))
            error = client.receive(Error)
            assert (error.code, error.stream) == (ERR_BOUNDS, number) and why in error.text, error
        for _ in range(40):  # those that wait for a refusal take no place, nor what was sent behind them
            client.send(Open(1, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling(), REFUSED["no JSON"][0]))
            client.send(Generate(1, 1, BEGIN, 5))
            assert "cannot be read" in client.receive(Error).text
            assert client.receive(Error).code == ERR_UNKNOWN
        session, constraint = os.urandom(16), held_to(PERSON)
        client.send(Open(0, session, 0, pack_ids(PROMPT), 0, Sampling(), constraint))
        client.receive(Opened)
        assert_valid(client.generate(1, BEGIN, 300), PERSON)
        assert len(verifier.sessions) == 1


def mutated_constraint(rng: random.Random) -> Any:
    """The MessagePack fields of a constraint, most of them changed: types, bounds, bytes, characters of the schema."""
    bias = pack_bias({rng.randrange(VOCAB + 9): rng.uniform(-101, 101) for _ in range(rng.randrange(3))})
    schema = json.dumps(PERSON)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(schema))
        schema = (
            schema[:at]
            + rng.choice(["", '"', "}", "[", "\\", "0", "é", "$ref", "not"])
            + schema[at + rng.randrange(3) :]
        )
    grammar = rng.choice([0, GRAMMAR_JSON_OBJECT, GRAMMAR_JSON_SCHEMA, GRAMMAR_JSON_SCHEMA])
    fields = [BEGIN, 0.5, -0.5, *bias, grammar, schema if grammar == GRAMMAR_JSON_SCHEMA else ""]
    for _ in range(rng.randrange(2)):
        fields[rng.randrange(7)] = rng.choice([None, -1, 2, 9.5, float("nan"), 2**31, b"abc", b"\0" * 8, "x", [], {}])
    return rng.choice([fields, fields, fields, fields[: rng.randrange(7)], [*fields, 1], rng.randrange(5)])


def test_mutated_constraints_give_typed_errors_and_the_others_go_on() -> None:
    """Whatever an OPEN carries: OPENED, or ERROR 1 or 3. What is opened generates within its rules."""
    rng, seen = random.Random(7), Counter[str]()
    verifier = json_verifier(max_sessions=64)
    with serve(verifier) as address:
        for _ in range(8):
            with Client(address) as client:
                for _ in range(40):
                    values = msgspec.msgpack.decode(
                        msgspec.msgpack.encode(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 9, Sampling(1.0, seed=1)))
                    )
                    values[7] = mutated_constraint(rng)
                    client.socket.send(msgspec.msgpack.encode(values) + b"\x80")
                    reply = client.any()
                    while isinstance(reply, Features):
                        reply = client.any()
                    if isinstance(reply, Opened):
                        seen["opened"] += 1
                        client.send(Generate(0, 1, BEGIN, 3))
                        assert [client.receive(Verdict).seq for _ in range(3)] == [1, 1, 1]
                    else:
                        assert isinstance(reply, Error) and reply.code in (ERR_MALFORMED, ERR_BOUNDS), reply
                        seen[f"error {reply.code}"] += 1
        with Client(address) as client:
            client.send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling(), held_to(PERSON)))
            client.receive(Opened)
            assert_valid(client.generate(1, BEGIN, 300), PERSON)
        assert verifier.alive
    assert min(seen["opened"], seen[f"error {ERR_MALFORMED}"], seen[f"error {ERR_BOUNDS}"]) > 30, seen


def test_without_a_tokenizer_grammars_are_not_offered() -> None:
    verifier = make_verifier(MODEL)
    with serve(verifier) as address, Client(address) as client:
        assert client.welcome.constraints == OBEYS_BIAS
        client.send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling(), held_to(PERSON)))
        assert "no structured output" in client.receive(Error).text
        biased = Constraint(BEGIN, 0.0, 0.0, *pack_bias({77: 100.0}))
        client.send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling(), biased))
        client.receive(Opened)
        assert client.generate(1, BEGIN, 3) == [77, 77, 77]


class Exhausted:
    """A grammar that runs out of fuel after some tokens."""

    def __init__(self, left: int) -> None:
        self.left, self.error = left, ""

    def allowed(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        self.error = "" if self.left else "the schema is too complex here"
        return np.full(-(-VOCAB // 32), 0 if self.error else 0xFFFFFFFF, np.uint32)

    def advance(self, token: int) -> None:
        self.left -= 1

    def rewind(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing was taken back")


def test_a_grammar_that_fails_on_its_way_fails_its_own_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it likes: the engine is not taken for broken."""
    monkeypatch.setattr("cloud.engine.batcher.MAX_STEP_FAILURES", 2)
    verifier = make_verifier(MODEL, ())
    with started(verifier) as direct:
        for _ in range(4):
            session, other = os.urandom(16), os.urandom(16)
            constraint = Constraint(BEGIN, grammar=GRAMMAR_JSON_OBJECT)
            direct.open(session, PROMPT, rules=Rules(constraint, Exhausted(4)))
            direct.open(other, PROMPT)
            _, replies = direct.submit(session, Generate(0, 1, BEGIN, 9))
            _, others = direct.submit(other, Generate(0, 1, BEGIN, 9))
            got = [replies.get(timeout=HANG) for _ in range(5)]
            assert [type(reply) for reply in got] == [Verdict] * 4 + [Error]
            assert isinstance(got[4], Error) and (got[4].code, got[4].text) == (
                ERR_BOUNDS,
                "the schema is too complex here",
            )
            assert [others.get(timeout=HANG).bonus for _ in range(9)] == plain_decode(  # type: ignore[union-attr]
                MODEL, PROMPT, Sampling(), 9, eos_ids=()
            )
            assert replies.empty() and verifier.alive


def test_the_desk_takes_accounts_in_turns_and_keeps_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "THREADS", 1)  # otherwise their order is the operating system's
    desk = ConstraintDesk(VOCAB, (EOS,))
    desk.open(chat_tokenizer_of(TOKENIZER))
    compiled, gate = list[str](), threading.Event()
    real = Grammars.compile

    def compile_slowly(grammars: Grammars, schema: str, *more: Any) -> Any:
        assert gate.wait(HANG)
        compiled.append(schema)
        return real(grammars, schema, *more)

    monkeypatch.setattr(Grammars, "compile", compile_slowly)

    def ask(account: str, value: int, cancelled: bool = False) -> Any:
        return desk.prepare(account, held_to({"const": value}), PROMPT, lambda: cancelled)

    greedy = [ask("greedy", value) for value in range(KEPT + 4)]
    unwanted = ask("greedy", 99, cancelled=True)
    modest = [ask("modest", 100 + value) for value in range(2)]
    gate.set()
    assert modest[1].result(20).constraint == held_to({"const": 101})
    place = compiled.index(json.dumps({"const": 101}))
    assert place <= 4, "an account that asks for little waited behind one that asks for much"
    assert all(future.result(20) for future in greedy)
    with pytest.raises(CancelledError):
        unwanted.result(20)
    before = len(compiled)
    ask("greedy", KEPT + 3).result(20)
    assert len(compiled) == before, "it was kept"
    ask("greedy", 0).result(20)
    assert len(compiled) == before + 1, "it was not kept: there were too many behind it"
    for account in range(ACCOUNTS + 5):
        ask(f"account {account}", 5).result(20)
    assert len(desk._compiled) == ACCOUNTS and all(len(mine) <= KEPT for mine in desk._compiled.values())
    with pytest.raises(GrammarError, match="cannot be obeyed"):
        desk.prepare("a", held_to({"not": {}}), PROMPT, lambda: False).result(20)
    desk.close()
    assert ask("greedy", 1).cancelled()


def test_kept_grammars_are_bounded_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of each of 64 accounts, at the largest schemas, would take two gigabytes; the eldest account's go first."""
    desk = ConstraintDesk(VOCAB, (EOS,))
    desk.open(chat_tokenizer_of(TOKENIZER))
    large = {"type": "object", "description": "x" * 30_000}
    monkeypatch.setattr(constraints, "KEPT_BYTES", 20 << 20)
    for account in range(12):
        desk.prepare(str(account), held_to({**large, "title": str(account)}), PROMPT, lambda: False).result(HANG)
        kept = sum(each.bytes for each in desk._compiled.values())
        assert kept <= 20 << 20 and list(desk._compiled)[-1] == str(account)
        assert kept >= min(account + 1, 4) * 4_000_000
    monkeypatch.setattr(constraints, "KEPT_BYTES", 0)
    assert desk.prepare("late", held_to(PERSON), PROMPT, lambda: False).result(HANG)
    assert list(desk._compiled) == ["late"]
    desk.close()


def test_a_panic_while_compiling_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(grammars: Grammars, schema: str, *more: Any) -> Any:
        raise Panic

    monkeypatch.setattr(Grammars, "compile", panic)
    desk = ConstraintDesk(VOCAB, (EOS,))
    desk.open(chat_tokenizer_of(TOKENIZER))
    with pytest.raises(GrammarError, match="compiling it failed"):
        desk.prepare("a", held_to(PERSON), PROMPT, lambda: False).result(20)
    assert desk.prepare("a", Constraint(BEGIN, 1.0), PROMPT, lambda: False).result(20).broken == ""


def test_a_desk_that_closes_gives_up_what_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, desk = HeldWalks(monkeypatch), ConstraintDesk(VOCAB, (EOS,))
    desk.open(chat_tokenizer_of(TOKENIZER))
    future = desk.prepare("a", held_to(PERSON), PROMPT, lambda: False)
    assert walks.begun.wait(HANG)
    desk.close()
    walks.go_on.set()
    assert isinstance(future.exception(HANG), CancelledError) and walks.count == 1


def test_what_is_tried_for_nobody_holds_up_no_schema_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, gone, desk = HeldWalks(monkeypatch), threading.Event(), ConstraintDesk(VOCAB, (EOS,))
    desk.open(chat_tokenizer_of(TOKENIZER))
    future = desk.prepare("a", held_to(PERSON), PROMPT, gone.is_set)
    behind = desk.prepare("a", Constraint(BEGIN, 1.0), PROMPT, lambda: False)
    assert walks.begun.wait(HANG)
    gone.set()
    walks.go_on.set()
    assert behind.result(HANG) and walks.count == 1
    assert isinstance(future.exception(HANG), CancelledError)
    assert desk.prepare("a", held_to(PERSON), PROMPT, lambda: False).result(HANG)
    desk.close()


def test_a_schema_given_up_at_close_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device takes its schema for a wrong one."""
    walks, posted = HeldWalks(monkeypatch), Queue[Callable[[], None]]()
    with started(json_verifier()) as direct:
        verifier, account = direct.verifier, Account("a", AccountLimits())
        connection = Connection(verifier, account, {}, posted.put, lambda: None)
        connection.receive(encode(HELLO))
        connection.receive(encode(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling(), held_to(PERSON))))
        while connection.outbox.next():
            pass
        assert walks.begun.wait(HANG)
        verifier.constraints.close()
        walks.go_on.set()
        posted.get(timeout=HANG)()
        assert walks.count == 1 and not connection.outbox.next()
