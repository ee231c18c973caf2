"""Tree sizes and modes against an oracle that knows the link, the target and the drafter exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_runtime.pace import Controller, Pace, PaceConfig
from edge_runtime.policy import Mode
from edge_runtime.tuning import LARGEST
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import Verify, Welcome, encode, pack_tree

CONFIG = PaceConfig()
#: seconds of steps: a CPU, where nodes are dear, and a GPU, where they cost nothing for long
CPU = CostCurve((1, 8, 32, 64, 128), (0.012, 0.015, 0.024, 0.045, 0.09))
GPU = CostCurve((1, 64, 128), (0.025, 0.026, 0.032))


def welcome(curve: CostCurve | None) -> Welcome:
    return Welcome(1, "t", "d", 100, 2048, 255, 255, "", curve.pack() if curve else b"")


class Drafts:
    """Trees with a known distribution: a node's probability, and whether the drafter overrates itself by `boast`."""

    def __init__(self, sure: float, boast: float = 1.0, seed: int = 0) -> None:
        self.rng, self.boast = random.Random(seed), boast
        self.probabilities = [sure, 0.5 * (1 - sure), 0.2 * (1 - sure)]  # of a node's three children

    def tree(self, nodes: int) -> tuple[TokenTree, list[float], list[float]]:
        """(tree of the likeliest nodes, claimed log path probabilities, true path probabilities)."""
        tokens, parents, true, depths = [], [], [], []
        open_ = [(p, ROOT, 0, token) for token, p in enumerate(self.probabilities)]
        while len(tokens) < nodes:
            best = max(open_)
            open_.remove(best)
            p, parent, depth, token = best
            tokens.append(token)
            parents.append(parent)
            true.append(p)
            depths.append(depth + 1)
            open_ += [(p * q, len(tokens) - 1, depth + 1, child) for child, q in enumerate(self.probabilities)]
        claimed = [float(np.log(min(1.0, p * self.boast**depth))) for p, depth in zip(true, depths, strict=True)]
        return TokenTree(tuple(tokens), tuple(parents)), claimed, true

    def walk(self, tree: TokenTree) -> list[int]:
        node, path = ROOT, list[int]()
        while True:
            token = self.rng.choices(range(4), [*self.probabilities, 1 - sum(self.probabilities)])[0]
            child = tree.child(node, token) if token < 3 else None
            if child is None:
                return path
            node = child
            path.append(node)


@pytest.mark.parametrize("boast", [1.0, 1.25])
@pytest.mark.parametrize("sure", [0.4, 0.7])
@pytest.mark.parametrize("rtt", [0.001, 0.06, 0.4])
@pytest.mark.parametrize("curve", [CPU, GPU], ids=["cpu", "gpu"])
def test_trees_are_nearly_as_good_as_the_best_fixed_size(
    curve: CostCurve, rtt: float, sure: float, boast: float
) -> None:
    """Within 3 % of what an oracle that sweeps all sizes gets, once the device has seen sixty rounds.

    No more is drafted than seemed worth it.
    """
    drafts, pace = Drafts(sure, boast), Pace()
    pace.linked(welcome(curve), rtt)
    full, claimed, true = drafts.tree(64)
    draft_seconds = 0.004

    def rate(count: int) -> float:
        return float((1 + sum(true[:count])) / (draft_seconds + rtt + curve.at(1 + count)))

    def count() -> int:
        drafted = min(64, pace.worth_drafting())
        return pace.worth_sending(full.pruned(drafted, 64), claimed[:drafted])

    for _ in range(60):
        tree = full.pruned(sent := count(), 64)
        engine = curve.at(1 + sent)
        pace.waited(draft_seconds)
        pace.verified(tree, claimed[:sent], drafts.walk(tree), rtt + engine, engine, 0.0)
    assert rate(count()) >= 0.97 * max(rate(size) for size in range(1, 65))


def test_the_verifiers_slowdown_is_followed() -> None:
    pace = Pace()
    pace.linked(welcome(CPU), 0.01)
    drafts = Drafts(0.6)
    tree, claimed, _ = drafts.tree(48)
    calm = pace.worth_sending(tree, claimed)
    for _ in range(20):
        pace.verified(tree, claimed, drafts.walk(tree), 0.01 + 4 * CPU.at(49), 4 * CPU.at(49), 0.0)
    assert pace.slowdown == pytest.approx(4, rel=0.05) and pace.step(0) == pytest.approx(4 * CPU.at(1), rel=0.05)
    assert pace.worth_sending(tree, claimed) < calm


def test_what_was_measured_of_a_verifier_outlives_its_connections() -> None:
    pace = Pace()
    pace.linked(welcome(CPU), 0.01)
    assert pace.stream_rate() == pytest.approx(1 / CPU.at(1))
    for _ in range(40):
        pace.streamed(2 * CPU.at(1), 2 * CPU.at(1), False)
    measured = pace.stream_rate(), pace.step(0), pace.step(8)
    pace.linked(welcome(CPU), 0.3)
    assert (pace.stream_rate(), pace.step(0), pace.step(8)) == measured and pace.rtt == 0.3
    pace.linked(welcome(GPU), 0.3)
    assert pace.stream_rate() == pytest.approx(1 / GPU.at(1))
    for _ in range(2):  # nobody knows whether it is the same
        pace.linked(welcome(None), 0.3)
        assert pace.stream_rate() is None
        pace.streamed(0.02, 0.02, False)


def test_a_verifier_that_advertises_no_costs_gets_complete_trees() -> None:
    pace = Pace()
    pace.linked(welcome(None), 0.05)
    tree, claimed, _ = Drafts(0.6).tree(32)
    assert pace.worth_sending(tree, claimed) == 32 and pace.stream_rate() is None
    pace.verified(tree, claimed, [0], 0.09, 0.04, 0.0)
    assert pace.worth_sending(tree, claimed) == 32 and pace.stream_rate() == pytest.approx(25)
    assert pace.worth_sending(TokenTree(), []) == 0
    pace.streamed(0.03, 0.02, False)  # a token takes less time than a tree, and does not stand in for one
    assert (pace.step(32), pace.step(0)) == pytest.approx((0.04, 0.02))


def test_drafting_stops_sooner_where_time_is_dear() -> None:
    near, far = Pace(), Pace()
    for pace, rtt in ((near, 0.001), (far, 1.2)):
        pace.linked(welcome(CPU), rtt)
        pace.drafted(0.012, 4, from_scratch=True)
    assert CONFIG.least_gain <= far.gain() < near.gain() <= CONFIG.most_gain


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


def test_what_a_tree_for_comparison_takes_from_a_stream_is_no_part_of_its_gap() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.02))), 0.001)
    for _ in range(40):
        pace.streamed(0.012, 0.01, overdue=False)
    for gap, engine in ((0.03, 0.028), (0.012, 0.01), (0.032, 0.03), (0.003, 0.01)):
        pace.streamed(gap, engine, overdue=False, beside=True)
    assert pace.gap is not None and 0.011 < pace.gap <= 0.0121
    pace.streamed(0.012, 0.01, overdue=False)
    assert pace.lost > 0.0


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
    pace.read(0.1)
    assert pace.usual_tree_rate() == pytest.approx(1 / (0.005 + 0.1 / 12))
    assert answer(0) == "stream"  # 12 tokens do not pay for it
    for _ in range(20):
        answer(100)
    assert answer(100) == "tree"  # 300 do
    pace.read(5.0)
    begun = [controller.begin() for _ in range(60)]
    assert begun[0] == "stream" and begun[-1] == "tree"  # it is tried again at some time
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.011))), 0.005)
    assert pace.reading == 0.0


def test_reading_gives_a_trial_of_drafting_ahead_up() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.001)
    while not pace.ahead.trying:
        pace.verified(TokenTree.chain([1]), [], [0], 0.011, 0.01, 0.0)
        pace.drafted(0.01, 2, from_scratch=True)
        pace.waited(0.01)
    pace.verified(TokenTree.chain([1]), [], [0], 0.011, 0.01, 0.0)
    pace.read(0.01)
    assert not pace.ahead.trying


def test_what_a_comparison_took_bounds_what_a_round_loses_to_drafting() -> None:
    pace = Pace(exposed=3.0)
    pace.foreseen(TokenTree.chain([1]), [], [0], 0.02)
    assert pace.exposed == 0.02


def test_a_trial_tells_more_of_a_stream_than_trees_did() -> None:
    """Trees whose steps come to take longer make a stream look slower; eight of its tokens put that right."""
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.001)
    for _ in range(40):
        pace.streamed(0.01, 0.01, overdue=False)
    for engine in (0.01, *(20 * [0.015])):
        pace.verified(TokenTree.chain([1, 2]), [], [0], engine + 0.001, engine, 0.0)
    assert pace.gap == pytest.approx(0.015, rel=0.05)
    for _ in range(CONFIG.trial_tokens):
        pace.streamed(0.01, 0.01, overdue=False)
    assert pace.gap == pytest.approx(0.01, rel=0.07)


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


def test_a_stream_far_ahead_is_seldom_compared_with_trees() -> None:
    for streamed in (0, CONFIG.early_tokens, CONFIG.early_tokens + 1, 1000):
        pace = Pace()
        assert pace.compare_every(streamed) == CONFIG.compare_every
        pace.streamed(0.02, 0.018, overdue=False)
        pace.rtt, pace.tau = 0.03, 3.0
        assert pace.compare_every(streamed) == CONFIG.compare_every
        intervals = []
        for rtt in (0.05, 0.08, 0.3):
            pace.rtt = rtt
            intervals.append(pace.compare_every(streamed))
        assert CONFIG.compare_every < intervals[0] < intervals[1] < intervals[2] == CONFIG.compare_rarely


@given(st.floats(0.005, 1), st.floats(0.001, 1), st.floats(0, 2))
def test_comparing_takes_no_more_than_its_share(gap: float, seconds: float, rtt: float) -> None:
    pace = Pace(rtt=rtt)
    pace.streamed(gap, gap, overdue=False)
    for _ in range(40):
        pace.foreseen(TokenTree.chain([1, 2, 3]), [], [0], seconds)
    assert pace.compared == pytest.approx(seconds, rel=0.01)
    assert pace.compared <= CONFIG.comparison_share * pace.compare_every(CONFIG.early_tokens + 1) * gap * (1 + 1e-9)
    assert CONFIG.compare_every <= pace.compare_every(CONFIG.early_tokens) <= CONFIG.compare_rarely


@given(st.floats(0.005, 1), st.floats(0, 1))
def test_a_stream_loses_no_more_than_its_share_to_comparing(gap: float, lost: float) -> None:
    """Device and verifier share processors: the two tokens beside a tree take longer."""
    pace = Pace()
    for _ in range(40):
        for beside in (False, True, True, False):
            pace.streamed(gap, gap + (lost / 2 if beside else 0.0), overdue=False, beside=beside)
        pace.foreseen(TokenTree.chain([1, 2, 3]), [], [0], 0.0)
    assert pace.lost == pytest.approx(lost, rel=0.01, abs=1e-9)
    for streamed in (1, 1000):
        assert pace.lost <= CONFIG.comparison_share * pace.compare_every(streamed) * gap * (1 + 1e-9)
    assert pace.token_slowdown == pytest.approx(gap)  # what was beside a tree says nothing of a token alone


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.floats(0.0, 0.1))
def test_comparisons_come_early_in_short_answers_and_no_more_often(lengths: list[int], lost: float) -> None:
    """Where one is due once in more tokens than an answer has, answers that follow each other still get theirs."""
    pace = Pace(lost=lost)
    pace.streamed(0.02, 0.02, overdue=False)
    every, tokens, came = pace.compare_every(1), 0, list[int]()
    for length in lengths:
        first = True
        for streamed in range(1, length + 1):
            tokens += 1
            if pace.compares(streamed, first):
                came.append(tokens)
                first = False
    assert len(came) <= 1 + tokens // every
    if tokens >= 2 * every + max(lengths):
        assert len(came) >= tokens // every - 1


def test_rounds_tell_how_long_a_streams_tokens_take_meanwhile() -> None:
    """A long text or a hot device made the last stream slow; trees are as fast as before now, so a stream would be."""
    pace = Pace(curve=GPU)
    tree = TokenTree.chain([1, 2, 3])
    for _ in range(60):
        pace.streamed(3 * GPU.at(1) + 0.001, 3 * GPU.at(1), overdue=False)
    assert pace.gap == pytest.approx(3 * GPU.at(1) + 0.001)
    for _ in range(60):
        pace.verified(tree, [], [0], 3 * GPU.at(4), 3 * GPU.at(4), 0.0)
    assert pace.gap == pytest.approx(3 * GPU.at(1) + 0.001)
    for _ in range(60):
        pace.verified(tree, [], [0], GPU.at(4), GPU.at(4), 0.0)
    assert pace.gap == pytest.approx(GPU.at(1) + 0.001, rel=0.01)


def test_an_outage_does_not_make_a_stream_slow() -> None:
    """Half a second of silence, then what it held back at once."""
    pace = Pace()
    for _ in range(50):
        pace.streamed(0.03, 0.025, overdue=False)
    for gap in (0.5, *16 * [0.0]):
        pace.streamed(gap, 0.025, overdue=gap > 0)
        assert pace.stream_rate() == pytest.approx(1 / 0.03)
    for _ in range(50):
        pace.streamed(0.06, 0.025, overdue=False)
    assert pace.stream_rate() == pytest.approx(1 / 0.06, rel=0.01)


def test_the_largest_trees_fill_a_frame() -> None:
    """Frames are padded to steps of 64 bytes: one node more would cost the next step, late in a long answer too."""

    def frame(nodes: int) -> int:
        return len(encode(Verify(0, 60_000, 60_000, *pack_tree(TokenTree.chain(range(nodes))))))

    assert frame(LARGEST.nodes) == 256 < frame(LARGEST.nodes + 1)


def test_little_more_is_drafted_than_was_worth_sending() -> None:
    pace = Pace()
    before = pace.worth_drafting()
    for _ in range(40):
        pace.verified(TokenTree.chain(range(50)), [], [], 0.1, 0.05, 0.0)
    assert pace.worth_drafting() == 100 > before
    for _ in range(80):
        pace.verified(TokenTree.chain([1]), [], [], 0.1, 0.05, 0.0)
    assert 2 < pace.worth_drafting() < before  # enough to see whether more would be


def test_one_slow_draft_does_not_make_trees_slow_for_good() -> None:
    """An answer's first draft reads the prompt; what was exposed of it must not decide for a stream."""
    pace = Pace()
    pace.linked(welcome(CPU), 0.001)
    controller = Controller(pace)
    pace.verified(TokenTree.chain([1, 2, 3]), [], [0, 1], 0.016, 0.015, 0.0)
    before = pace.tree_rate()
    pace.waited(0.05)
    assert pace.tree_rate() > before / 2 and controller.choose() == "tree"


def test_one_tree_beside_a_stream_tells_what_trees_cost() -> None:
    """Small trees are worth sending here; the first one drafted says so."""
    pace = Pace()
    pace.linked(welcome(CPU), 0.001)
    before = pace.tree_rate()
    pace.foreseen(TokenTree.chain([1, 2, 3]), [], [0], 0.01)
    assert pace.nodes == 3 and pace.tree_rate() > 1.2 * before


def test_what_trees_bring_is_told_from_their_promises() -> None:
    """What comes of single trees scatters; what their nodes promise, calibrated, hardly."""
    drafts, pace, seen = Drafts(0.6, boast=1.25), Pace(), list[float]()
    for number in range(400):
        tree, claimed, _ = drafts.tree(8 + number % 8)
        pace.foreseen(tree, claimed, drafts.walk(tree), 0.0)
        seen.append(pace.tau)
    wanted = 1 + sum(drafts.tree(12)[2])
    assert np.mean(seen[100:]) == pytest.approx(wanted, rel=0.05) and np.std(seen[100:]) < 0.1 * wanted


def test_a_wrong_curve_for_one_kind_of_step_says_nothing_of_the_other() -> None:
    """A token takes half of what was advertised, a tree what was advertised; then both take three times as long."""
    advertised = CostCurve((1, 16, 64), (0.1, 0.1, 0.2))
    tree, pace = Drafts(0.5).tree(15)[0], Pace()
    pace.linked(welcome(advertised), 0.01)
    pace.verified(tree, [], [], 0.11, 0.1, 0.0)
    for _ in range(9):
        pace.streamed(0.05, 0.05, overdue=False)
    assert pace.step(15) == pytest.approx(0.1) and pace.step(0) == pytest.approx(0.05)
    for _ in range(40):
        pace.streamed(0.15, 0.15, overdue=False)
    assert pace.step(15) == pytest.approx(0.3, rel=0.01) and pace.step(0) == pytest.approx(0.15, rel=0.01)
