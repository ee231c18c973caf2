"""The understudy drafts chains where they bring more tokens per second than trees, and only then."""

from __future__ import annotations

import random

import pytest

from edge_runtime.session.actions import DraftChain, DraftTree, Send
from edge_runtime.session.offline import Reading
from edge_runtime.session.policy import Policy
from edge_runtime.session.session import Session
from edge_runtime.session.states import Writer
from edge_runtime.speed.chains import (
    COMPARE_EVERY,
    DOUBLINGS,
    FIRST_TOKENS,
    MOST_TOKENS,
    TRY_AGAIN,
    Chains,
)
from edge_runtime.speed.controller import Controller, Mode
from edge_runtime.speed.pace import Pace
from edge_runtime.speed.tuning import TreeSize, Tuning
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Verify
from tests.edge_runtime.world import SimulatedLink, World

CURVE = CostCurve((1, 64), (0.06, 0.07))
CHAIN = Draft(TokenTree.chain([1, 2, 3, 4]), (-0.1, -0.2, -0.3, -0.4), 3, chain=True)


def known(token: float, right: float) -> Chains:
    return Chains(ready=True, token=token, right=1000 * right, judged=1000)


def simulated(length: int, token: float, right: float, waiting: float) -> float:
    """Tokens per second of chains whose tokens are right by chance, drafted on with while they are verified."""
    rng, tokens, seconds, ready = random.Random(0), 0, 0.0, 0.0
    for _ in range(20000):
        seconds += max(0.0, length * token - ready) + waiting
        came = next((place for place in range(length + 1) if rng.random() >= right), length + 1)
        tokens += min(came, length) + 1
        ready = min(waiting, length * token) if came > length else 0.0
    return tokens / seconds


@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("token", [0.005, 0.02])
def test_the_promised_rate_is_what_chains_bring(right: float, token: float) -> None:
    length, rate = known(token, right).best(0.03, lambda nodes: 0.06)
    assert rate == pytest.approx(simulated(length, token, right, 0.09), rel=0.03)
    others = (simulated(other, token, right, 0.09) for other in range(1, MOST_TOKENS + 1))
    assert rate > 0.97 * max(others)


def test_chains_grow_with_what_is_right_and_with_the_way_to_the_target() -> None:
    def length(token: float, right: float, waiting: float) -> int:
        return known(token, right).best(waiting, lambda nodes: 0.0)[0]

    assert length(0.02, 0.5, 0.09) < length(0.02, 0.9, 0.09) <= length(0.02, 0.9, 0.5)
    assert length(0.02, 0.9, 0.09) > length(0.1, 0.9, 0.09)


def test_what_came_of_chains_is_learned() -> None:
    chains = Chains()
    for _ in range(200):
        chains.verified(4, 4)
        chains.verified(4, 0)
    assert chains.right / chains.judged == pytest.approx(0.8, abs=0.03)
    chains.drafted(0, 0.0)
    assert chains.token is None
    chains.drafted(4, 0.08)
    chains.drafted(2, 0.04)
    assert chains.token == pytest.approx(0.02)


def test_they_are_tried_at_first_and_then_more_and_more_rarely() -> None:
    chains = Chains()
    assert not chains.try_now() and not chains.known
    chains.ready = True
    assert chains.try_now() and chains.try_now()  # until they are known
    chains.drafted(3, 0.3)
    waits = []
    for _ in range(DOUBLINGS + 3):
        waits.append(1)
        while not chains.try_now():
            waits[-1] += 1
    assert waits == [TRY_AGAIN * 2 ** min(count, DOUBLINGS) for count in range(DOUBLINGS + 3)]
    chains.chosen()
    assert sum(chains.try_now() for _ in range(TRY_AGAIN)) == 1
    assert [chains.compares() for _ in range(2 * COMPARE_EVERY)].count(True) == 2


def paced(token: float, right: float = 0.9, tau: float = 2.5) -> Pace:
    """Of a link of 30 ms to a target of 60 ms a step."""
    pace = Pace(curve=CURVE, rtt=0.03, exposed=0.01, tau=tau, usual_tau=tau, chains=known(token, right))
    pace.gap = 0.062
    return pace


def test_pace_asks_for_chains_where_they_are_faster() -> None:
    assert paced(0.01).chain(going_on=False) > FIRST_TOKENS
    assert paced(0.2).chain(going_on=False) == 0
    assert paced(0.01).draft_rate() > 1.5 * paced(0.01).tree_rate()
    assert paced(0.2).draft_rate() == paced(0.2).tree_rate()
    pace = paced(0.01)
    pace.chains.ready = False
    assert pace.chain(going_on=True) == 0 and pace.draft_rate() == pace.tree_rate()


def test_the_margin_keeps_whoever_drafts() -> None:
    pace = paced(0.02)
    pace.tau = pace.chains.best(0.03, pace.step)[1] * pace.round()  # as fast as chains
    assert pace.chain(going_on=True) and not pace.chain(going_on=False)


def test_a_stream_is_left_for_chains_where_trees_are_slower() -> None:
    pace = paced(0.01, tau=1.2)
    controller = Controller(pace, mode=Mode.STREAM)
    assert pace.tree_rate() < pace.stream_rate() < pace.draft_rate()  # type: ignore[operator]
    modes = [controller.choose() for _ in range(pace.config.tokens_to_leave_stream)]
    assert modes[-1] is Mode.TREE and controller.begin() is Mode.TREE


def test_a_chain_is_no_measurement_of_trees() -> None:
    pace = paced(0.01)
    before = pace.tau, pace.usual_tau, pace.nodes, pace.exposed
    pace.chain_verified(4, 2, 0.1, 0.065, 0.0)
    assert (pace.tau, pace.usual_tau, pace.nodes, pace.exposed) == before
    assert pace.written == 3 and pace.rtt == pytest.approx(0.8 * 0.03 + 0.2 * 0.035)


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
    assert session.tuning.pace.chains.token == pytest.approx(0.01)


def test_a_tree_is_drafted_where_the_understudy_fails_or_nothing_is_shaped() -> None:
    world = drafting_world()
    until(world, DraftChain)
    world.fail()
    assert isinstance(world.jobs[0], DraftTree) and not world.session.tuning.pace.chains.ready
    world = drafting_world(shaping=False)
    until(world, DraftTree)
    assert not world.session.tuning.pace.chains.ready


def test_trees_are_drafted_beside_chains_now_and_then() -> None:
    tuning = Tuning()
    first, *others = [tuning.beside_chain() for _ in range(3)]
    assert isinstance(first, TreeSize) and others == [None, None]  # that one is under way
    tuning.compared(Draft(TokenTree.chain([3]), (-0.1,)), 2, 0.01)
    tuning.committed([1, 2, 3, 4])
    later = [tuning.beside_chain() for _ in range(COMPARE_EVERY)]
    assert sum(size is not None for size in later) == 1


def test_chains_beside_a_stream_take_turns_with_trees() -> None:
    tuning = Tuning()
    tuning.pace.chains = known(0.01, 0.9)
    chains = list[bool]()
    for streamed in range(200):
        if size := tuning.comparison(streamed, drafts=True):
            chains.append(isinstance(size, int))
            tuning.compared(CHAIN if chains[-1] else Draft(TokenTree.chain([1]), (-0.1,)), 2, 0.03)
            tuning.committed([1, 2, 1, 2, 9])
    assert chains[:4] == [True, False, True, False]
    assert tuning.pace.chains.judged > 100 and tuning.pace.trees >= 2


def test_nothing_is_known_of_a_chain_behind_the_answers_end() -> None:
    pace = paced(0.01)
    judged, step = pace.chains.judged, pace.step(4)
    pace.chain_verified(4, 0, 0.1, CURVE.at(5), 0.0, ended=True)
    assert pace.chains.judged == judged and pace.step(4) == pytest.approx(step)


def test_an_understudy_that_finds_nothing_is_not_asked_again_in_this_answer() -> None:
    world = drafting_world()
    until(world, DraftChain)
    job = world.jobs.pop()
    assert isinstance(job, DraftChain)
    world.do(world.session.tree_ready(Draft(chain=True), job.version, world.now, 0.0))
    for _ in range(60):
        world.connect()
        world.deliver()
        assert not any(isinstance(job, DraftChain) for job in world.jobs)
        world.run_job()
    assert world.session.stats.rounds > 1


def test_a_chain_is_no_longer_than_the_verifier_takes() -> None:
    tuning = Tuning()
    tuning.pace.chains = known(0.005, 0.95)
    tuning.pace.curve, tuning.pace.rtt = CURVE, 0.1
    assert tuning.chain(64, 64, True) > 8
    free = tuning.pace.draft_rate()
    assert tuning.chain(4, 64, True) == 4 and tuning.pace.draft_rate() < free
    assert tuning.chain(64, 3, True) == 3 and tuning.chain(64, 1, True) == 0
