"""Tree sizes and rates against an oracle that knows the link, the target and the drafter exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from edge_runtime.session.tuning import LARGEST
from edge_runtime.speed.arms import PRIOR_STEPS, PRIOR_STREAM, Arm, TreeArm
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.cost_model import CostModel
from edge_runtime.speed.explorer import EVERY, SHARE
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Verify, encode, pack_tree
from tests.edge_runtime.known_drafts import CPU, GPU, Drafts, welcome


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
    drafts, controller = Drafts(sure, boast), Controller()
    controller.linked(welcome(curve), rtt)
    full, claimed, true = drafts.tree(64)
    draft_seconds = 0.004

    def rate(count: int) -> float:
        return float((1 + sum(true[:count])) / (draft_seconds + rtt + curve.at(1 + count)))

    def count() -> int:
        drafted = min(64, controller.tree.worth_drafting())
        return controller.tree.worth_sending(full.pruned(drafted, 64), claimed[:drafted], controller.costs)

    for _ in range(60):
        tree = full.pruned(sent := count(), 64)
        engine = curve.at(1 + sent)
        controller.waited(draft_seconds)
        controller.verified(tree, claimed[:sent], drafts.walk(tree), rtt + engine, engine)
    assert rate(count()) >= 0.97 * max(rate(size) for size in range(1, 65))


def test_the_verifiers_slowdown_is_followed() -> None:
    controller = Controller()
    controller.linked(welcome(CPU), 0.01)
    drafts = Drafts(0.6)
    tree, claimed, _ = drafts.tree(48)
    calm = controller.tree.worth_sending(tree, claimed, controller.costs)
    for _ in range(20):
        controller.verified(tree, claimed, drafts.walk(tree), 0.01 + 4 * CPU.at(49), 4 * CPU.at(49))
    assert controller.costs.slowdown == pytest.approx(4, rel=0.05) and controller.costs.step(0) == pytest.approx(
        4 * CPU.at(1), rel=0.05
    )
    assert controller.tree.worth_sending(tree, claimed, controller.costs) < calm


def test_what_was_measured_of_a_verifier_outlives_its_connections() -> None:
    controller = Controller()
    controller.linked(welcome(CPU), 0.01)
    assert controller.stream.rate(controller.costs) == pytest.approx(1 / CPU.at(1))
    for _ in range(40):
        controller.streamed(2 * CPU.at(1), 2 * CPU.at(1))
    measured = controller.stream.rate(controller.costs), controller.costs.step(0), controller.costs.step(8)
    controller.linked(welcome(CPU), 0.3)
    assert (
        controller.stream.rate(controller.costs),
        controller.costs.step(0),
        controller.costs.step(8),
    ) == measured and controller.costs.rtt == 0.3
    controller.linked(welcome(GPU), 0.3)
    assert controller.stream.rate(controller.costs) == pytest.approx(1 / GPU.at(1))
    for _ in range(2):  # nobody knows whether it is the same
        controller.linked(welcome(None), 0.3)
        assert controller.stream.rate(controller.costs) is None
        controller.streamed(0.02, 0.02)


def test_what_a_verifier_tells_of_itself_counts_until_it_was_measured() -> None:
    controller, told = Controller(), structs.replace(welcome(GPU), stream_tokens=250, queue_us=5_000)
    controller.linked(told, 0.01)
    assert controller.stream.rate(controller.costs) == pytest.approx(2.5 / GPU.at(1)), "a step waits in no queue"
    assert controller.costs.between == pytest.approx(0.015)
    for _ in range(60):
        controller.verified(TokenTree.chain([1]), [], [0], 0.01 + GPU.at(2), GPU.at(2))
    assert controller.stream.rate(controller.costs) == pytest.approx(2.5 / GPU.at(1), rel=0.01), (
        "trees tell nothing of lookup"
    )
    for _ in range(200):
        controller.streamed(GPU.at(1), GPU.at(1))
    measured = controller.stream.rate(controller.costs)
    for again in (told, structs.replace(told, stream_tokens=900, queue_us=90_000)):
        controller.linked(again, 0.01)
        assert controller.stream.rate(controller.costs) == measured
        assert controller.costs.between == pytest.approx(0.01 + again.queue_us / 1e6), "the queue is another meanwhile"
    controller.linked(structs.replace(welcome(CPU), stream_tokens=150, queue_us=2_000), 0.01)  # another verifier
    assert controller.stream.rate(controller.costs) == pytest.approx(1.5 / CPU.at(1))
    controller.linked(welcome(GPU), 0.01)
    assert controller.stream.rate(controller.costs) == pytest.approx(1 / GPU.at(1)) and controller.costs.queue == 0.0


def test_a_stream_of_a_verifier_that_knows_nothing_of_it_is_taken_to_bring_a_little_by_lookup() -> None:
    """It was started a moment ago; the first tokens tell."""
    controller = Controller()
    controller.linked(structs.replace(welcome(GPU), stream_tokens=0), 0.01)
    assert controller.stream.rate(controller.costs) == pytest.approx(PRIOR_STREAM / GPU.at(1))
    for _ in range(EVERY):
        controller.streamed(GPU.at(1), GPU.at(1))
    assert controller.stream.rate(controller.costs) == pytest.approx(1 / GPU.at(1), rel=0.1)


def test_a_verifier_that_advertises_no_costs_gets_complete_trees() -> None:
    controller = Controller()
    controller.linked(welcome(None), 0.05)
    tree, claimed, _ = Drafts(0.6).tree(32)
    assert (
        controller.tree.worth_sending(tree, claimed, controller.costs) == 32
        and controller.stream.rate(controller.costs) is None
    )
    controller.verified(tree, claimed, [0], 0.09, 0.04)
    assert controller.tree.worth_sending(tree, claimed, controller.costs) == 32
    assert controller.tree.worth_sending(TokenTree(), [], controller.costs) == 0
    assert controller.stream.rate(controller.costs) is None  # what a tree takes says nothing of a token
    assert controller.choose() is Arm.STREAM and controller.trial == EVERY
    controller.streamed(0.03, 0.02)  # a token takes less time than a tree, and does not stand in for one
    assert (controller.costs.step(32), controller.costs.step(0)) == pytest.approx((0.04, 0.02))
    assert controller.stream.rate(controller.costs) == pytest.approx(1 / 0.03)


def test_a_verifier_that_tells_no_times_is_as_fast_as_its_tokens_come() -> None:
    controller = Controller()
    controller.linked(welcome(GPU), 0.01)
    for _ in range(200):
        controller.streamed(0.1, 0.0)
    assert gap(controller) == pytest.approx(0.1 + GPU.at(1))


def test_a_stream_is_tried_once_where_it_tells_nothing() -> None:
    """A verifier that says nothing of its engine: a second trial would teach nothing either."""
    controller, streamed = Controller(), 0
    controller.linked(welcome(None), 0.05)
    for _ in range(20 * EVERY):
        if controller.arm is Arm.STREAM:
            controller.streamed(0.5, 0.0)
            streamed += 1
        else:
            controller.verified(TokenTree.chain([1]), [], [0], 0.09, 0.04)
        controller.choose()
    assert streamed == EVERY and controller.arm is Arm.TREE


def test_drafting_stops_sooner_where_time_is_dear() -> None:
    near, far = Controller(), Controller()
    assert near.tree.gain(near.costs) is None
    for controller, rtt in ((near, 0.001), (far, 1.2)):
        controller.linked(welcome(CPU), rtt)
        controller.tree.drafted(0.012, 4)
    gains = [controller.tree.gain(controller.costs) or 0.0 for controller in (far, near)]
    assert 0 < gains[0] < gains[1]


def test_reading_gives_a_trial_of_drafting_ahead_up() -> None:
    controller = Controller()
    controller.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.001)
    while not controller.ahead.trial:
        controller.verified(TokenTree.chain([1]), [], [0], 0.011, 0.01)
        controller.waited(0.01)
    controller.verified(TokenTree.chain([1]), [], [0], 0.011, 0.01)
    controller.prepared()
    assert not controller.ahead.trial


def test_what_comparisons_take_is_what_a_round_loses_to_drafting() -> None:
    controller = Controller(CostModel(exposed=3.0))
    for _ in range(60):
        controller.foreseen(TokenTree.chain([1]), [], [0], 0.02)
    assert controller.costs.exposed == pytest.approx(0.02, rel=0.01)
    controller.ahead.on, controller.costs.exposed = True, 0.005  # most of it is hidden then
    controller.foreseen(TokenTree.chain([1]), [], [0], 0.02)
    assert controller.costs.exposed == 0.005


def test_a_new_device_knows_what_its_drafting_takes() -> None:
    controller = Controller(tree=TreeArm(step=0.01))
    controller.linked(welcome(GPU), 0.02)
    assert controller.costs.exposed == PRIOR_STEPS * 0.01
    assert controller.costs.round(8) == pytest.approx(0.02 + PRIOR_STEPS * 0.01 + GPU.at(9))


def test_a_curve_that_falls_to_nothing_leaves_rates_finite() -> None:
    controller = Controller()
    controller.linked(welcome(CostCurve((1, 2), (0.0001, 0.00005))), 0.01)
    controller.verified(TokenTree.chain([1, 2]), [-0.1, -0.2], [0], 0.02, 0.01)
    assert all(0 < rate < 1e9 for rate in controller.rates().values())


def test_a_trial_tells_more_of_a_stream_than_trees_did() -> None:
    """Trees whose steps come to take longer make a stream look slower; eight of its tokens put that right."""
    controller = Controller()
    controller.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.001)
    for _ in range(40):
        controller.streamed(0.01, 0.01)
    for engine in (0.01, *(20 * [0.015])):
        controller.verified(TokenTree.chain([1, 2]), [], [0], engine + 0.001, engine)
    assert gap(controller) == pytest.approx(0.015, rel=0.05)
    for _ in range(EVERY):
        controller.streamed(0.01, 0.01)
    assert gap(controller) == pytest.approx(0.01, rel=0.1)


def gap(controller: Controller) -> float:
    """Seconds between a stream's tokens."""
    rate = controller.stream.rate(controller.costs)
    assert rate is not None
    return 1 / rate


@given(st.floats(0.005, 1), st.floats(0.001, 1), st.floats(0, 2))
def test_comparing_takes_no_more_than_its_share(between: float, seconds: float, rtt: float) -> None:
    controller = Controller(CostModel(rtt=rtt), arm=Arm.STREAM)
    compared, spent, tokens = 0, 0.0, 300
    for _ in range(tokens):
        controller.streamed(between, between)
        taken = controller.costs.exposed
        if controller.compares(Arm.TREE):
            compared, spent = compared + 1, spent + taken
            controller.foreseen(TokenTree.chain([1, 2, 3]), [], [0], seconds)
    assert compared <= tokens / EVERY and spent <= SHARE * tokens * between * (1 + 1e-9)


def test_rounds_tell_how_long_a_streams_tokens_take_meanwhile() -> None:
    """A long text or a hot device made the last stream slow; trees are as fast as before now, so a stream would be."""
    controller = Controller(CostModel(GPU))
    tree = TokenTree.chain([1, 2, 3])
    for _ in range(60):
        controller.streamed(3 * GPU.at(1) + 0.001, 3 * GPU.at(1))
    assert gap(controller) == pytest.approx(3 * GPU.at(1) + 0.001)
    for _ in range(60):
        controller.verified(tree, [], [0], 3 * GPU.at(4), 3 * GPU.at(4))
    assert gap(controller) == pytest.approx(3 * GPU.at(1) + 0.001)
    for _ in range(60):
        controller.verified(tree, [], [0], GPU.at(4), GPU.at(4))
    assert gap(controller) == pytest.approx(GPU.at(1) + 0.001, rel=0.03)


def test_steps_of_several_tokens_make_a_streams_tokens_quicker_and_no_step() -> None:
    """Where the verifier foresees what the text repeats; the first token of a step tells its time, the others none."""
    controller = Controller(CostModel(GPU))
    for number in range(300):
        controller.streamed(1.2 * GPU.at(1), 1.2 * GPU.at(1))
        for _ in range(number % 3):
            controller.streamed(0.0, 0.0, same_step=True)
    assert controller.costs.step(0) == pytest.approx(1.2 * GPU.at(1)) and controller.costs.slowdown is None
    assert controller.stream.rate(controller.costs) == pytest.approx(2 / (1.2 * GPU.at(1)), rel=0.3)
    for _ in range(300):
        controller.streamed(0.5, 0.5)  # an answer in which nothing is foreseen, on a slow machine
    assert controller.stream.rate(controller.costs) == pytest.approx(2.0, rel=0.01)


def test_an_answer_begins_with_what_streams_usually_bring() -> None:
    controller = Controller(CostModel(GPU))
    for _ in range(200):
        controller.streamed(0.01, 0.01)
        controller.streamed(0.0, 0.0, same_step=True)
    for _ in range(45):  # an answer's end, where nothing was foreseen
        controller.streamed(0.01, 0.01)
    assert gap(controller) == pytest.approx(0.01, rel=0.1)
    controller.begin()
    assert gap(controller) == pytest.approx(0.006, rel=0.15)
    controller.linked(welcome(CostCurve((1, 8), (0.5, 0.5))), 0.01)
    assert gap(controller) == 0.5, "another verifier"


def test_rounds_make_a_stream_of_steps_of_several_tokens_slower_by_as_much() -> None:
    controller = Controller(CostModel(CostCurve((1, 4), (0.01, 0.02))))
    for _ in range(600):
        controller.streamed(0.01, 0.01)
        controller.streamed(0.0, 0.0, same_step=True)
    before = gap(controller)
    for _ in range(60):
        controller.verified(TokenTree.chain([1, 2, 3]), [], [0], 0.02, 0.02)
    for _ in range(60):
        controller.verified(TokenTree.chain([1, 2, 3]), [], [0], 0.06, 0.06)
    assert gap(controller) == pytest.approx(3 * before, rel=0.05)


def test_the_largest_trees_fill_a_frame() -> None:
    """Frames are padded to steps of 64 bytes: one node more would cost the next step, late in a long answer too."""

    def frame(nodes: int) -> int:
        return len(encode(Verify(0, 60_000, 60_000, *pack_tree(TokenTree.chain(range(nodes))))))

    assert frame(LARGEST.nodes) == 256 < frame(LARGEST.nodes + 1)


def test_little_more_is_drafted_than_was_worth_sending() -> None:
    controller = Controller()
    before = controller.tree.worth_drafting()
    for _ in range(40):
        controller.verified(TokenTree.chain(range(50)), [], [], 0.1, 0.05)
    assert controller.tree.worth_drafting() == 100 > before
    for _ in range(80):
        controller.verified(TokenTree.chain([1]), [], [], 0.1, 0.05)
    assert 2 < controller.tree.worth_drafting() < before  # enough to see whether more would be


def test_one_tree_beside_a_stream_tells_what_trees_cost() -> None:
    """Small trees are worth sending here; the first one drafted says so."""
    controller = Controller()
    controller.linked(welcome(CPU), 0.001)
    before = controller.tree.rate(controller.costs)
    controller.foreseen(TokenTree.chain([1, 2, 3]), [], [0], 0.0)
    assert controller.tree.nodes == 3 and controller.tree.rate(controller.costs) > 1.1 * before


def test_what_trees_bring_is_told_from_their_promises() -> None:
    """What comes of single trees scatters; what their nodes promise, calibrated, hardly."""
    drafts, controller, seen = Drafts(0.6, boast=1.25), Controller(), list[float]()
    for number in range(400):
        tree, claimed, _ = drafts.tree(8 + number % 8)
        controller.foreseen(tree, claimed, drafts.walk(tree), 0.0)
        seen.append(controller.tree.tau)
    wanted = 1 + sum(drafts.tree(12)[2])
    assert np.mean(seen[100:]) == pytest.approx(wanted, rel=0.05) and np.std(seen[100:]) < 0.1 * wanted


def test_a_wrong_curve_for_one_kind_of_step_says_nothing_of_the_other() -> None:
    """A token takes half of what was advertised, a tree what was advertised; then both take three times as long."""
    advertised = CostCurve((1, 16, 64), (0.1, 0.1, 0.2))
    tree, controller = Drafts(0.5).tree(15)[0], Controller()
    controller.linked(welcome(advertised), 0.01)
    controller.verified(tree, [], [], 0.11, 0.1)
    for _ in range(9):
        controller.streamed(0.05, 0.05)
    assert controller.costs.step(15) == pytest.approx(0.1) and controller.costs.step(0) == pytest.approx(0.05)
    for _ in range(40):
        controller.streamed(0.15, 0.15)
    assert controller.costs.step(15) == pytest.approx(0.3, rel=0.01) and controller.costs.step(0) == pytest.approx(
        0.15, rel=0.01
    )
