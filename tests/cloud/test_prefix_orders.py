"""Sessions that begin alike, in every order of events: exact, and each account by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engine import kvpool, prefixes, sessions
from cloud.engine.features import PackedRows
from outrider_core.protocol.rows import pack_rows, unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Opened, Verdict
from outrider_core.targets.part import Part
from tests.cloud.by_hand import Asked, ByHand
from tests.cloud.drive import make_verifier, random_tree
from tests.tiny import plain_decode, tiny_model

VOCAB, CONTEXT = 199, 64
TINY = tiny_model("llama", seed=5, vocab=VOCAB)
BASE = [random.Random(3).randrange(4, VOCAB) for _ in range(24)]
PROMPTS = [[*BASE, 5], [*BASE, 6, 7], [*BASE, 5, 9, 10], [*BASE[:12], 11, 12], BASE[:4], [20] * 15]
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=4)]
ACCOUNTS = ("one", "one", "two", "one", "two")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bounds a tenth of what they are, so that short texts meet each."""
    monkeypatch.setattr(kvpool, "GRANULE", 8)
    monkeypatch.setattr(prefixes, "COPIED_ROWS", 20)
    for module in (prefixes, sessions):
        monkeypatch.setattr(module, "LEAST_SHARED", 4)


@cache
def truth(prompt: int, sampling: int) -> list[int]:
    """Prompt and answer, farther than a session goes."""
    return PROMPTS[prompt] + plain_decode(TINY, PROMPTS[prompt], SAMPLINGS[sampling], CONTEXT, eos_ids=())


@cache
def truth_rows(prompt: int, sampling: int) -> tuple[Any, Any]:
    """Keys and values of that text's tokens, and their feature rows, from a verifier that runs nothing else."""
    verifier, text = make_verifier(TINY, ()), tuple(truth(prompt, sampling))
    verifier.engine.runner.forward([Part(0, 0, text)])
    kv = verifier.engine.runner.gather((0, 1), range(len(text)))
    packed = pack_rows(verifier.features.rows(kv, range(len(text))))
    return np.asarray(kv), unpack_rows(packed, verifier.features.shape)


def text_of(tokens: list[int]) -> tuple[int, int]:
    """Which prompt and sampling a text comes from."""
    every = ((prompt, sampling) for prompt in range(len(PROMPTS)) for sampling in range(len(SAMPLINGS)))
    return next(each for each in every if truth(*each)[: len(tokens)] == tokens)


@dataclass
class Device:
    """A device's session, and what it knows. length: tokens of its text, 0 before OPEN."""

    id: bytes
    account: str
    which: tuple[int, int] = (0, 0)
    length: int = 0
    seq: int = 0
    tree: TokenTree = field(default_factory=TokenTree)
    opening: Asked | None = None
    round: Asked | None = None
    read: int = 0

    def cancel(self) -> None:
        """As its connection does when it is lost."""
        for asked in (self.opening, self.round):
            if asked is not None:
                asked.request.cancelled = True
        self.opening = self.round = None
        self.length = 0

    def check(self) -> None:
        """Whatever a verdict commits is the target's own."""
        for reply in self.opening.replies if self.opening else ():
            assert isinstance(reply, Opened | PackedRows), reply
        if self.round is None:
            return
        for reply in self.round.replies[self.read :]:
            assert isinstance(reply, Verdict) and reply.base_len == self.length, reply
            told = [*(self.tree.tokens[node] for node in reply.accepted), reply.bonus]
            assert told == truth(*self.which)[self.length :][: len(told)]
            self.length += len(told)
        self.read = len(self.round.replies)
        if self.round.done:
            self.round = None


class World:
    """Devices of two accounts and their verifier, whose pool holds two or three of them."""

    def __init__(self) -> None:
        values = {"prefix_cache": "on", "max_model_len": CONTEXT, "kv_tokens": 96, "prefill_chunk": 9}
        self.hand = ByHand(make_verifier(TINY, (), **values))
        self.devices = [Device(bytes([index]) * 16, account) for index, account in enumerate(ACCOUNTS)]
        pool = self.hand.verifier.engine.pool
        copy, take_over = pool.copy, pool.take_over
        accounts = {device.id: device.account for device in self.devices}

        def checked_copy(source: bytes, owner: bytes, rows: int) -> None:
            assert pool.extent(source).account == accounts[owner]
            copy(source, owner, rows)

        def checked_take_over(name: bytes, owner: bytes, rows: int, size: int) -> None:
            assert pool.extent(name).account == accounts[owner]
            take_over(name, owner, rows, size)

        pool.copy, pool.take_over = checked_copy, checked_take_over  # type: ignore[method-assign]

    def event(self, name: str, index: int, number: int) -> None:
        device, hand = self.devices[index], self.hand
        if name == "open":
            device.cancel()
            device.which = number % len(PROMPTS), number // 7 % 2
            device.length = len(PROMPTS[device.which[0]]) + (number % 5 if number % 2 else 0)
            text, sampling = truth(*device.which)[: device.length], SAMPLINGS[device.which[1]]
            device.opening = hand.open(device.id, text, device.account, device.seq, sampling)
        elif name == "cancel":
            device.cancel()
        elif name == "close":
            device.cancel()
            hand.close(device.id)
        elif name == "step":
            hand.step()
        elif name == "finish":
            hand.finish()
            assert all(asked is None or asked.done for each in self.devices for asked in (each.opening, each.round))
        elif device.length and device.round is None and device.length < CONTEXT - 15:
            device.seq, device.read, device.tree = device.seq + 1, 0, TokenTree()
            if name == "generate":
                device.round = hand.generate(device.id, device.seq, device.length, number % 5 + 1, device.account)
            else:
                to_come = truth(*device.which)[device.length :][:8]
                device.tree = random_tree(random.Random(number), to_come, VOCAB, 8)
                device.round = hand.verify(device.id, device.seq, device.length, device.tree, device.account)
        for device in self.devices:
            device.check()
        self.check()

    def check(self) -> None:
        """Every row in the pool, and every feature row, is that of its own session's text."""
        verifier = self.hand.verifier
        pool, runner, shape = verifier.engine.pool, verifier.engine.runner, verifier.features.shape
        extents = sorted((pool.extent(owner).base, pool.extent(owner).size) for owner in pool.owners())
        assert all(base + size <= after for (base, size), (after, _) in pairwise(extents))
        known = {session.id for account in ACCOUNTS for session in verifier.sessions.of_account(account)}
        assert set(pool.owners()) <= known
        for account in set(ACCOUNTS):
            for session in verifier.sessions.of_account(account):
                kv, rows = truth_rows(*text_of(session.tokens))
                if used := pool.used(session.id):
                    assert used < len(session.tokens) and pool.extent(session.id).account == account
                    ours = np.asarray(runner.gather((0, 1), self.hand.kept(session.id)))
                    np.testing.assert_allclose(ours, kv[:used], rtol=0, atol=1e-9)
                stop = session.rows.stop
                assert stop < len(session.tokens)
                packed = unpack_rows(session.rows.block(0, stop), shape)
                assert (np.abs(packed - rows[:stop]) <= np.abs(rows[:stop]).max(-1, keepdims=True) / 127 + 1e-6).all()


NAMES = [*["open"] * 3, *["verify", "generate", "step"] * 2, "cancel", "close", "finish"]
events = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 4), st.integers(0, 100)), max_size=40)


@given(events)
@settings(max_examples=15, deadline=None)
def test_every_order_of_events(steps: list[tuple[str, int, int]]) -> None:
    run(steps)


@pytest.mark.slow
@given(events)
@settings(max_examples=200, deadline=None)
def test_many_orders_of_events(steps: list[tuple[str, int, int]]) -> None:
    run(steps)


def run(steps: list[tuple[str, int, int]]) -> None:
    """Raises AssertionError where a session's tokens, rows or account are not its own."""
    world = World()
    for each in steps:
        world.event(*each)
    world.event("finish", 0, 0)


def test_a_long_random_run_shares_and_evicts() -> None:
    """The same over many events, which must have met what the test above is for."""
    world, rng = World(), random.Random(1)
    for _ in range(400):
        world.event(rng.choice(NAMES), rng.randrange(5), rng.randrange(100))
    world.event("finish", 0, 0)
    assert world.hand.metric("prefix_reuses") > 20 and world.hand.metric("num_preemptions") > 10
