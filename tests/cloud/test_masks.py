"""A costly grammar holds up its own answer alone, and no text depends on how long masks take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from cloud.engine import masks as masks_module
from cloud.engine.acceptance import AcceptedPath, RootedTree, accept_paths
from cloud.engine.masks import FollowedRules, Masks
from cloud.engine.request import EngineRequest
from cloud.server.accounts import Accounts
from cloud.server.limits import Account, AccountLimits
from outrider_core.chat.grammar import GrammarMatcher
from outrider_core.protocol.constraint import Adjustment, Rules
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import FINISH_NONE, Generate, Open, Verdict, pack_ids
from tests.cloud.by_hand import Asked, ByHand
from tests.cloud.drive import started
from tests.cloud.test_structured import BEGIN, GRAMMARS, MODEL, MOST, PERSON, PROMPT, held_to, json_verifier, truth_of
from tests.cloud.test_structured import rules as rules_of
from tests.tiny import plain_decode
from tests.waiting import HANG, until

CONSTRAINT = held_to(PERSON)
GREEDY = Sampling()
#: of two sessions with such a prompt a pool of CROWDED rows has room for one
LONG, CROWDED = PROMPT * 60, 512
LONG_CONSTRAINT = replace(CONSTRAINT, begin=len(LONG))


@cache
def plain_text(long: bool = False) -> list[int]:
    return plain_decode(MODEL, LONG if long else PROMPT, GREEDY, 60 if long else 30)


@cache
def long_truth() -> list[int]:
    return plain_decode(MODEL, LONG, GREEDY, 40, rules=rules_of(LONG_CONSTRAINT))


class Waiting:
    """A matcher of PERSON whose masks wait for `let`, from the `first` one on."""

    def __init__(self, let: threading.Event, first: int = 0) -> None:
        self._matcher: GrammarMatcher = GRAMMARS.compile(CONSTRAINT.schema).matcher()
        self._let, self._first, self.made = let, first, 0
        self.threads = set[str]()

    @property
    def error(self) -> str:
        return self._matcher.error

    def allowed(self) -> NDArray[np.uint32]:
        self.threads.add(threading.current_thread().name)
        if self.made >= self._first:
            assert self._let.wait(HANG)
        self.made += 1
        return self._matcher.allowed()

    def forced(self) -> list[int]:
        return self._matcher.forced()

    def advance(self, token: int) -> None:
        self._matcher.advance(token)

    def rewind(self, tokens: Sequence[int]) -> None:
        self._matcher.rewind(tokens)


class Metered(Waiting):
    """Each mask takes one of `permits`."""

    def __init__(self, permits: threading.Semaphore) -> None:
        super().__init__(threading.Event(), MOST)
        self._permits = permits

    def allowed(self) -> NDArray[np.uint32]:
        assert self._permits.acquire(timeout=HANG)
        return super().allowed()


def ask(
    submit: Callable[..., Any],
    session: bytes,
    account: str,
    rules: Rules | None,
    count: int,
    prompt: Sequence[int] = PROMPT,
) -> Asked:
    """An answer of `count` tokens to a prompt."""
    asked = Asked(None)
    opening = Open(0, session, 0, pack_ids(list(prompt)), len(prompt), GREEDY)
    submit(EngineRequest(session, opening, lambda *_: None, tokens=list(prompt), rules=rules, account=account))
    submit(EngineRequest(session, Generate(0, 1, len(prompt), count), asked.take, account=account))
    return asked


@pytest.mark.parametrize("first", [0, 1, 5])
def test_others_are_served_while_a_mask_is_made(first: int) -> None:
    let = threading.Event()
    costly, quick = Waiting(let, first), Waiting(threading.Event(), MOST + 1)
    with started(json_verifier(accounts=Accounts())) as direct:
        verifier, direct.verifier.engine.mask_seconds = direct.verifier, 0.02
        slow = ask(verifier.submit, bytes(15) + b"s", "hostile", Rules(CONSTRAINT, costly), MOST)
        assert until(lambda: costly.threads and costly.made >= first)
        plain = ask(verifier.submit, bytes(15) + b"p", "other", None, 30)
        held = ask(verifier.submit, bytes(15) + b"h", "third", Rules(CONSTRAINT, quick), MOST)
        assert until(lambda: plain.done and held.done)
        assert not slow.done and verifier.batcher.alive and len(slow.drawn) == first
        let.set()
        assert until(lambda: slow.done)
    assert plain.drawn == plain_text()
    assert slow.drawn == held.drawn == truth_of(CONSTRAINT, GREEDY)
    assert not any("engine" in name for name in costly.threads | quick.threads)


@pytest.mark.parametrize("others", [0, 2])
def test_an_engine_that_can_run_nothing_before_a_mask_sleeps(others: int) -> None:
    """The others have no room beside it."""
    let = threading.Event()
    costly = Waiting(let)
    with started(json_verifier(kv_tokens=CROWDED)) as direct:
        submit, direct.verifier.engine.mask_seconds = direct.verifier.submit, 0.02
        asked = ask(submit, bytes(16), "", Rules(LONG_CONSTRAINT, costly), len(long_truth()), LONG)
        batcher, steps = direct.verifier.batcher, 0
        assert until(lambda: costly.threads)
        beside = [ask(submit, bytes(15) + bytes([1 + i]), f"{i}", None, 60, LONG) for i in range(others)]
        schedule, idle = batcher.scheduler.schedule, threading.Event()

        def counted(*given: Any) -> Any:
            nonlocal steps
            steps += 1
            segments = schedule(*given)
            if len(given[0]) == 1 + others and not segments:
                idle.set()
            return segments

        batcher.scheduler.schedule = counted  # type: ignore[method-assign]
        assert idle.wait(HANG)
        steps = 0
        let.wait(0.3)
        assert steps < 5 and batcher.alive and not asked.drawn
        let.set()
        assert until(lambda: asked.done and all(each.done for each in beside))
    assert asked.drawn == long_truth()
    assert all(each.drawn == plain_text(long=True) for each in beside)


@pytest.mark.parametrize("sibling", [False, True])
def test_a_session_that_waits_for_masks_loses_no_rows_to_a_younger_claim(
    sibling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns each mask takes, no more runs and no more is evicted than where none takes any.

    sibling: an idle session has rows that the younger one wants to copy.
    """
    monkeypatch.setattr(masks_module, "COSTLY_SECONDS", -1.0)

    def spent(turns: int) -> tuple[int, int]:
        """Tokens run and sessions evicted where each mask takes so many turns."""
        permits = threading.Semaphore(0)
        verifier = json_verifier(accounts=Accounts(), kv_tokens=CROWDED, lookup="off", prefix_cache="on")
        hand, verifier.engine.mask_seconds = ByHand(verifier), 0.0
        admit, batcher = verifier.batcher.requests.admit, verifier.batcher
        if sibling:
            ask(admit, bytes(15) + b"i", "other", None, 1, LONG[:100])
            hand.finish()
        slow = ask(admit, bytes(16), "slow", Rules(LONG_CONSTRAINT, Metered(permits)), len(long_truth()), LONG)
        session = verifier.sessions.get(bytes(16))
        assert session is not None
        while session.followed is None or not session.followed.held:
            batcher.step()
        followed = session.followed
        plain = ask(admit, bytes(15) + b"p", "other", None, 60, LONG)
        while batcher.requests:
            if followed.held:
                for _ in range(turns):
                    batcher.step()
                permits.release()
                assert until(lambda: not followed.held)
            batcher.step()
        verifier.engine.masks.close()
        assert slow.drawn == long_truth() and plain.drawn == plain_text(long=True)
        return hand.ran, verifier.engine.pool.evictions

    tokens, evictions = spent(0)
    assert tokens < 7 * len(LONG) and evictions < 8
    for turns in (1, 40):
        more_tokens, more_evictions = spent(turns)
        assert more_tokens <= tokens and more_evictions <= evictions


class Late(FollowedRules):
    """Of a text of `at` tokens the mask is not waited for, of others it is."""

    at = -1

    def take(self, text: Sequence[int], until: float) -> Adjustment | None:
        return super().take(text, 0.0 if len(text) == self.at else until)


@pytest.mark.parametrize("depth", range(4))
def test_a_path_ends_where_a_mask_is_late_and_goes_on_from_there(depth: int) -> None:
    """At its root nothing comes of the step; deeper the token before is the step's last."""
    truth, let, masks = truth_of(CONSTRAINT, GREEDY), threading.Event(), Masks()
    tree = TokenTree.chain(truth[:4])
    rules = Late(Rules(CONSTRAINT, Waiting(let, depth)), "", masks)
    rules.at = BEGIN + depth
    draft = RootedTree(tree, GREEDY, BEGIN, 0, rules, PROMPT)

    def draw(rows: Sequence[int], _: Any, __: Any, adjustments: Sequence[Any]) -> list[int]:
        for row, adjustment in zip(rows, adjustments, strict=True):
            mask = adjustment.mask(400)
            assert mask is not None and mask[truth[row]]
        return [truth[row] for row in rows]

    made = threading.Event()
    masks.woken = made.set
    [path] = accept_paths(draw, [draft], (), 400)
    assert path == (AcceptedPath(list(range(depth - 1)), truth[depth - 1], FINISH_NONE) if depth else None)
    assert rules.held
    let.set()
    assert until(lambda: not rules.held) and made.wait(HANG)
    rules.at = -1
    [path] = accept_paths(draw, [draft], (), 400)
    assert path == AcceptedPath([0, 1, 2, 3], truth[4], FINISH_NONE)
    masks.close()


def test_texts_are_the_same_however_masks_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is waited for within a step, and every one counts as costly."""
    monkeypatch.setattr(masks_module, "COSTLY_SECONDS", -1.0)
    truth, verifier = truth_of(CONSTRAINT, GREEDY), json_verifier()
    hand, verifier.engine.mask_seconds = ByHand(verifier), 0.0
    open_rules = Rules(CONSTRAINT, GRAMMARS.compile(CONSTRAINT.schema).matcher())
    hand.submit(bytes(16), Open(0, bytes(16), 0, pack_ids(PROMPT), 0, GREEDY), tokens=list(PROMPT), rules=open_rules)
    hand.finish()
    text, seq = list[int](), 0
    while len(text) < len(truth):
        seq += 1
        tree = TokenTree.chain([each for each in truth[len(text) : len(text) + 3] if each != truth[-1]])
        asked = hand.verify(bytes(16), seq, BEGIN + len(text), tree)
        hand.finish()
        [verdict] = [reply for reply in asked.replies if isinstance(reply, Verdict)]
        text += [tree.tokens[node] for node in verdict.accepted] + [verdict.bonus]
    assert text == truth
    verifier.engine.masks.close()


def test_a_panic_in_a_grammar_fails_its_own_answer_alone() -> None:
    class Panic(BaseException):
        """As a panic in Rust reaches Python."""

    class Panicking(Waiting):
        def allowed(self) -> NDArray[np.uint32]:
            raise Panic

    with started(json_verifier()) as direct:
        broken = ask(direct.verifier.submit, bytes(15) + b"b", "a", Rules(CONSTRAINT, Panicking(threading.Event())), 9)
        plain = ask(direct.verifier.submit, bytes(15) + b"p", "b", None, 30)
        assert until(lambda: plain.done and broken.done)
        assert direct.verifier.alive
    assert plain.drawn == plain_text() and not broken.drawn


def test_nothing_is_given_back_of_what_a_schema_is_charged() -> None:
    account = Account("a", AccountLimits(prefill=10.0), lambda: 0.0)
    with pytest.raises(ValueError, match="charge"):
        account.spend(prefill=-1)
    assert account.charge(prefill=100) == 0.0 and account.charge(prefill=0) > 0
