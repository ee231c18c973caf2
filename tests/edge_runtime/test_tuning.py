"""A session's measurements, and their effect on its requests."""

from __future__ import annotations

import random

import pytest

from edge_runtime.session.actions import Compare, DraftTree, Send
from edge_runtime.session.settled import Settled
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.tuning import Tuning
from edge_runtime.session.verifier import VerifierState
from edge_runtime.speed.arms import PRIOR_STEPS, Arm, TreeArm
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.cost_model import OUTLIER, SMOOTHING
from edge_runtime.speed.explorer import EVERY
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Generate, Verdict, Welcome
from tests.edge_runtime.world import SimulatedLink, World

CURVE = CostCurve((1, 64), (0.02, 0.021))


def streaming_world(rtt: float, tuning: Tuning | None = None) -> World:
    """A link on which a stream is the faster mode, where a long answer has begun."""
    world = World(random.Random(2), 60, link=SimulatedLink(rtt, CURVE, 1.0), tuning=tuning or Tuning())
    world.do(world.session.start(0.0))
    world.connect()
    return world


def test_a_session_begins_in_the_faster_mode() -> None:
    assert streaming_world(0.5).session.arm is Arm.STREAM
    assert streaming_world(0.0001).session.arm is Arm.TREE


def test_the_time_to_a_streams_first_token_is_no_gap() -> None:
    """It had to be asked for: after a verdict on a tree, too."""
    world = streaming_world(0.0001)
    controller = world.session.tuning.controller
    while world.session.stats.rounds < 1:
        world.run_job()
        world.deliver()
    controller.pinned = Arm.STREAM
    while world.session.arm is Arm.TREE:
        world.run_job()
        world.deliver()
    world.now += 5.0
    world.deliver()
    assert world.session.stats.streamed == 1 and controller.stream.tokens == 0
    world.deliver()
    gap = controller.stream.first * 0.02 + 0.002
    assert controller.stream.tokens == 1 and controller.rates()[Arm.STREAM] == pytest.approx(1 / gap, rel=0.01)


def test_what_is_read_before_a_first_tree_is_no_part_of_a_round() -> None:
    """A long prompt, or what was streamed meanwhile, takes the drafter longer than what a round adds."""
    world = streaming_world(0.0001)
    session, controller = world.session, world.session.tuning.controller

    def round_after(seconds: float) -> None:
        world.now += seconds
        world.run_job()
        world.deliver()

    while session.stats.rounds < 2:  # the first came with the prompt
        round_after(3.0)
    assert controller.costs.exposed == 0.0
    round_after(0.5)
    assert controller.tree.step is not None  # drafting takes no longer than this, so that something else took so long
    assert controller.costs.exposed == pytest.approx(SMOOTHING * OUTLIER * PRIOR_STEPS * controller.tree.step)
    session.tuning.controller.pinned = Arm.STREAM
    while session.arm is Arm.TREE or session.stats.streamed < 3:
        world.run_job()
        world.deliver()
    session.tuning.controller.pinned = Arm.TREE
    while session.arm is Arm.STREAM:
        world.deliver()
    rounds = session.stats.rounds
    before = controller.costs.exposed
    while session.stats.rounds == rounds:
        round_after(3.0)
    assert controller.costs.exposed == before


def test_a_verdict_that_a_suspended_device_reads_late_tells_nothing_of_the_link() -> None:
    """It may be read before the clock ticks, so that nothing was given up yet."""
    tuning, verifier = Tuning(), verifier_state()
    controller, curve = tuning.controller, CostCurve((1, 64), (0.02, 0.021))
    controller.linked(Welcome(1, "t", "d", 9, 9, 9, 9, "", curve.pack()), 0.001)
    for seq, (sent, wait) in enumerate([(0.0, 0.03), (1.0, 9.0), (20.0, 0.03)], start=1):
        verifier.verify(Arm.TREE, TokenTree.chain([1]), 4 + seq, sent, (-0.1,))
        verdict = Verdict(0, seq, 4 + seq, b"", 7, 0, b"", engine_us=20_000)
        settled = verifier.settle(verdict, 4 + seq, sent + wait)
        assert settled and settled.late == (wait > 1)
        tuning.answered(settled, sent + wait)
        assert (
            controller.costs.rtt is not None
            and controller.costs.rtt < 0.011
            and controller.tree.trees == (seq if seq < 2 else seq - 1)
        )


def test_a_tree_that_is_sent_again_behind_an_outage_tells_nothing() -> None:
    tuning = Tuning()
    controller, curve = tuning.controller, CostCurve((1, 64), (0.02, 0.021))
    controller.linked(Welcome(1, "t", "d", 9, 9, 9, 9, "", curve.pack()), 0.001)
    verifier = verifier_state()
    verifier.verify(Arm.TREE, TokenTree.chain([1]), 5, 0.0, (-0.1,))
    settled = verifier.settle(Verdict(0, 1, 5, bytes([0]), 7, 0, b"", engine_us=20_000), 5, 0.03)
    assert settled
    tuning.answered(settled, 0.03)
    tuning.asked(Arm.TREE, 0.035)
    assert controller.costs.exposed == pytest.approx(0.2 * 0.005)
    tuning.asked(Arm.TREE, 40.0)
    assert controller.costs.exposed == pytest.approx(0.2 * 0.005)


def test_an_answer_forgets_the_one_before_and_goes_on_as_it_was_on_a_new_link() -> None:
    controller = Controller(tree=TreeArm(1.1, 2.5))
    Tuning(controller).begin()
    assert controller.tree.tau == 2.5
    controller.tree.tau = 1.1
    going_on = Tuning(controller)
    going_on._untold = False
    going_on.begin()
    assert controller.tree.tau == 1.1


def test_a_stream_is_compared_with_trees_and_what_comes_true_is_measured() -> None:
    world = streaming_world(0.04)
    controller = world.session.tuning.controller
    while not world.comparisons and not world.done:
        world.deliver()
    asked = world.comparisons.pop()
    wrong = Draft(TokenTree.chain([0, 1]), (-0.1, -0.2), 2)
    streamed = len(asked.prefix) - 3
    assert asked.prefix == world.session.committed and world.session.stats.streamed == streamed
    assert EVERY <= streamed <= EVERY + 1 and asked.arm is Arm.TREE
    assert world.session.tree_compared(wrong, len(asked.prefix), 0.003) == [] and controller.tree.trees == 0
    world.deliver()
    assert controller.costs.exposed == pytest.approx(0.2 * 0.003) and controller.tree.trees > 0


def test_a_pinned_stream_is_compared_with_nothing() -> None:
    world = streaming_world(0.5, Tuning(Controller(pinned=Arm.STREAM)))
    while not world.done:
        world.deliver()
    assert "Compare" not in world.trace and world.session.stats.streamed > 8


def test_what_the_drafter_reads_first_is_no_step() -> None:
    """Otherwise trees would stay small for as long as a stream writes: a long prompt looks like a slow drafter."""
    tuning = Tuning()
    draft = Draft(TokenTree.chain([1, 2]), (-0.1, -0.2), 2)
    tuning.drafted(Arm.TREE, draft, 3.0, wanted=True)
    assert tuning.controller.tree.step is None
    told = dict.fromkeys(("ended", "after_open", "late", "same_step", "asked_for"), False)
    tuning.answered(Settled(Arm.TREE, draft.tree, draft.scores, (0,), [1, 5], 0.1, 0.05, **told), 1.0)
    tuning.drafted(Arm.TREE, draft, 0.01, wanted=True)
    assert tuning.controller.tree.step == 0.005


def test_a_tree_that_is_far_too_large_is_sent_in_part() -> None:
    world = streaming_world(0.0001)
    while world.session.stats.rounds < 3:
        world.run_job()
        world.deliver()
    (job,) = world.jobs
    assert isinstance(job, DraftTree) and job.gain is not None
    unlikely = Draft(TokenTree.chain([1] * 5), (-0.1, -9.0, -9.5, -9.6, -9.7))
    sent = world.session.tree_ready(unlikely, job.version, world.now)[0]
    assert isinstance(sent, Send) and not isinstance(sent.message, Generate)
    request = world.session.verifier.in_flight
    assert request and 0 < len(request.tree) < 5


def test_foreseen() -> None:
    tree = TokenTree((1, 2, 3), (-1, 0, 0))
    assert tree.foreseen([]) is None and tree.foreseen([1]) is None
    assert tree.foreseen([9]) == [] and tree.foreseen([1, 3, 7]) == [0, 2]
    assert Compare([1], 8, 4).gain is None


def verifier_state() -> VerifierState:
    return VerifierState(0, bytes(16), Sampling(), None, 64, Patience(), RoundTimer())


def streamed_steps(seconds: float, tokens: int, told: bool = True) -> list[float]:
    """How long each step of a stream is waited for, where a step takes so long and brings so many tokens."""
    verifier = verifier_state()
    verifier.generate(5, 200, 0.0)
    now, allowed = 0.0, []
    for _ in range(20):
        now += seconds
        for number in range(tokens):
            request = verifier.in_flight
            assert request is not None
            allowed += [request.due - request.sent] if not number else []
            own = told and not number
            assert verifier.settle(Verdict(0, 1, 5, b"", 7, 0, b"", engine_us=int(1e6 * seconds * own)), 5, now)
    return allowed[1:]  # the first had to be asked for


@pytest.mark.parametrize("seconds", [0.02, 0.3, 1.3])
@pytest.mark.parametrize("tokens", [1, 4, 17])
def test_tokens_of_one_step_make_no_later_step_overdue(seconds: float, tokens: int) -> None:
    """They come at once, and say nothing of when the next step's are due."""
    assert min(streamed_steps(seconds, tokens)) > seconds
    assert streamed_steps(seconds, tokens) == streamed_steps(seconds, 1)
    assert streamed_steps(seconds, 1, told=False) == streamed_steps(seconds, 1), "a verifier that tells no times"


def test_only_a_request_that_waits_for_nothing_else_tells_the_way() -> None:
    """Not one behind OPEN, whose wait is its own prompt's, not the first step's other tokens, and not a late one."""
    tuning = Tuning()

    def streamed(wait: float, after_open: bool = False, same_step: bool = False, late: bool = False) -> float | None:
        told = {"ended": False, "after_open": after_open, "late": late, "same_step": same_step, "asked_for": True}
        tuning.answered(Settled(Arm.STREAM, TokenTree(), (), (), [5], wait, 0.02, **told), 1.0)
        return tuning.controller.costs.rtt

    assert streamed(3.0, after_open=True) is None
    assert streamed(3.0, late=True) is None
    assert streamed(0.1) == pytest.approx(0.08)
    assert streamed(0.02, same_step=True) == pytest.approx(0.08)


def test_the_first_steps_other_tokens_say_nothing_of_a_streams_rate() -> None:
    """The first one had to be asked for, so that their step is not measured."""
    tuning, verifier, now = Tuning(), verifier_state(), 0.0
    verifier.generate(5, 200, now)
    for step, engine in enumerate((40_000, 0, 0, 0, 0, 40_000, 0, 40_000)):
        now += engine / 1e6
        settled = verifier.settle(Verdict(0, 1, 5 + step, b"", 7, 0, b"", engine_us=engine), 5 + step, now)
        assert settled
        tuning.answered(settled, now)
        assert tuning.controller.stream.tokens == (0 if step < 5 else step - 4)
    # two of three measured tokens began a step, on top of the four that a new stream is taken to have begun
    assert tuning.controller.rates()[Arm.STREAM] == pytest.approx(1 / (0.04 * 5 / 6), rel=0.01)
