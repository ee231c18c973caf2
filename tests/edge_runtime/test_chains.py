"""The understudy drafts chains where they bring more tokens per second than trees, and only then."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from edge_runtime.session.actions import DraftChain, DraftTree, Send
from edge_runtime.session.offline import Reading
from edge_runtime.session.policy import Policy
from edge_runtime.session.session import Session
from edge_runtime.session.states import Writer
from edge_runtime.session.tuning import Tuning
from edge_runtime.speed.arms import FIRST_TOKENS, MOST_TOKENS, Arm, ChainArm, StreamArm, TreeArm
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.cost_model import CostModel
from edge_runtime.speed.explorer import EVERY
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Verify
from tests.edge_runtime.world import SimulatedLink, World

CURVE = CostCurve((1, 64), (0.06, 0.07))
CHAIN = Draft(TokenTree.chain([1, 2, 3, 4]), (-0.1, -0.2, -0.3, -0.4), 3)


def known(token: float, right: float) -> ChainArm:
    return ChainArm(ready=True, token=token, right=1000 * right, judged=1000)


def simulated(length: int, token: float, right: float, waiting: float) -> float:
    """Tokens per second of chains whose tokens are right by chance, drafted on with while they are verified."""
    rng, tokens, seconds, ready = random.Random(0), 0, 0.0, 0.0
    for _ in range(20000):
        seconds += max(0.0, length * token - ready) + waiting
        came = next((place for place in range(length + 1) if rng.random() >= right), length + 1)
        tokens += min(came, length) + 1
        ready = min(max(0.0, waiting - token), length * token) if came > length else 0.0  # behind the guess
    return tokens / seconds


@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("token", [0.005, 0.02])
def test_the_promised_rate_is_what_chains_bring(right: float, token: float) -> None:
    length, rate = known(token, right).best(CostModel(CostCurve((1,), (0.06,)), rtt=0.03))
    assert rate == pytest.approx(simulated(length, token, right, 0.09), rel=0.02)
    others = (simulated(other, token, right, 0.09) for other in range(1, MOST_TOKENS + 1))
    assert rate > 0.97 * max(others)


def test_chains_grow_with_what_is_right_and_with_the_way_to_the_target() -> None:
    def length(token: float, right: float, waiting: float) -> int:
        return known(token, right).best(CostModel(rtt=waiting))[0]

    assert length(0.02, 0.5, 0.09) < length(0.02, 0.9, 0.09) <= length(0.02, 0.9, 0.5)
    assert length(0.02, 0.9, 0.09) > length(0.1, 0.9, 0.09)


def test_what_came_of_chains_is_learned() -> None:
    chains = ChainArm()
    for _ in range(200):
        chains.verified(4, 4)
        chains.verified(4, 0)
    assert chains.right / chains.judged == pytest.approx(0.8, abs=0.03)
    chains.drafted(0, 0.0)
    assert chains.token is None
    chains.drafted(4, 0.08)
    chains.drafted(2, 0.04)
    assert chains.token == pytest.approx(0.02)


def paced(token: float, right: float = 0.9, tau: float = 2.5, arm: Arm = Arm.TREE) -> Controller:
    """Of a link of 30 ms to a target of 60 ms a step."""
    costs = CostModel(CURVE, rtt=0.03, exposed=0.01)
    return Controller(costs, TreeArm(tau, tau), known(token, right), StreamArm(rest=0.002), arm=arm)


def test_chains_are_drafted_where_they_are_faster() -> None:
    def drafted(controller: Controller) -> int:
        tuning = Tuning(controller)
        tuning.choose(drafts=True)
        return tuning.chain(64, 64, ready=True)

    assert drafted(paced(0.01)) > FIRST_TOKENS and drafted(paced(0.2)) == 0
    assert paced(0.01).rates()[Arm.CHAIN] > 1.5 * paced(0.01).rates()[Arm.TREE]
    tuning = Tuning(paced(0.01, arm=Arm.CHAIN))
    tuning.choose(drafts=False)
    assert tuning.controller.arm is not Arm.CHAIN and tuning.chain(64, 64, ready=False) == 0


def test_the_margin_keeps_whoever_drafts() -> None:
    for arm in (Arm.CHAIN, Arm.TREE):
        controller = paced(0.02, arm=arm)
        chains = controller.chain.best(controller.costs)[1]
        controller.tree.tau = chains * controller.costs.round(controller.tree.nodes)  # as fast as chains
        assert controller.choose() is arm


def test_a_stream_is_left_for_chains_where_trees_are_slower() -> None:
    controller = paced(0.01, tau=1.2)
    controller.arm = Arm.STREAM
    rates = controller.rates()
    assert rates[Arm.TREE] < rates[Arm.STREAM] < rates[Arm.CHAIN]
    assert [controller.choose() for _ in range(EVERY)] == [Arm.STREAM] * (EVERY - 1) + [Arm.CHAIN]


def test_a_chain_is_no_measurement_of_trees() -> None:
    controller = paced(0.01)
    before = replace(controller.tree), controller.costs.exposed
    controller.chain_verified(4, 2, 0.1, 0.065)
    assert (controller.tree, controller.costs.exposed) == before
    assert controller.costs.rtt == pytest.approx(0.8 * 0.03 + 0.2 * 0.035)


def drafting_world(**options: bool) -> World:
    """Its understudy has read along."""
    link = SimulatedLink(0.03, CURVE, 1.0)
    world = World(random.Random(1), 40, Policy(understudy="warm"), link=link, tuning=Tuning(**options), understudy=True)
    world.do(world.session.start(world.now))
    world.run_reading()
    assert world.session.offline.reading is Reading.DONE
    return world


def until(world: World, kind: type) -> None:
    for _ in range(50):
        if world.jobs and isinstance(world.jobs[0], kind):
            return
        world.connect()
        world.deliver()
        if not (world.jobs and isinstance(world.jobs[0], kind)):
            world.run_job()
    raise AssertionError(f"no {kind.__name__} came: {world.trace}")


def test_a_session_sends_a_chain_and_goes_on_with_it_while_it_waits() -> None:
    world = drafting_world()
    until(world, DraftChain)
    session: Session = world.session
    job = world.jobs.pop()
    assert isinstance(job, DraftChain) and job.tokens == FIRST_TOKENS and job.prefix == session.committed
    actions = session.tree_ready(CHAIN, job.version, world.now, 0.03)
    assert [type(action).__name__ for action in actions] == ["Send", "DraftAhead"]
    assert isinstance(actions[0], Send) and isinstance(actions[0].message, Verify)
    assert session.drafts_ahead is Writer.UNDERSTUDY
    assert session.tuning.controller.chain.token == pytest.approx(0.01)


def test_a_tree_is_drafted_where_the_understudy_fails_or_nothing_is_shaped() -> None:
    world = drafting_world()
    until(world, DraftChain)
    world.fail()
    assert isinstance(world.jobs[0], DraftTree) and not world.session.tuning.controller.chain.ready
    world = drafting_world(shaping=False)
    until(world, DraftTree)
    assert not world.session.tuning.controller.chain.ready


def test_trees_are_drafted_beside_chains_now_and_then() -> None:
    tuning = Tuning(paced(0.01, arm=Arm.CHAIN))
    came = list[bool]()
    for _ in range(3 * EVERY):
        size = tuning.comparison(drafts=True)
        came.append(size is not None)
        if size:
            assert size[0] is Arm.TREE
            assert tuning.comparison(drafts=True) is None  # that one is under way
            tuning.compared(Draft(TokenTree.chain([3]), (-0.1,)), 2, 0.01)
            tuning.committed([1, 2, 3, 4])
    assert came.count(True) == 3 and tuning.controller.tree.trees == 3


def test_chains_and_trees_are_drafted_beside_a_stream() -> None:
    tuning = Tuning(paced(0.01, arm=Arm.STREAM))
    arms = list[Arm]()
    for _ in range(200):
        tuning.controller.streamed(0.06, 0.06)
        if asked := tuning.comparison(drafts=True):
            arms.append(asked[0])
            tuning.compared(CHAIN if asked[0] is Arm.CHAIN else Draft(TokenTree.chain([1]), (-0.1,)), 2, 0.03)
            tuning.committed([1, 2, 1, 2, 9])
    assert arms[0] is Arm.CHAIN and arms.count(Arm.TREE) >= 1 and arms.count(Arm.CHAIN) >= 2
    assert tuning.controller.tree.trees == arms.count(Arm.TREE)


def test_nothing_is_known_of_a_chain_behind_the_answers_end() -> None:
    controller = paced(0.01)
    judged, step = controller.chain.judged, controller.costs.step(4)
    controller.chain_verified(4, 0, 0.1, CURVE.at(5), ended=True)
    assert controller.chain.judged == judged and controller.costs.step(4) == pytest.approx(step)


def test_an_understudy_that_finds_nothing_is_not_asked_again_in_this_answer() -> None:
    world = drafting_world()
    until(world, DraftChain)
    job = world.jobs.pop()
    assert isinstance(job, DraftChain)
    world.do(world.session.tree_ready(Draft(), job.version, world.now, 0.0))
    for _ in range(60):
        world.connect()
        world.deliver()
        assert not any(isinstance(job, DraftChain) for job in world.jobs)
        world.run_job()
    assert world.session.stats.rounds > 1


def test_a_chain_is_no_longer_than_the_verifier_takes() -> None:
    controller = paced(0.005, 0.95, arm=Arm.CHAIN)
    tuning = Tuning(controller)
    assert tuning.chain(64, 64, True) > 8
    free = controller.rates()[Arm.CHAIN]
    assert tuning.chain(4, 64, True) == 4 and controller.rates()[Arm.CHAIN] < free
    assert tuning.chain(64, 3, True) == 3 and tuning.chain(64, 1, True) == 0
