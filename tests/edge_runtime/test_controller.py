"""Tree or stream, against an oracle that knows the link, the target and the drafter exactly."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from edge_runtime.speed.arms import Arm, ChainArm, TreeArm
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.cost_model import CostModel
from edge_runtime.speed.explorer import EVERY, MARGIN, SHARE
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import TokenTree
from tests.edge_runtime.known_drafts import CPU, GPU, Drafts, welcome


def chosen(controller: Controller) -> Arm:
    """The arm in use, whatever is tried for a moment."""
    return controller._home if controller.trial else controller.arm


def changes(arms: Iterable[Arm]) -> int:
    return sum(before is not after for before, after in pairwise(arms))


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 2), st.floats(1, 8), st.floats(0.001, 0.2), st.floats(0.2, 5), st.booleans(), st.integers(0, 2**32))
@example(0.125, 1.75, 0.125, 1.5, False, 2523725)  # nine switches, while a tree's step stood in for a token's
@example(0.25, 1.5, 0.1875, 4.0, True, 0)  # seven, while two tokens were enough to leave a stream
def test_the_controller_ends_in_the_faster_mode(
    rtt: float, tau: float, step: float, slowdown: float, tells: bool, seed: int
) -> None:
    """Measured with noise; wherever one mode is clearly better, it is used, and nobody flaps."""
    rng, curve = random.Random(seed), CostCurve((1, 64), (step, 1.5 * step))
    controller = Controller()
    controller.linked(welcome(curve if tells else None), rtt)
    mode = controller.begin()
    tree, arms = Drafts(0.5).tree(31)[0], [Arm.TREE, mode]
    while len(arms) <= 81 or controller.trial:
        noise = rng.uniform(0.95, 1.05)
        if mode == "tree":
            engine = slowdown * curve.at(32) * noise
            accepted = int(tau - 1 + rng.random())
            controller.verified(tree, [], list(range(accepted)), rtt + engine, engine)
        else:
            controller.streamed(slowdown * step * noise, slowdown * step)
            controller.foreseen(tree, [], list(range(int(tau - 1 + rng.random()))), 0.0)
        mode = controller.choose()
        arms.append(chosen(controller))
    tree_rate, stream_rate = tau / (rtt + slowdown * curve.at(32)), 1 / (slowdown * step)
    if not tells:  # the engine's time for a tree stands in for that of a token
        stream_rate_seen = 1 / (slowdown * curve.at(32))
        clear = max(tree_rate, stream_rate_seen) > 1.6 * min(tree_rate, stream_rate_seen)
        wanted = "tree" if tree_rate > stream_rate else "stream"
        assert not clear or (tree_rate > stream_rate) != (tree_rate > stream_rate_seen) or mode == wanted
    elif max(tree_rate, stream_rate) > 1.5 * min(tree_rate, stream_rate):
        assert mode == ("tree" if tree_rate > stream_rate else "stream")
    assert changes(arms) <= 6


@pytest.mark.parametrize(("stream_tokens", "arm"), [(0, Arm.TREE), (100, Arm.TREE), (300, Arm.STREAM)])
def test_a_new_device_begins_with_a_stream_that_is_told_to_bring_several_tokens(stream_tokens: int, arm: Arm) -> None:
    controller = Controller()
    controller.linked(structs.replace(welcome(GPU), stream_tokens=stream_tokens), 0.001)
    assert controller.begin() is arm


def test_a_switch_wants_a_margin() -> None:
    controller = Controller(CostModel(GPU, rtt=0.2))
    assert controller.rates()[Arm.TREE] * MARGIN < controller.rates()[Arm.STREAM]
    assert controller.choose() is Arm.STREAM and Controller(CostModel(GPU, rtt=0.2)).begin() is Arm.STREAM
    near_tie = Controller(CostModel(GPU, rtt=0.01), TreeArm((0.01 + GPU.at(17)) / GPU.at(1) / ((1 + MARGIN) / 2)))
    assert [near_tie.choose() for _ in range(5)] == [Arm.TREE] * 5


def test_an_answer_begins_with_what_usually_was_faster() -> None:
    curve = CostCurve((1, 64), (0.01, 0.01))

    def begun(usual: float) -> Controller:
        controller = Controller(tree=TreeArm(1.0, usual))
        controller.linked(welcome(curve), 0.01)  # a round takes as long as two tokens of a stream
        controller.arm = Arm.STREAM
        controller.begin()
        assert controller.tree.tau == usual
        return controller

    assert begun(1.99).arm is Arm.STREAM
    controller = begun(2.01)
    assert controller.arm is Arm.TREE


def test_what_is_known_of_an_answer_counts_for_its_rest_and_not_for_the_next() -> None:
    controller = Controller()
    controller.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.008)
    tree = TokenTree.chain([1, 2, 3, 4, 5])
    for _ in range(100):
        controller.verified(tree, [], [0, 1], 0.018, 0.01)
    for _ in range(8):
        controller.verified(tree, [], [], 0.018, 0.01)
    assert controller.tree.tau < 1.5 < 2.2 < controller.tree.usual_tau
    controller.arm = Arm.STREAM
    controller._better = 0
    assert controller.begin(unknown=False) == "stream" and controller.tree.tau < 1.5
    assert controller.begin() == "tree" and controller.tree.tau == controller.tree.usual_tau


def test_a_trial_does_not_outlive_its_answer() -> None:
    controller = Controller()
    controller.linked(welcome(CostCurve((1, 64), (0.03, 0.03))), 0.001)
    while not controller.trial:
        controller.verified(TokenTree.chain([1]), [], [0], 0.031, 0.03)
        controller.choose()
    assert controller.choose() is Arm.STREAM
    assert controller.begin() is Arm.TREE and not controller.trial
    for _ in range(3):
        controller.verified(TokenTree.chain([1]), [], [], 0.2, 0.03)
        controller.choose()
    assert controller.arm is Arm.STREAM and not controller.trial


def test_a_token_that_was_held_up_is_no_reason_to_leave_a_stream() -> None:
    controller = Controller(CostModel(CPU, rtt=0.05), TreeArm(4.0))
    controller.arm = Arm.STREAM

    def arrive(*gaps: float) -> list[Arm]:
        modes = []
        for gap in gaps:
            controller.streamed(gap, CPU.at(1))
            modes.append(controller.choose())
        return modes

    assert arrive(0.012, 0.012, 8 * 0.012) == ["stream"] * 3
    rates = controller.rates()
    assert rates[Arm.STREAM] * MARGIN < rates[Arm.TREE], "so it looks, until what was behind it is there"
    assert arrive(*[0.0001] * (EVERY - 2), *[0.012] * 20) == ["stream"] * (EVERY + 18)
    modes = arrive(*[0.1] * 30)
    assert modes[-1] == "tree" and changes(modes) == 1


@pytest.mark.parametrize("drafting", [0.0, 0.006])
def test_a_stream_is_left_soon_where_an_answer_is_easy(drafting: float) -> None:
    controller = Controller(CostModel(CPU, rtt=0.01, exposed=0.004), TreeArm(1.5, 1.5))
    controller.arm = Arm.STREAM

    def write(sure: float, tokens: int) -> int:
        """Tokens that a stream brought, of so many."""
        drafts = Drafts(sure)
        tree, claimed, _ = drafts.tree(16)
        for written in range(1, tokens + 1):
            controller.streamed(CPU.at(1), CPU.at(1))
            if controller.compares(Arm.TREE):
                controller.foreseen(tree, claimed, drafts.walk(tree), drafting)
            if controller.choose() is not Arm.STREAM:
                return written
        return tokens

    assert write(0.15, 400) == 400
    assert write(0.7, 4000) <= (800 if drafting else 100)


def converse(controller: Controller, curve: CostCurve, rtt: float, tau: float, tokens: int) -> tuple[float, int, int]:
    """A long answer over a link that is not as `controller` believes: (seconds, trials, changes of the arm)."""
    rng, seconds, written = random.Random(1), 0.0, 0
    tree, mode, trials = Drafts(0.5).tree(15)[0], controller.begin(), 0
    arms = [Arm.TREE, mode]
    while written < tokens:
        before = mode
        if mode == "tree":
            engine, accepted = curve.at(16), int(tau - 1 + rng.random())
            controller.verified(tree, [], list(range(accepted)), rtt + engine, engine)
            seconds, written = seconds + rtt + engine, written + 1 + accepted
        else:
            controller.streamed(curve.at(1), curve.at(1))
            seconds, written = seconds + curve.at(1), written + 1
            if controller.compares(Arm.TREE):
                controller.foreseen(tree, [], list(range(int(tau - 1 + rng.random()))), 0.0)
        mode = controller.choose()
        trials += controller.trial == EVERY
        arms.append(chosen(controller))
        seconds += rtt if (before, mode) == ("tree", "stream") else 0.0
    return seconds, trials, changes(arms)


def test_a_wrong_curve_is_found_out() -> None:
    """A disturbance while the verifier timed its steps: a token of a stream looks as dear as a tree of 15 nodes."""
    true, advertised = CostCurve((1, 16, 64), (0.075, 0.11, 0.25)), CostCurve((1, 16, 64), (0.11, 0.11, 0.25))
    controller = Controller()
    controller.linked(welcome(advertised), 0.06)
    assert 1 / true.at(1) > MARGIN * 2.0 / (0.06 + true.at(16))
    assert controller.rates()[Arm.STREAM] < controller.rates()[Arm.TREE]
    _, trials, changed = converse(controller, true, 0.06, 2.0, 600)
    assert controller.arm is Arm.STREAM and trials == changed == 1


@pytest.mark.parametrize(("rtt", "tau"), [(0.001, 1.5), (0.001, 1.9), (0.03, 1.9), (0.03, 2.5), (0.1, 2.8), (0.1, 4.0)])
def test_trials_cost_little_where_trees_are_better(rtt: float, tau: float) -> None:
    curve = CostCurve((1, 16, 64), (0.075, 0.078, 0.09))
    controller = Controller(tree=TreeArm(tau, tau))
    controller.linked(welcome(curve), rtt)
    seconds, trials, changed = converse(controller, curve, rtt, tau, 2000)
    assert trials >= 2 and not changed
    assert seconds <= (1 + 2 * SHARE) * 2000 * (rtt + curve.at(16)) / tau


@pytest.mark.parametrize("pinned", [Arm.TREE, Arm.STREAM])
def test_a_pinned_arm_stays(pinned: Arm) -> None:
    controller = Controller(CostModel(GPU, rtt=5.0), pinned=pinned)
    assert controller.begin() == controller.choose() == pinned


def test_one_slow_draft_does_not_make_trees_slow_for_good() -> None:
    """An answer's first draft reads the prompt; what was exposed of it must not decide for a stream."""
    controller = Controller()
    controller.linked(welcome(CPU), 0.001)
    controller.verified(TokenTree.chain([1, 2, 3]), [], [0, 1], 0.016, 0.015)
    before = controller.tree.rate(controller.costs)
    controller.waited(0.05)
    assert controller.tree.rate(controller.costs) > before / 2 and controller.choose() == "tree"


def test_a_stream_is_left_at_once_where_trees_are_pinned() -> None:
    controller = Controller(CostModel(GPU, rtt=0.001), arm=Arm.STREAM)
    controller.pinned = Arm.TREE
    assert controller.choose() is Arm.TREE


def test_chains_are_tried_once_and_then_ever_more_rarely_where_they_are_slower() -> None:
    controller = Controller(CostModel(GPU, rtt=0.001), TreeArm(4.0, 4.0), ChainArm(ready=True))
    controller.pinned, tried = Arm.TREE, list[int]()
    for step in range(400):
        controller.explorer.passed(0.03)
        if controller.choose() is Arm.CHAIN:
            tried.append(step)
            controller.chain.drafted(4, 0.02)
            controller.chain.verified(4, 3)
    assert tried[0] == 0 and 2 <= len(tried) < 8
    assert min(later - before for before, later in pairwise(tried)) >= EVERY
