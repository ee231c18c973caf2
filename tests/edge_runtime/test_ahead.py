"""Drafting ahead of a verdict: tried, measured, and kept where rounds become shorter."""

from __future__ import annotations

import pytest

from edge_runtime.speed.ahead import TRIAL_ROUNDS
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.explorer import EVERY
from outrider_core.protocol.tree import TokenTree
from tests.edge_runtime.known_drafts import CPU, GPU, welcome


def rounds(controller: Controller, count: int, slowed: float, delayed: float = 0.0) -> list[bool]:
    """Rounds on one machine: whether each drafted ahead, which slows the step and `delayed` the way."""
    tree, was = TokenTree.chain([1, 2, 3]), list[bool]()
    for _ in range(count):
        was.append(ahead := controller.ahead.now)
        engine = CPU.at(4) * (slowed if ahead else 1.0)
        controller.verified(tree, [], [0], engine + 0.001 + (delayed if ahead else 0.0), engine)
        controller.waited(0.004 if ahead else 0.01)
    return was


def machine() -> Controller:
    controller = Controller()
    controller.linked(welcome(CPU), 0.001)
    return controller


@pytest.mark.parametrize(("slowed", "pays"), [(1.0, True), (2.0, False)])
def test_drafting_ahead_is_tried_and_kept_where_rounds_become_shorter(slowed: float, pays: bool) -> None:
    controller = machine()
    was = rounds(controller, 600, slowed)
    assert was[: EVERY + TRIAL_ROUNDS] == [False] * EVERY + [True] * TRIAL_ROUNDS
    assert was[EVERY + TRIAL_ROUNDS :].count(pays) > 0.9 * len(was[EVERY + TRIAL_ROUNDS :])
    assert controller.costs.slowdown == pytest.approx(1.0)  # trials leave no trace
    assert controller.costs.exposed == pytest.approx(0.004 if pays else 0.01)


def test_drafting_ahead_is_given_up_where_it_no_longer_pays() -> None:
    controller = machine()
    rounds(controller, 100, 1.0)
    assert controller.ahead.on
    rounds(controller, 200, 2.0)
    assert not controller.ahead.on
    assert controller.costs.slowdown == pytest.approx(1.0, rel=0.05)


def test_what_drafting_ahead_delays_outside_of_the_engine_counts() -> None:
    controller = machine()
    was = rounds(controller, 300, 1.0, delayed=0.05)
    assert was.count(True) < 0.1 * len(was)
    assert controller.costs.rtt == pytest.approx(0.001)


def test_a_trial_that_a_stream_interrupts_begins_again() -> None:
    """What was drafted ahead is thrown away then, so the next round says nothing of it."""
    controller = machine()
    rounds(controller, EVERY + 1, 1.0)
    assert controller.ahead.trial
    controller.streamed(0.02, 0.012)
    controller.waited(0.25)
    assert not controller.ahead.trial
    assert rounds(controller, 3 * EVERY, 1.0).count(True) >= EVERY


def test_a_trial_ends_where_the_verifier_says_nothing_of_its_engine() -> None:
    controller = machine()
    rounds(controller, EVERY + 1, 1.0)
    controller.verified(TokenTree.chain([1, 2, 3]), [], [0], 0.02, 0.0)
    controller.waited(0.004)
    assert not controller.ahead.trial


def test_what_is_fixed_is_not_tried() -> None:
    controller = machine()
    controller.ahead.fixed = True
    assert not any(rounds(controller, 100, 1.0))


def test_another_verifier_begins_anew() -> None:
    controller = machine()
    rounds(controller, 100, 1.0)
    controller.linked(welcome(CPU), 0.002)
    assert controller.ahead.on  # it is the same one
    controller.linked(welcome(GPU), 0.002)
    assert not controller.ahead.on


def test_a_verifier_that_claims_more_time_than_passed_does_no_harm() -> None:
    controller = machine()
    for _ in range(4 * EVERY):
        controller.verified(TokenTree.chain([1]), [], [0], 0.05, 9.0)
        controller.waited(0.0)
    assert all(seconds > 0 for seconds in controller.ahead.rounds.values())
    assert controller.costs.rtt is not None and controller.costs.rtt >= 0
