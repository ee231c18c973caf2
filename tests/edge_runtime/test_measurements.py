"""Tree sizes and rates against an oracle that knows the link, the target and the drafter exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from edge_runtime.speed.arms import PRIOR_STEPS, TreeArm
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.cost_model import CostModel
from edge_runtime.speed.explorer import EVERY, SHARE
from edge_runtime.speed.pace import Pace
from edge_runtime.speed.settled import Arm
from edge_runtime.speed.tuning import LARGEST
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Verify, Welcome, encode, pack_tree
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
    drafts, pace = Drafts(sure, boast), Pace()
    pace.linked(welcome(curve), rtt)
    full, claimed, true = drafts.tree(64)
    draft_seconds = 0.004

    def rate(count: int) -> float:
        return float((1 + sum(true[:count])) / (draft_seconds + rtt + curve.at(1 + count)))

    def count() -> int:
        drafted = min(64, pace.tree.worth_drafting())
        return pace.tree.worth_sending(full.pruned(drafted, 64), claimed[:drafted], pace.costs)

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
    calm = pace.tree.worth_sending(tree, claimed, pace.costs)
    for _ in range(20):
        pace.verified(tree, claimed, drafts.walk(tree), 0.01 + 4 * CPU.at(49), 4 * CPU.at(49), 0.0)
    assert pace.costs.slowdown == pytest.approx(4, rel=0.05) and pace.costs.step(0) == pytest.approx(
        4 * CPU.at(1), rel=0.05
    )
    assert pace.tree.worth_sending(tree, claimed, pace.costs) < calm


def test_what_was_measured_of_a_verifier_outlives_its_connections() -> None:
    pace = Pace()
    pace.linked(welcome(CPU), 0.01)
    assert pace.stream.rate(pace.costs) == pytest.approx(1 / CPU.at(1))
    for _ in range(40):
        pace.streamed(2 * CPU.at(1), 2 * CPU.at(1), False)
    measured = pace.stream.rate(pace.costs), pace.costs.step(0), pace.costs.step(8)
    pace.linked(welcome(CPU), 0.3)
    assert (pace.stream.rate(pace.costs), pace.costs.step(0), pace.costs.step(8)) == measured and pace.costs.rtt == 0.3
    pace.linked(welcome(GPU), 0.3)
    assert pace.stream.rate(pace.costs) == pytest.approx(1 / GPU.at(1))
    for _ in range(2):  # nobody knows whether it is the same
        pace.linked(welcome(None), 0.3)
        assert pace.stream.rate(pace.costs) is None
        pace.streamed(0.02, 0.02, False)


def test_what_a_verifier_tells_of_itself_counts_until_it_was_measured() -> None:
    pace, told = Pace(), structs.replace(welcome(GPU), stream_tokens=250, queue_us=5_000)
    pace.linked(told, 0.01)
    assert pace.stream.rate(pace.costs) == pytest.approx(2.5 / GPU.at(1)), "a step waits in no queue"
    assert pace.costs.between == pytest.approx(0.015)
    for _ in range(60):
        pace.verified(TokenTree.chain([1]), [], [0], 0.01 + GPU.at(2), GPU.at(2), 0.0)
    assert pace.stream.rate(pace.costs) == pytest.approx(2.5 / GPU.at(1), rel=0.01), "trees tell nothing of lookup"
    for _ in range(200):
        pace.streamed(GPU.at(1), GPU.at(1), overdue=False)
    measured = pace.stream.rate(pace.costs)
    for again in (told, structs.replace(told, stream_tokens=900, queue_us=90_000)):
        pace.linked(again, 0.01)
        assert pace.stream.rate(pace.costs) == measured and pace.costs.queue < 0.001
    pace.linked(structs.replace(welcome(CPU), stream_tokens=150, queue_us=2_000), 0.01)  # another verifier
    assert pace.stream.rate(pace.costs) == pytest.approx(1.5 / CPU.at(1))
    pace.linked(welcome(GPU), 0.01)
    assert pace.stream.rate(pace.costs) == pytest.approx(1 / GPU.at(1)) and pace.costs.queue == 0.0


def test_a_verifier_that_advertises_no_costs_gets_complete_trees() -> None:
    pace = Pace()
    pace.linked(welcome(None), 0.05)
    tree, claimed, _ = Drafts(0.6).tree(32)
    assert pace.tree.worth_sending(tree, claimed, pace.costs) == 32 and pace.stream.rate(pace.costs) is None
    pace.verified(tree, claimed, [0], 0.09, 0.04, 0.0)
    assert pace.tree.worth_sending(tree, claimed, pace.costs) == 32 and pace.stream.rate(pace.costs) == pytest.approx(
        25
    )
    assert pace.tree.worth_sending(TokenTree(), [], pace.costs) == 0
    pace.streamed(0.03, 0.02, False)  # a token takes less time than a tree, and does not stand in for one
    assert (pace.costs.step(32), pace.costs.step(0)) == pytest.approx((0.04, 0.02))


def test_drafting_stops_sooner_where_time_is_dear() -> None:
    near, far = Pace(), Pace()
    assert near.tree.gain(near.costs) is None
    for pace, rtt in ((near, 0.001), (far, 1.2)):
        pace.linked(welcome(CPU), rtt)
        pace.tree.drafted(0.012, 4)
    gains = [pace.tree.gain(pace.costs) or 0.0 for pace in (far, near)]
    assert 0 < gains[0] < gains[1]


def test_reading_gives_a_trial_of_drafting_ahead_up() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.001)
    while not pace.ahead.trial:
        pace.verified(TokenTree.chain([1]), [], [0], 0.011, 0.01, 0.0)
        pace.waited(0.01)
    pace.verified(TokenTree.chain([1]), [], [0], 0.011, 0.01, 0.0)
    pace.prepared()
    assert not pace.ahead.trial


def test_what_comparisons_take_is_what_a_round_loses_to_drafting() -> None:
    pace = Pace(CostModel(exposed=3.0))
    for _ in range(60):
        pace.foreseen(TokenTree.chain([1]), [], [0], 0.02)
    assert pace.costs.exposed == pytest.approx(0.02, rel=0.01)
    pace.ahead.on, pace.costs.exposed = True, 0.005  # most of it is hidden then
    pace.foreseen(TokenTree.chain([1]), [], [0], 0.02)
    assert pace.costs.exposed == 0.005


def test_a_new_device_knows_what_its_drafting_takes() -> None:
    pace = Pace(tree=TreeArm(step=0.01))
    pace.linked(welcome(GPU), 0.02)
    assert pace.costs.exposed == PRIOR_STEPS * 0.01
    assert pace.costs.round(8) == pytest.approx(0.02 + PRIOR_STEPS * 0.01 + GPU.at(9))


def test_a_queue_that_was_told_is_a_guess() -> None:
    """A burst at the handshake, or a verifier that lies, must not keep trees away for good."""
    pace = Pace()
    pace.linked(structs.replace(welcome(GPU), queue_us=2**31), 0.02)
    pace.verified(TokenTree.chain([1]), [], [0], 0.02 + GPU.at(2), GPU.at(2), 0.0)
    assert pace.costs.queue == 0.0
    pace.costs.waited(0.01)
    assert pace.costs.queue == 0.005


def test_a_curve_that_falls_to_nothing_leaves_rates_finite() -> None:
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 2), (0.0001, 0.00005))), 0.01)
    pace.verified(TokenTree.chain([1, 2]), [-0.1, -0.2], [0], 0.02, 0.01, 0.0)
    assert all(0 < rate < 1e9 for rate in pace.rates().values())


def test_a_trial_tells_more_of_a_stream_than_trees_did() -> None:
    """Trees whose steps come to take longer make a stream look slower; eight of its tokens put that right."""
    pace = Pace()
    pace.linked(welcome(CostCurve((1, 64), (0.01, 0.01))), 0.001)
    for _ in range(40):
        pace.streamed(0.01, 0.01, overdue=False)
    for engine in (0.01, *(20 * [0.015])):
        pace.verified(TokenTree.chain([1, 2]), [], [0], engine + 0.001, engine, 0.0)
    assert gap(pace) == pytest.approx(0.015, rel=0.05)
    for _ in range(EVERY):
        pace.streamed(0.01, 0.01, overdue=False)
    assert gap(pace) == pytest.approx(0.01, rel=0.1)


def gap(pace: Pace) -> float:
    """Seconds between a stream's tokens."""
    rate = pace.stream.rate(pace.costs)
    assert rate is not None
    return 1 / rate


@given(st.floats(0.005, 1), st.floats(0.001, 1), st.floats(0, 2))
def test_comparing_takes_no_more_than_its_share(between: float, seconds: float, rtt: float) -> None:
    pace = Pace(CostModel(rtt=rtt))
    controller, compared, spent, tokens = Controller(pace, arm=Arm.STREAM), 0, 0.0, 300
    for _ in range(tokens):
        pace.streamed(between, between, overdue=False)
        taken = pace.costs.exposed
        if controller.compares(Arm.TREE):
            compared, spent = compared + 1, spent + taken
            pace.foreseen(TokenTree.chain([1, 2, 3]), [], [0], seconds)
    assert compared <= tokens / EVERY and spent <= SHARE * tokens * between * (1 + 1e-9)


def test_rounds_tell_how_long_a_streams_tokens_take_meanwhile() -> None:
    """A long text or a hot device made the last stream slow; trees are as fast as before now, so a stream would be."""
    pace = Pace(CostModel(GPU))
    tree = TokenTree.chain([1, 2, 3])
    for _ in range(60):
        pace.streamed(3 * GPU.at(1) + 0.001, 3 * GPU.at(1), overdue=False)
    assert gap(pace) == pytest.approx(3 * GPU.at(1) + 0.001)
    for _ in range(60):
        pace.verified(tree, [], [0], 3 * GPU.at(4), 3 * GPU.at(4), 0.0)
    assert gap(pace) == pytest.approx(3 * GPU.at(1) + 0.001)
    for _ in range(60):
        pace.verified(tree, [], [0], GPU.at(4), GPU.at(4), 0.0)
    assert gap(pace) == pytest.approx(GPU.at(1) + 0.001, rel=0.03)


def test_steps_of_several_tokens_make_a_streams_tokens_quicker_and_no_step() -> None:
    """Where the verifier foresees what the text repeats; the first token of a step tells its time, the others none."""
    pace = Pace(CostModel(GPU))
    for number in range(300):
        pace.streamed(1.2 * GPU.at(1), 1.2 * GPU.at(1), overdue=False)
        for _ in range(number % 3):
            pace.streamed(0.0, 0.0, overdue=False, same_step=True)
    assert pace.costs.step(0) == pytest.approx(1.2 * GPU.at(1)) and pace.costs.slowdown is None
    assert pace.stream.rate(pace.costs) == pytest.approx(2 / (1.2 * GPU.at(1)), rel=0.3)
    for _ in range(300):
        pace.streamed(0.5, 0.5, overdue=False)  # an answer in which nothing is foreseen, on a slow machine
    assert pace.stream.rate(pace.costs) == pytest.approx(2.0, rel=0.01)


def test_an_answer_begins_with_what_streams_usually_bring() -> None:
    pace = Pace(CostModel(GPU))
    for _ in range(200):
        pace.streamed(0.01, 0.01, overdue=False)
        pace.streamed(0.0, 0.0, overdue=False, same_step=True)
    for _ in range(45):  # an answer's end, where nothing was foreseen
        pace.streamed(0.01, 0.01, overdue=False)
    assert gap(pace) == pytest.approx(0.01, rel=0.1)
    pace.forget_answer()
    assert gap(pace) == pytest.approx(0.006, rel=0.15)
    pace.linked(Welcome(1, "t", "d", 9, 9, 9, 9, "", CostCurve((1, 8), (0.5, 0.5)).pack()), 0.01)
    assert gap(pace) == 0.5, "another verifier"


def test_rounds_make_a_stream_of_steps_of_several_tokens_slower_by_as_much() -> None:
    pace = Pace(CostModel(CostCurve((1, 4), (0.01, 0.02))))
    for _ in range(600):
        pace.streamed(0.01, 0.01, overdue=False)
        pace.streamed(0.0, 0.0, overdue=False, same_step=True)
    before = gap(pace)
    for _ in range(60):
        pace.verified(TokenTree.chain([1, 2, 3]), [], [0], 0.02, 0.02, 0.0)
    for _ in range(60):
        pace.verified(TokenTree.chain([1, 2, 3]), [], [0], 0.06, 0.06, 0.0)
    assert gap(pace) == pytest.approx(3 * before, rel=0.05)


def test_what_an_outage_held_back_is_late_though_it_came_of_one_step() -> None:
    pace = Pace()
    for _ in range(50):
        pace.streamed(0.03, 0.025, overdue=False)
    pace.streamed(0.5, 0.025, overdue=True)
    for engine in (0.0, 0.0, 0.025, 0.0, 0.025):
        pace.streamed(0.0, engine, overdue=False, same_step=not engine)
        assert pace.stream.rest == pytest.approx(0.005)


def test_an_outage_does_not_make_a_stream_slow() -> None:
    """Half a second of silence, then what it held back at once."""
    pace = Pace()
    for _ in range(50):
        pace.streamed(0.03, 0.025, overdue=False)
    for seconds in (0.5, *16 * [0.0]):
        pace.streamed(seconds, 0.025, overdue=seconds > 0)
        assert pace.stream.rate(pace.costs) == pytest.approx(1 / 0.03)
    for _ in range(100):
        pace.streamed(0.06, 0.025, overdue=False)
    assert gap(pace) == pytest.approx(0.049, abs=0.002), "one token tells little, as a burst may follow"


def test_the_largest_trees_fill_a_frame() -> None:
    """Frames are padded to steps of 64 bytes: one node more would cost the next step, late in a long answer too."""

    def frame(nodes: int) -> int:
        return len(encode(Verify(0, 60_000, 60_000, *pack_tree(TokenTree.chain(range(nodes))))))

    assert frame(LARGEST.nodes) == 256 < frame(LARGEST.nodes + 1)


def test_little_more_is_drafted_than_was_worth_sending() -> None:
    pace = Pace()
    before = pace.tree.worth_drafting()
    for _ in range(40):
        pace.verified(TokenTree.chain(range(50)), [], [], 0.1, 0.05, 0.0)
    assert pace.tree.worth_drafting() == 100 > before
    for _ in range(80):
        pace.verified(TokenTree.chain([1]), [], [], 0.1, 0.05, 0.0)
    assert 2 < pace.tree.worth_drafting() < before  # enough to see whether more would be


def test_one_tree_beside_a_stream_tells_what_trees_cost() -> None:
    """Small trees are worth sending here; the first one drafted says so."""
    pace = Pace()
    pace.linked(welcome(CPU), 0.001)
    before = pace.tree.rate(pace.costs)
    pace.foreseen(TokenTree.chain([1, 2, 3]), [], [0], 0.0)
    assert pace.tree.nodes == 3 and pace.tree.rate(pace.costs) > 1.1 * before


def test_what_trees_bring_is_told_from_their_promises() -> None:
    """What comes of single trees scatters; what their nodes promise, calibrated, hardly."""
    drafts, pace, seen = Drafts(0.6, boast=1.25), Pace(), list[float]()
    for number in range(400):
        tree, claimed, _ = drafts.tree(8 + number % 8)
        pace.foreseen(tree, claimed, drafts.walk(tree), 0.0)
        seen.append(pace.tree.tau)
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
    assert pace.costs.step(15) == pytest.approx(0.1) and pace.costs.step(0) == pytest.approx(0.05)
    for _ in range(40):
        pace.streamed(0.15, 0.15, overdue=False)
    assert pace.costs.step(15) == pytest.approx(0.3, rel=0.01) and pace.costs.step(0) == pytest.approx(0.15, rel=0.01)
