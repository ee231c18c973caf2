"""The session alone, against a tiny simulated target, under every kind of interleaving."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.session import (
    AddRows,
    Commit,
    Done,
    DraftTree,
    Patience,
    Provide,
    Reconnect,
    Resume,
    RollBack,
    Send,
    Session,
    Stall,
    WriteToken,
)
from protocol.rows import RowShape
from protocol.sampling import Sampling
from protocol.tree import ROOT, TokenTree
from protocol.wire import (
    ERR_BUSY,
    ERR_UNKNOWN,
    FINISH_EOS,
    FINISH_NONE,
    Error,
    Features,
    Open,
    Opened,
    ServerMessage,
    Verdict,
    Verify,
    Welcome,
    unpack_ids,
    unpack_tree,
)

EOS = 0
VOCAB = 5
PROMPT = [3, 1, 4]
SHAPE = RowShape(1, 2)
WELCOME = Welcome(1, "t", "d", VOCAB, 64, 8, 8)


def target(prefix: list[int]) -> int:
    """The simulated target's next token: a fixed function of the whole prefix, rarely EOS."""
    h = 0
    for token in prefix:
        h = (h * 31 + token + 7) % 9973
    return EOS if h % 17 == 0 else 1 + h % (VOCAB - 1)


def plain(prompt: list[int], limit: int) -> list[int]:
    out: list[int] = []
    while len(out) < limit and (not out or out[-1] != EOS):
        out.append(target(prompt + out))
    return out


class SimulatedVerifier:
    """What one connection answers: the rules of protocol.wire without a model."""

    def __init__(self) -> None:
        self.tokens: list[int] | None = None
        self.seq = 0

    def receive(self, message: object) -> list[ServerMessage]:
        if isinstance(message, Open):
            self.tokens, self.seq = unpack_ids(message.tokens), message.seq
            rows = bytes(SHAPE.nbytes * (len(self.tokens) - 1 - message.features_have))
            return [Opened(0, len(self.tokens), 0), Features(0, message.features_have, rows)]
        if isinstance(message, Verify):
            if self.tokens is None:
                return [Error(ERR_UNKNOWN, "open first", 0)]
            assert message.seq == self.seq + 1, "the device skipped or repeated a number"
            assert message.base_len == len(self.tokens)
            self.seq = message.seq
            tree = unpack_tree(message.tokens, message.parents)
            node, path = ROOT, []
            base = list(self.tokens)
            while True:
                token = target(self.tokens)
                self.tokens.append(token)
                child = None if token == EOS else tree.child(node, token)
                if child is None:
                    finish = FINISH_EOS if token == EOS else FINISH_NONE
                    rows = bytes(SHAPE.nbytes * (len(path) + 1))
                    return [Verdict(0, self.seq, len(base), bytes(path), token, finish, rows)]
                node = child
                path.append(node)
        return []


class World:
    """Runs a session against the simulated verifier; a random source picks what happens next."""

    def __init__(self, rng: random.Random, max_new: int = 20) -> None:
        self.rng, self.now = rng, 0.0
        self.session = Session(
            prompt=list(PROMPT), sampling=Sampling(), eos_ids=frozenset([EOS]), max_new=max_new, max_context=64,
            row_shape=SHAPE, session_id=bytes(16), patience=Patience(open=0.5, connect=0.2, silence=1.0, offline=1e9),
        )  # fmt: skip
        self.verifier: SimulatedVerifier | None = None
        self.to_device: list[ServerMessage] = []
        self.jobs: list[DraftTree | WriteToken] = []
        self.shown: list[int] = []  # what a user would see, built from the events alone
        self.verified = 0
        self.rows = 0
        self.done: str | None = None
        self.trace: list[str] = []

    def do(self, actions: list) -> None:
        for action in actions:
            self.trace.append(type(action).__name__)
            match action:
                case Send(message=message):
                    if self.verifier and self.rng.random() > self.swallow:
                        self.to_device += self.verifier.receive(message)
                case DraftTree() | WriteToken():
                    assert not self.jobs, "one drafter job at a time"
                    self.jobs.append(action)
                case AddRows(rows=rows):
                    self.rows += len(rows)
                case Commit(tokens=tokens, confirmed=confirmed):
                    assert self.shown[self.verified : self.verified + confirmed] == tokens[:confirmed]
                    if confirmed < len(tokens):
                        assert len(self.shown) == self.verified + confirmed, "provisional text is in the way"
                    self.shown[self.verified :] = tokens + self.shown[self.verified + len(tokens) :]
                    self.verified += len(tokens)
                case Provide(token=token):
                    self.shown.append(token)
                case RollBack(tokens=tokens):
                    assert self.shown[-len(tokens) :] == tokens and len(self.shown) - len(tokens) >= self.verified
                    del self.shown[-len(tokens) :]
                case Reconnect():
                    self.cut()
                case Done(reason=reason):
                    assert self.done is None
                    self.done = reason
                case Stall() | Resume():
                    pass
            assert self.shown[: self.verified] == self.session.committed[len(PROMPT) :][: self.verified]

    swallow = 0.0

    def cut(self) -> None:
        if self.verifier:
            self.verifier, self.to_device = None, []
            self.do(self.session.link_down(self.now))

    def connect(self) -> None:
        if not self.verifier:
            self.verifier, self.to_device = SimulatedVerifier(), []
            self.do(self.session.link_up(WELCOME, self.now))

    def run_job(self) -> None:
        if not self.jobs:
            return
        job = self.jobs.pop()
        if isinstance(job, WriteToken):
            right = target(job.prefix)
            token = right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)
            self.do(self.session.token_written(token, job.version, self.now))
        else:
            self.do(self.session.tree_ready(self.tree(job), job.version, self.now))

    def tree(self, job: DraftTree) -> TokenTree:
        tokens: list[int] = []
        parents: list[int] = []
        prefix, parent = list(job.prefix), ROOT
        for _ in range(min(job.depth, self.rng.randrange(4))):
            right = target(prefix)
            chosen = {right, self.rng.randrange(VOCAB)} if self.rng.random() < 0.8 else {(right + 1) % VOCAB}
            first = len(tokens)
            tokens += chosen
            parents += [parent] * len(chosen)
            if right not in chosen or right == EOS:
                break
            parent = tokens.index(right, first)
            prefix.append(right)
        return TokenTree(tuple(tokens), tuple(parents))

    def deliver(self) -> None:
        if self.to_device:
            self.do(self.session.message(self.to_device.pop(0), self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.session.tick(self.now))

    def settle(self, steps: int = 2000) -> None:
        """From here on nothing goes wrong."""
        self.swallow = 0.0
        for _ in range(steps):
            if self.done:
                return
            self.connect()
            self.deliver()
            self.run_job()
            wake = self.session.wake_at()
            if not self.to_device and not self.jobs and wake is not None:
                self.tick(max(0.0, wake - self.now))
        raise AssertionError(f"does not end: {self.trace[-20:]}")


EVENTS = ("deliver", "deliver", "job", "job", "short", "long", "cut", "connect", "swallow", "pass")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.lists(st.sampled_from(EVENTS), max_size=120))
def test_any_interleaving_ends_in_the_targets_own_text(seed: int, events: list[str]) -> None:
    world = World(random.Random(seed))
    world.do(world.session.start(world.now))
    for event in events:
        if world.done:
            break
        match event:
            case "deliver":
                world.deliver()
            case "job":
                world.run_job()
            case "short":
                world.tick(0.05)
            case "long":
                world.tick(1.5)
            case "cut":
                world.cut()
            case "connect":
                world.connect()
            case "swallow":
                world.swallow = 0.5
            case "pass":
                world.swallow = 0.0
        assert len(world.shown) <= 20
    world.settle()
    expected = plain(PROMPT, 20)
    assert world.shown == expected
    assert world.done == ("stop" if expected[-1] == EOS else "length")
    assert world.verified == len(expected)
    stats = world.session.stats
    assert stats.provisional == stats.kept + stats.rolled_back


def test_rows_reach_the_drafter_once_each() -> None:
    world = World(random.Random(1))
    world.do(world.session.start(0.0))
    world.connect()
    for _ in range(6):
        world.deliver()
        world.run_job()
    world.cut()
    world.settle()
    assert world.rows == len(world.session.committed) - 1


def test_silence_starts_writing_at_the_deadline_and_not_before() -> None:
    world = World(random.Random(2))
    world.session.patience = Patience(open=0.5)
    world.do(world.session.start(0.0))
    world.connect()
    world.swallow = 1.0  # the verifier never hears the VERIFY: a half-open link
    world.to_device.clear()
    world.run_job()
    due = world.session.wake_at()
    assert due == 2.0  # the round timer's first allowance (patience.open is shorter)
    world.tick(due - 0.01)
    assert "Stall" not in world.trace
    world.tick(0.01)
    world.run_job()
    assert world.trace[-4:] == ["Stall", "WriteToken", "Provide", "WriteToken"]


def test_a_late_verdict_is_used() -> None:
    world = World(random.Random(3))
    world.do(world.session.start(0.0))
    world.connect()
    world.run_job()
    late = list(world.to_device)
    world.to_device.clear()
    world.tick(5.0)
    for _ in range(3):
        world.run_job()
    assert world.session.provisional
    opens = world.session.stats.opens
    world.to_device = late
    while world.to_device:
        world.deliver()
    assert world.verified > 0 and world.session.stats.opens == opens


def test_without_a_link_the_answer_is_written_and_stays_unverified() -> None:
    world = World(random.Random(4), max_new=6)
    world.session.patience = Patience(connect=0.2, offline=2.0)
    world.do(world.session.start(0.0))
    world.tick(0.2)
    for _ in range(12):
        world.run_job()
    assert 0 < len(world.shown) <= 6 and world.verified == 0
    world.tick(10.0)
    assert world.done == "unverified" and world.shown == world.session.text_ids


def test_busy_verifier_is_asked_again() -> None:
    world = World(random.Random(5))
    world.do(world.session.start(0.0))
    world.connect()
    world.run_job()
    world.to_device = [Error(ERR_BUSY, "no room", 0, retry_after_ms=300)]
    world.deliver()
    opens = world.session.stats.opens
    world.tick(0.2)
    assert world.session.stats.opens == opens
    world.tick(0.2)
    assert world.session.stats.opens == opens + 1
    world.settle()
    assert world.shown == plain(PROMPT, 20)


def test_cancel_ends_at_once() -> None:
    world = World(random.Random(6))
    world.do(world.session.start(0.0))
    world.connect()
    world.do(world.session.cancel(0.1))
    assert world.done == "cancelled"
    world.run_job()
    assert world.session.wake_at() is None


def test_a_prompt_that_fills_the_context_ends_with_length() -> None:
    session = Session(
        prompt=[1] * 64, sampling=Sampling(), eos_ids=frozenset([EOS]), max_new=5, max_context=64, row_shape=SHAPE,
        session_id=bytes(16),
    )  # fmt: skip
    assert session.start(0.0) == [Done("length")]
