"""The worst costs of sharing: others' time, rows of the pool, memory, and the harm of one faulty row."""

from __future__ import annotations

import random

import pytest

from cloud.engine import prefixes
from cloud.engine.kvpool import KVPool
from cloud.engine.prefixes import Prefixes
from cloud.engine.sessions import SessionRecord, SessionStore
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Error, Open, Verdict
from tests.cloud.by_hand import ByHand
from tests.cloud.drive import make_verifier
from tests.tiny import plain_decode, tiny_model

VOCAB = 199
MODEL = tiny_model("llama", seed=5, vocab=VOCAB, positions=1024)
TEXT = [random.Random(0).randrange(4, VOCAB) for _ in range(500)]


def by_hand(kv_tokens: int = 4096) -> ByHand:
    values = {"prefix_cache": "on", "max_model_len": 600, "max_nodes": 24, "kv_tokens": kv_tokens, "prefill_chunk": 64}
    return ByHand(make_verifier(MODEL, (), **values))


class Token(int):
    """Counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


class Shelf:
    """A store and a pool without an engine."""

    def __init__(self, most: int = 1000) -> None:
        self.pool = KVPool(1 << 20, lambda sources, targets: None)
        self.store = SessionStore(self.pool, RowShape(2, 8), most, 3600.0, keep_ended=True)
        self.prefixes = Prefixes(self.pool, self.store, Metrics())

    def session(self, tokens: list[int], used: int, account: str = "one") -> SessionRecord:
        name = len(self.store).to_bytes(16)
        request = Open(0, name, 0, b"", 0, Sampling())
        session = self.store.open(name, request, [Token(token) for token in tokens], set(), account)
        assert session is not None
        self.pool.reserve(name, len(tokens), set(), account)
        self.pool.extent(name).used = used
        return session


def test_more_accounts_than_rows_to_copy_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each account's first session goes on all the same."""
    monkeypatch.setattr(prefixes, "COPIED_ROWS", 2)
    hand = by_hand()
    for round_ in range(2):
        for index in range(3):
            hand.open(bytes([round_, index]) * 8, [*TEXT[:100], 5], f"account {index}")
        hand.finish()
    assert hand.ran == 300 and hand.metric("prefix_reuses") == 3


@pytest.mark.parametrize("other", [False, True])
def test_sessions_that_run_their_own_ends_are_told_apart_cheaply(other: bool) -> None:
    """Thirty-two sessions behind a long prompt in common, or behind prompts that differ in one token alone."""
    shelf, long = Shelf(), [*TEXT, *TEXT, *TEXT, *TEXT]
    waiting = []
    for index in range(32):
        begin = [*long[:-100], index, *long[-99:]] if other else long
        own = TEXT[:200] if other else [index] * 200
        waiting.append(shelf.session([*begin, *own], 1900 if other else 2000))
    Token.compared = 0
    assert shelf.prefixes.share(waiting) == set()
    assert Token.compared < 10 * 32 * 32  # a few of the 2,000 of each pair


def test_what_is_taken_over_takes_no_more_of_the_pool_than_its_new_owner_needs() -> None:
    hand = by_hand(640)
    hand.open(b"1" * 16, TEXT)
    hand.finish()
    hand.close(b"1" * 16)
    hand.open(b"2" * 16, [30] * 100)
    hand.finish()
    hand.open(b"3" * 16, [*TEXT[:66], 5])  # there is no room for a copy
    hand.finish()
    assert hand.ran == 499 + 99
    hand.open(b"4" * 16, [40] * 300)
    hand.finish()
    assert hand.metric("num_preemptions") == 0


def test_only_what_others_can_copy_is_kept_of_a_session_that_ends() -> None:
    shelf = Shelf()
    session = shelf.session(TEXT, 100)
    session.rows.append(bytes(session.rows.shape.nbytes * 400))
    shelf.store.forget(session.id)
    (left,) = shelf.store.of_account("one")
    assert left.tokens == TEXT[:101] and left.rows.stop == 100


def test_what_was_left_is_as_few_records_as_a_store_may_have() -> None:
    """However large the pool: each of them takes the engine's thread time. The account with most loses its oldest."""
    shelf = Shelf(4)
    for index, account in enumerate(["two", *["one"] * 9]):
        shelf.store.forget(shelf.session([index, *TEXT[:100]], 90, account).id)
    left = [session.tokens[0] for account in ("one", "two") for session in shelf.store.of_account(account)]
    assert left == [7, 8, 9, 0] and len(shelf.pool.owners()) == 4


@pytest.mark.parametrize("ended", [False, True])
def test_a_fault_of_the_device_is_not_copied_for_ever(ended: bool) -> None:
    """Who copied keys that are not numbers is told so once, and runs its own when it comes again."""
    hand = by_hand()
    hand.open(b"1" * 16, [*TEXT[:200], 5])
    hand.finish()
    for tensor in hand.verifier.engine.runner.store.keys:  # type: ignore[attr-defined]
        tensor[hand.kept(b"1" * 16)[70]] = float("nan")
    if ended:
        hand.close(b"1" * 16)
    truth = plain_decode(MODEL, [*TEXT[:200], 6], Sampling(), 1, eos_ids=())
    for name, kind in ((b"2" * 16, Error), (b"3" * 16, Verdict)):
        hand.open(name, [*TEXT[:200], 6])
        asked = hand.verify(name, 1, 201, TokenTree())
        hand.finish()
        (reply,) = asked.replies
        assert isinstance(reply, kind)
    assert isinstance(reply, Verdict) and reply.bonus == truth[0]


def test_nobody_is_evicted_for_what_fits_in_no_case() -> None:
    """A long session waits for room that one with an older claim has; sessions that are idle keep their rows."""
    pool = KVPool(1024, lambda sources, targets: None)
    for name, rows in ((b"older", 512), (b"idle", 128)):
        assert pool.reserve(name, rows, set())
        pool.extent(name).used = rows
    assert not pool.reserve(b"long", 600, {b"older"})
    assert pool.used(b"idle") == 128 and pool.evictions == 0
    assert pool.reserve(b"long", 512, {b"older"}) and pool.evictions == 1


def test_no_session_loses_its_rows_as_long_as_anything_was_left() -> None:
    """Not even to what an account with less has left: it may never come back."""
    pool = KVPool(1024, lambda sources, targets: None)
    for index, account in enumerate(["one", "one", "one", *["two"] * 5]):
        assert pool.reserve(bytes([index]), 128, set(), account)
    for index in range(3):
        pool.leave(bytes([index]), bytes([index + 100]))
    for index in range(8, 11):
        assert pool.reserve(bytes([index]), 128, set(), "two")
    assert pool.evictions == 0 and pool.owners() == [bytes([index]) for index in range(3, 11)]
