"""Refused requests: not sent again on that link, never larger than the limits, and no text is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from edge_runtime.session.policy import Offline, Policy
from edge_runtime.session.states import TRANSITIONS, SessionEvent, State
from edge_runtime.session.timeouts import Patience
from outrider_core.protocol.wire import (
    ERR_BOUNDS,
    ERR_BUSY,
    ERR_MALFORMED,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    Verify,
    unpack_tree,
)
from tests.edge_runtime.world import EOS, EVENTS, PROMPT, WELCOME, World, plain

LONG = 40


class Narrow(World):
    """The verifier's context is `context`; what does not fit into it would be refused."""

    def __init__(self, rng: random.Random, context: int, max_new: int = 20) -> None:
        super().__init__(rng, max_new)
        self.narrow(context)

    def narrow(self, context: int) -> None:
        self.welcome = structs.replace(WELCOME, max_context=context)

    def send(self, message: Any) -> None:
        if isinstance(message, Verify):
            levels = max(unpack_tree(message.tokens, message.parents).depths, default=0)
            assert message.base_len + levels <= self.welcome.max_context, "the verifier would refuse it"
        super().send(message)


@pytest.mark.parametrize("context", [5, 8, 12, 20])
def test_a_chain_is_no_longer_than_the_verifiers_context(context: int) -> None:
    world = Narrow(random.Random(1), context, LONG)
    world.write_alone(15)
    world.settle()
    assert world.done == "length" and world.shown == plain(PROMPT, LONG)[: context - len(PROMPT)]
    assert world.verified == len(world.shown) > 0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(4, 20), st.lists(st.sampled_from(EVENTS), max_size=80))
def test_whatever_happens_nothing_is_sent_that_does_not_fit(seed: int, context: int, events: list[str]) -> None:
    world = Narrow(random.Random(seed), context)
    world.do(world.session.start(world.now))
    for event in events:
        if world.done:
            break
        world.happen(event)
    world.settle()
    assert world.shown == plain(PROMPT, min(20, context - len(PROMPT)))


def test_text_that_no_verifier_has_room_for_is_kept_and_refused() -> None:
    """It came up with a context that ends where the prompt does."""
    world = Narrow(random.Random(2), len(PROMPT), LONG)
    world.write_alone(6)
    world.connect()
    assert world.done == "refused" and len(world.shown) == 6 and world.verified == 0


def test_the_next_verifier_may_have_more_context_than_the_last() -> None:
    world = Narrow(random.Random(3), 9, LONG)
    world.do(world.session.start(world.now))
    world.connect()
    while len(world.session.committed) < 5:
        world.deliver()
        world.run_job()
    world.cut()
    world.narrow(64)
    world.settle()
    expected = plain(PROMPT, LONG)
    assert world.shown == expected and len(expected) > 9 - len(PROMPT)


@pytest.mark.parametrize("writer", ["prefer-cloud", "prefer-device", "cloud-only"])
@pytest.mark.parametrize("code", [ERR_MALFORMED, ERR_BOUNDS])
def test_what_was_refused_is_not_asked_again(code: int, writer: Any) -> None:
    """Of this link; another verifier may take it."""
    patience = Patience(open=0.5, connect=0.2, offline=60.0)
    world = World(random.Random(4), policy=Policy(writer=writer), patience=patience)
    world.do(world.session.start(world.now))
    world.connect()
    world.refuse(code)
    assert world.session.verifier.complaint == "no"
    asked = world.session.verifier.seq
    for _ in range(200):
        if world.done:
            break
        world.run_job()
        world.tick(0.1)
    assert world.session.verifier.seq == asked and world.session.stats.opens == 1
    assert world.now < 60, "there is nothing to wait for"
    if writer == "cloud-only":
        assert world.done == "refused" and not world.shown
    else:
        assert world.done == "refused" and (len(world.shown) == 20 or world.shown[-1] == EOS)


def test_another_link_is_asked_once_more() -> None:
    world = World(random.Random(5))
    world.do(world.session.start(world.now))
    world.connect()
    world.refuse(ERR_BOUNDS)
    assert world.session.state is State.ALONE
    world.cut()
    world.settle()
    assert world.shown == plain(PROMPT, 20) and world.done in ("stop", "length")
    assert world.session.verifier.complaint == ""


def test_why_the_verifier_is_busy_is_known_until_it_answers() -> None:
    world = World(random.Random(6))
    world.do(world.session.start(world.now))
    world.connect()
    world.refuse(ERR_BUSY)
    assert world.session.verifier.complaint == "no"
    world.settle()
    assert world.session.verifier.complaint == "" and world.shown == plain(PROMPT, 20)


def test_a_verifier_whose_context_is_full_leaves_what_was_written_alone() -> None:
    world = World(random.Random(7))
    world.write_alone(5)
    world.connect()
    world.refuse(ERR_TOO_LONG)
    assert world.done == "refused" and len(world.shown) == 5


@pytest.mark.parametrize("first", [ERR_BUSY, ERR_UNKNOWN])
def test_an_open_that_is_of_no_help_is_sent_again_after_a_while(first: int) -> None:
    """What is asked behind a refused OPEN is refused too, with a code of its own: it means nothing more."""
    world = World(random.Random(5), 6)
    world.do(world.session.start(world.now))
    world.connect()
    for _ in range(20):
        world.refuse(first)
        world.refuse(ERR_UNKNOWN)
    assert world.session.stats.opens == 1 and world.session.state is State.ALONE
    world.tick(2.0)
    world.settle()
    assert world.done in ("stop", "length") and world.shown == plain(PROMPT, 6)


ENDINGS = st.sampled_from(["prefer-cloud", "prefer-device", "cloud-only"])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    ENDINGS,
    st.sampled_from(list(Offline)),
    st.booleans(),
    st.lists(st.sampled_from([*EVENTS, "reading"]), max_size=60),
)
def test_an_answer_refused_for_good_ends_as_refused_without_any_wait(
    seed: int, writer: Any, offline: Offline, helped: bool, events: list[str]
) -> None:
    """In whatever state it is refused, and however its writers pause: no clock runs before it ends."""
    world = World(
        random.Random(seed),
        policy=Policy(writer=writer, offline=offline, min_confidence=0.6),
        understudy=helped,
        sentence_ends=frozenset([2]),
    )
    world.do(world.session.start(world.now))
    for event in events:
        if not world.done:
            world.happen(event)
    world.deaf = False
    world.connect()
    if world.done or world.session.verifier.in_flight is None:
        return
    world.refuse(ERR_BOUNDS)
    world.do(world.session.proceed(world.now))  # a pause that somebody asked for is theirs to end
    for _ in range(200):
        if not world.done:
            world.run_job()
            world.run_reading()
    assert world.done == "refused" and world.session.verifier.complaint == "no"


@pytest.mark.parametrize("state", [state for state in State if state is not State.FINISHED])
def test_no_states_only_exit_is_a_time_out(state: State) -> None:
    """Nor somebody who gives the answer up: what may come from the link, or from the device, ends it or goes on."""
    leads = {event for event, after in TRANSITIONS[state].items() if set(after) - {state}}
    assert leads - {SessionEvent.TICK, SessionEvent.CANCEL, SessionEvent.STOP}
    if state not in (State.DRAFTING, State.FINISHED):
        assert {SessionEvent.MESSAGE} <= leads and State.FINISHED in TRANSITIONS[state][SessionEvent.MESSAGE]
