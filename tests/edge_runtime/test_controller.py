"""Tree or stream, against an oracle that knows the link, the target and the drafter exactly."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from edge_runtime.speed.arms import ChainArm, TreeArm
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.cost_model import CostModel
from edge_runtime.speed.explorer import EVERY, MARGIN, SHARE
from edge_runtime.speed.pace import Pace
from edge_runtime.speed.settled import Arm
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import TokenTree
from tests.edge_runtime.known_drafts import CPU, GPU, Drafts, welcome


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 2), st.floats(1, 8), st.floats(0.001, 0.2), st.floats(0.2, 5), st.booleans(), st.integers(0, 2**32))
@example(0.125, 1.75, 0.125, 1.5, False, 2523725)  # nine switches, while a tree's step stood in for a token's
@example(0.25, 1.5, 0.1875, 4.0, True, 0)  # seven, while two tokens were enough to leave a stream
def test_the_controller_ends_in_the_faster_mode(
    rtt: float, tau: float, step: float, slowdown: float, tells: bool, seed: int
) -> None:
    """Measured with noise; wherever one mode is clearly better, it is used, and nobody flaps."""
    rng, curve = random.Random(seed), CostCurve((1, 64), (step, 1.5 * step))
    pace = Pace()
    pace.linked(welcome(curve if tells else None), rtt)
    controller = Controller(pace)
    mode = controller.begin()
    tree = Drafts(0.5).tree(31)[0]
    rounds = 0
    while rounds < 80 or controller.trial:
        rounds += 1
        noise = rng.uniform(0.95, 1.05)
        if mode == "tree":
            engine = slowdown * curve.at(32) * noise
            accepted = int(tau - 1 + rng.random())
            pace.verified(tree, [], list(range(accepted)), rtt + engine, engine, 0.0)
        else:
            pace.streamed(slowdown * step * noise, slowdown * step, overdue=False)
            pace.foreseen(tree, [], list(range(int(tau - 1 + rng.random()))), 0.0)
        mode = controller.choose()
    tree_rate, stream_rate = tau / (rtt + slowdown * curve.at(32)), 1 / (slowdown * step)
    if not tells:  # the engine's time for a tree stands in for that of a token
        stream_rate_seen = 1 / (slowdown * curve.at(32))
        clear = max(tree_rate, stream_rate_seen) > 1.6 * min(tree_rate, stream_rate_seen)
        wanted = "tree" if tree_rate > stream_rate else "stream"
        assert not clear or (tree_rate > stream_rate) != (tree_rate > stream_rate_seen) or mode == wanted
    elif max(tree_rate, stream_rate) > 1.5 * min(tree_rate, stream_rate):
        assert mode == ("tree" if tree_rate > stream_rate else "stream")
    assert controller.switches <= 6


@pytest.mark.parametrize(("stream_tokens", "arm"), [(0, Arm.TREE), (100, Arm.TREE), (300, Arm.STREAM)])
def test_a_new_device_begins_with_a_stream_that_is_told_to_bring_several_tokens(stream_tokens: int, arm: Arm) -> None:
    controller = Controller(Pace())
    controller.pace.linked(structs.replace(welcome(GPU), stream_tokens=stream_tokens), 0.001)
    assert controller.begin() is arm


def test_a_switch_wants_a_margin() -> None:
    pace = Pace(CostModel(GPU, rtt=0.2))
    assert pace.rates()[Arm.TREE] * MARGIN < pace.rates()[Arm.STREAM]
    assert Controller(pace).choose() is Controller(pace).begin() is Arm.STREAM
    near = Pace(CostModel(GPU, rtt=0.01), TreeArm((0.01 + GPU.at(17)) / GPU.at(1) / ((1 + MARGIN) / 2)))
    near_tie = Controller(near)
    assert [near_tie.choose() for _ in range(5)] == [Arm.TREE] * 5


def test_an_answer_begins_with_what_usually_was_faster() -> None:
    curve = CostCurve((1, 64), (0.01, 0.01))

    def begun(usual: float) -> Controller:
        pace = Pace(tree=TreeArm(1.0, usual))
        pace.linked(welcome(curve), 0.01)  # a round takes as long as two tokens of a stream
        controller = Controller(pace, arm=Arm.STREAM)
        controller.begin()
        assert pace.tree.tau == usual
        return controller

    assert begun(1.99).arm is Arm.STREAM
    controller = begun(2.01)
    assert controller.arm is Arm.TREE and controller.switches == 1


def test_what_is_known_of_an_answer_counts_for_its_rest_and_not_for_the_next() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.008)
    controller = Controller(pace)
    tree = TokenTree.chain([1, 2, 3, 4, 5])
    for _ in range(100):
        pace.verified(tree, [], [0, 1], 0.018, 0.01, 0.0)
    for _ in range(8):
        pace.verified(tree, [], [], 0.018, 0.01, 0.0)
    assert pace.tree.tau < 1.5 < 2.2 < pace.tree.usual_tau
    controller.arm = Arm.STREAM
    controller._better = 0
    assert controller.begin(unknown=False) == "stream" and pace.tree.tau < 1.5
    assert controller.begin() == "tree" and pace.tree.tau == pace.tree.usual_tau


def test_a_trial_does_not_outlive_its_answer() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.03, 0.03))), 0.001)
    controller = Controller(pace)
    while not controller.trial:
        pace.verified(TokenTree.chain([1]), [], [0], 0.031, 0.03, 0.0)
        controller.choose()
    assert controller.choose() is Arm.STREAM
    assert controller.begin() is Arm.TREE and not controller.trial and not controller.switches
    for _ in range(2):
        pace.verified(TokenTree.chain([1]), [], [], 0.2, 0.03, 0.0)
        controller.choose()
    assert controller.arm is Arm.STREAM and not controller.trial


def test_a_token_that_was_held_up_is_no_reason_to_leave_a_stream() -> None:
    pace = Pace(CostModel(CPU, rtt=0.05), TreeArm(4.0))
    controller = Controller(pace, arm=Arm.STREAM)

    def arrive(*gaps: float) -> list[str]:
        modes = []
        for gap in gaps:
            pace.streamed(gap, CPU.at(1), overdue=False)
            modes.append(controller.choose())
        return modes

    assert arrive(0.012, 0.012, 8 * 0.012) == ["stream"] * 3
    assert (pace.stream.rate(pace.costs) or 0) * MARGIN < pace.tree.rate(
        pace.costs
    )  # so it looks, until what was behind it is there
    assert arrive(*[0.0001] * (EVERY - 2), *[0.012] * 20) == ["stream"] * (EVERY + 18)
    assert arrive(*[0.1] * 30)[-1] == "tree" and controller.switches == 1


@pytest.mark.parametrize("drafting", [0.0, 0.006])
def test_a_stream_is_left_soon_where_an_answer_is_easy(drafting: float) -> None:
    pace = Pace(CostModel(CPU, rtt=0.01, exposed=0.004), TreeArm(1.5, 1.5))
    controller = Controller(pace, arm=Arm.STREAM)

    def write(sure: float, tokens: int) -> int:
        """Tokens that a stream brought, of so many."""
        drafts = Drafts(sure)
        tree, claimed, _ = drafts.tree(16)
        for written in range(1, tokens + 1):
            pace.streamed(CPU.at(1), CPU.at(1), overdue=False)
            if controller.compares(Arm.TREE):
                pace.foreseen(tree, claimed, drafts.walk(tree), drafting)
            if controller.choose() is not Arm.STREAM:
                return written
        return tokens

    assert write(0.15, 400) == 400
    assert write(0.7, 4000) <= (800 if drafting else 100)


def converse(pace: Pace, curve: CostCurve, rtt: float, tau: float, tokens: int) -> tuple[Controller, float, int]:
    """A long answer over a link that is not as `pace` believes: (controller, seconds, trials)."""
    rng, controller, seconds, written = random.Random(1), Controller(pace), 0.0, 0
    tree, mode, trials = Drafts(0.5).tree(15)[0], controller.begin(), 0
    while written < tokens:
        before = mode
        if mode == "tree":
            engine, accepted = curve.at(16), int(tau - 1 + rng.random())
            pace.verified(tree, [], list(range(accepted)), rtt + engine, engine, 0.0)
            seconds, written = seconds + rtt + engine, written + 1 + accepted
        else:
            pace.streamed(curve.at(1), curve.at(1), overdue=False)
            seconds, written = seconds + curve.at(1), written + 1
            if controller.compares(Arm.TREE):
                pace.foreseen(tree, [], list(range(int(tau - 1 + rng.random()))), 0.0)
        mode = controller.choose()
        trials += controller.trial == EVERY
        seconds += rtt if (before, mode) == ("tree", "stream") else 0.0
    return controller, seconds, trials


def test_a_wrong_curve_is_found_out() -> None:
    """A disturbance while the verifier timed its steps: a token of a stream looks as dear as a tree of 15 nodes."""
    true, advertised = CostCurve((1, 16, 64), (0.075, 0.11, 0.25)), CostCurve((1, 16, 64), (0.11, 0.11, 0.25))
    pace = Pace()
    pace.linked(welcome(advertised), 0.06)
    assert 1 / true.at(1) > MARGIN * 2.0 / (0.06 + true.at(16)) and pace.rates()[Arm.STREAM] < pace.rates()[Arm.TREE]
    controller, _, trials = converse(pace, true, 0.06, 2.0, 600)
    assert controller.arm is Arm.STREAM and trials == controller.switches == 1


@pytest.mark.parametrize(("rtt", "tau"), [(0.001, 1.5), (0.001, 1.9), (0.03, 1.9), (0.03, 2.5), (0.1, 2.8), (0.1, 4.0)])
def test_trials_cost_little_where_trees_are_better(rtt: float, tau: float) -> None:
    curve = CostCurve((1, 16, 64), (0.075, 0.078, 0.09))
    pace = Pace(tree=TreeArm(tau, tau))
    pace.linked(welcome(curve), rtt)
    controller, seconds, trials = converse(pace, curve, rtt, tau, 2000)
    assert trials >= 2 and controller.switches == 0
    assert seconds <= (1 + 2 * SHARE) * 2000 * (rtt + curve.at(16)) / tau


@pytest.mark.parametrize("pinned", [Arm.TREE, Arm.STREAM])
def test_a_pinned_arm_stays(pinned: Arm) -> None:
    controller = Controller(Pace(CostModel(GPU, rtt=5.0)), pinned)
    assert controller.begin() == controller.choose() == pinned


def test_one_slow_draft_does_not_make_trees_slow_for_good() -> None:
    """An answer's first draft reads the prompt; what was exposed of it must not decide for a stream."""
    pace = Pace()
    pace.linked(welcome(CPU), 0.001)
    controller = Controller(pace)
    pace.verified(TokenTree.chain([1, 2, 3]), [], [0, 1], 0.016, 0.015, 0.0)
    before = pace.tree.rate(pace.costs)
    pace.waited(0.05)
    assert pace.tree.rate(pace.costs) > before / 2 and controller.choose() == "tree"


def test_a_stream_is_left_at_once_where_trees_are_pinned() -> None:
    controller = Controller(Pace(CostModel(GPU, rtt=0.001)), arm=Arm.STREAM)
    controller.pinned = Arm.TREE
    assert controller.choose() is Arm.TREE


def test_chains_are_tried_once_and_then_ever_more_rarely_where_they_are_slower() -> None:
    pace = Pace(CostModel(GPU, rtt=0.001), TreeArm(4.0, 4.0), ChainArm(ready=True))
    controller, tried = Controller(pace, Arm.TREE), list[int]()
    for step in range(400):
        pace.explorer.passed(0.03)
        if controller.choose() is Arm.CHAIN:
            tried.append(step)
            pace.chain.drafted(4, 0.02)
            pace.chain.verified(4, 3)
    assert tried[0] == 0 and 2 <= len(tried) < 8
    assert min(later - before for before, later in pairwise(tried)) >= EVERY
