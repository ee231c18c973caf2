"""Tree or stream, against an oracle that knows the link, the target and the drafter exactly."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_runtime.speed.controller import Controller, Mode
from edge_runtime.speed.pace import Pace
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import TokenTree
from tests.edge_runtime.known_drafts import CONFIG, CPU, GPU, Drafts, welcome


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


def test_a_switch_wants_a_margin_twice_and_a_new_answer_none() -> None:
    pace = Pace(curve=GPU, rtt=0.2)
    controller = Controller(pace)
    assert pace.tree_rate() * CONFIG.margin < (pace.stream_rate() or 0)
    modes = [controller.choose() for _ in range(CONFIG.rounds_to_leave_trees)]
    assert modes == ["tree"] * (CONFIG.rounds_to_leave_trees - 1) + ["stream"]
    assert Controller(pace).begin() == "stream"
    close = Pace(curve=GPU, rtt=0.01, exposed=0.0, tau=(0.01 + GPU.at(17)) / GPU.at(1) / ((1 + CONFIG.margin) / 2))
    near_tie = Controller(close)
    assert [near_tie.choose() for _ in range(9)] == ["tree"] * 9


def test_an_answer_begins_in_trees_unless_a_stream_is_usually_faster() -> None:
    curve = CostCurve((1, 64), (0.01, 0.01))

    def begun(usual: float) -> Controller:
        pace = Pace(usual_tau=usual, tau=1.0)
        pace.linked(welcome(curve), 0.01)  # a round takes as long as two tokens of a stream
        controller = Controller(pace, mode=Mode.STREAM)
        controller.begin()
        assert pace.tau == usual
        return controller

    assert begun(1.99 / CONFIG.margin).mode == "stream"
    controller = begun(2.01 / CONFIG.margin)
    assert controller.mode == "tree" and controller.switches == 1


def foreseeing(tokens: int, steps: int, pace: Pace) -> None:
    """A stream whose steps of 10 ms bring so many tokens each."""
    for _ in range(steps):
        pace.streamed(0.01, 0.01, overdue=False)
        for _ in range(tokens - 1):
            pace.streamed(0.0, 0.0, overdue=False, same_step=True)


def test_an_answer_begins_as_a_stream_that_is_nearly_as_fast_where_each_has_a_rate_of_its_own() -> None:
    """Beside a stream the device learns what trees would bring; beside trees it learns nothing of a stream."""
    curve = CostCurve((1, 64), (0.01, 0.01))

    def begun(tokens: int, share: float) -> str:
        pace = Pace()
        pace.linked(welcome(curve), 0.01)
        foreseeing(tokens, 400, pace)
        pace.usual_tau = 2 * tokens / share  # a round takes two steps: the stream has that share of the trees' rate
        return Controller(pace).begin()

    assert begun(1, 0.9) == "tree" and begun(1, 1.1) == "stream"
    assert begun(2, CONFIG.worth_beginning - 0.05) == "tree"
    assert begun(2, CONFIG.worth_beginning + 0.05) == begun(2, 1.1) == "stream"


def test_what_is_known_of_an_answer_counts_for_its_rest_and_not_for_the_next() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.01)
    controller = Controller(pace)
    tree = TokenTree.chain([1, 2, 3, 4, 5])
    for _ in range(100):
        pace.verified(tree, [], [0, 1], 0.02, 0.01, 0.0)
    for _ in range(8):
        pace.verified(tree, [], [], 0.02, 0.01, 0.0)
    assert pace.tau < 1.5 < 2.2 < pace.usual_tau
    controller.mode = Mode.STREAM
    controller._better = 0
    assert controller.begin(unknown=False) == "stream" and pace.tau < 1.5
    assert controller.begin() == "tree" and pace.tau == pace.usual_tau


def test_what_must_be_read_before_a_first_tree_is_weighed_against_an_answers_usual_length() -> None:
    pace = Pace(usual_tau=3.0)
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.005)  # 200 tokens a second in trees, 100 in a stream
    controller = Controller(pace)
    tree = TokenTree.chain([1, 2])

    def answer(rounds: int) -> str:
        for _ in range(rounds):
            pace.verified(tree, [], [0, 1], 0.015, 0.01, 0.0)
        return controller.begin()

    assert answer(4) == "tree" and pace.usual_length == 12
    pace.prepared(0.1)
    assert pace.usual_tree_rate() == pytest.approx(1 / (0.005 + 0.1 / 12))
    assert answer(0) == "stream"  # 12 tokens do not pay for it
    for _ in range(20):
        answer(100)
    assert answer(100) == "tree"  # 300 do
    pace.prepared(5.0)
    begun = [controller.begin() for _ in range(60)]
    assert begun[0] == "stream" and begun[-1] == "tree"  # it is tried again at some time
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.011))), 0.005)
    assert pace.reading == 0.0


def test_a_trial_does_not_outlive_its_answer() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.03, 0.03))), 0.001)
    controller = Controller(pace)
    while not controller.trial:
        pace.verified(TokenTree.chain([1]), [], [0], 0.031, 0.03, 0.0)
        controller.choose()
    assert controller.choose() == "stream"
    assert controller.begin() == "tree" and not controller.trial and not controller.switches
    for _ in range(CONFIG.rounds_to_leave_trees):
        pace.verified(TokenTree.chain([1]), [], [], 0.2, 0.03, 0.0)
        controller.choose()
    assert controller.mode == "stream" and not controller.trial


def test_a_token_that_was_held_up_is_no_reason_to_leave_a_stream() -> None:
    pace = Pace(curve=CPU, rtt=0.05, tau=4.0)
    controller = Controller(pace, mode=Mode.STREAM)

    def arrive(*gaps: float) -> list[str]:
        modes = []
        for gap in gaps:
            pace.streamed(gap, CPU.at(1), overdue=False)
            modes.append(controller.choose())
        return modes

    assert arrive(0.012, 0.012, 8 * 0.012) == ["stream"] * 3
    assert (
        pace.stream_rate() or 0
    ) * CONFIG.margin < pace.tree_rate()  # so it looks, until what was behind it is there
    assert arrive(*[0.0001] * (CONFIG.tokens_to_leave_stream - 2), *[0.012] * 20) == ["stream"] * (
        CONFIG.tokens_to_leave_stream + 18
    )
    assert arrive(*[0.1] * 30)[-1] == "tree" and controller.switches == 1


@pytest.mark.parametrize("drafting", [0.0, 0.1])
def test_a_stream_is_left_soon_where_an_answer_is_easy(drafting: float) -> None:
    pace = Pace(curve=CPU, rtt=0.01, exposed=0.004)
    controller = Controller(pace, mode=Mode.STREAM)

    def write(sure: float, tokens: int) -> int:
        """Tokens that a stream brought, of so many."""
        drafts = Drafts(sure)
        tree, claimed, _ = drafts.tree(16)
        for written in range(1, tokens + 1):
            pace.streamed(CPU.at(1), CPU.at(1), overdue=False)
            if written % pace.compare_every(written) == 0:
                pace.foreseen(tree, claimed, drafts.walk(tree), drafting)
            if controller.choose() == "tree":
                return written
        return tokens

    assert write(0.15, 400) == 400
    assert write(0.7, 400) <= 24


def converse(pace: Pace, curve: CostCurve, rtt: float, tau: float, tokens: int) -> tuple[Controller, float]:
    """A long answer over a link that is not as `pace` believes: (controller, seconds)."""
    rng, controller, seconds, written = random.Random(1), Controller(pace), 0.0, 0
    tree, mode = Drafts(0.5).tree(15)[0], controller.begin()
    while written < tokens:
        before = mode
        if mode == "tree":
            engine, accepted = curve.at(16), int(tau - 1 + rng.random())
            pace.verified(tree, [], list(range(accepted)), rtt + engine, engine, 0.0)
            seconds, written = seconds + rtt + engine, written + 1 + accepted
        else:
            pace.streamed(curve.at(1), curve.at(1), overdue=False)
            seconds, written = seconds + curve.at(1), written + 1
            if written % CONFIG.compare_every == 0:
                pace.foreseen(tree, [], list(range(int(tau - 1 + rng.random()))), 0.0)
        mode = controller.choose()
        seconds += rtt if (before, mode) == ("tree", "stream") else 0.0
    return controller, seconds


def test_a_wrong_curve_is_found_out() -> None:
    """A disturbance while the verifier timed its steps: a token of a stream looks as dear as a tree of 15 nodes."""
    true, advertised = CostCurve((1, 16, 64), (0.075, 0.11, 0.25)), CostCurve((1, 16, 64), (0.11, 0.11, 0.25))
    pace = Pace()
    pace.linked(welcome(advertised), 0.06)
    assert 1 / true.at(1) > CONFIG.margin * 2.0 / (0.06 + true.at(16)) and (pace.stream_rate() or 0) < pace.tree_rate()
    controller, _ = converse(pace, true, 0.06, 2.0, 300)
    assert controller.mode == "stream" and not controller.trial
    assert controller.trials == controller.switches == 1


@pytest.mark.parametrize(("rtt", "tau"), [(0.001, 1.5), (0.001, 1.9), (0.03, 1.9), (0.03, 2.5), (0.1, 2.8), (0.1, 4.0)])
def test_trials_cost_little_where_trees_are_better(rtt: float, tau: float) -> None:
    curve = CostCurve((1, 16, 64), (0.075, 0.078, 0.09))
    pace = Pace(usual_tau=tau)
    pace.linked(welcome(curve), rtt)
    controller, seconds = converse(pace, curve, rtt, tau, 2000)
    assert controller.trials >= 2 and controller.switches == 0
    assert seconds <= (1 + CONFIG.trial_share) * 2000 * (rtt + curve.at(16)) / tau


@pytest.mark.parametrize("pinned", ["tree", "stream"])
def test_a_pinned_mode_stays(pinned: str) -> None:
    controller = Controller(Pace(curve=GPU, rtt=5.0), pinned)  # type: ignore[arg-type]
    assert controller.begin() == controller.choose() == pinned


def test_one_slow_draft_does_not_make_trees_slow_for_good() -> None:
    """An answer's first draft reads the prompt; what was exposed of it must not decide for a stream."""
    pace = Pace()
    pace.linked(welcome(CPU), 0.001)
    controller = Controller(pace)
    pace.verified(TokenTree.chain([1, 2, 3]), [], [0, 1], 0.016, 0.015, 0.0)
    before = pace.tree_rate()
    pace.waited(0.05)
    assert pace.tree_rate() > before / 2 and controller.choose() == "tree"
