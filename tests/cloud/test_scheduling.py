"""Shares, budgets and cost curves, and that pruning to them is lossless."""

from __future__ import annotations

import os
import queue
import random
import time
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.engine.drawing import HostLogits
from cloud.engine.fair_shares import fair_shares
from cloud.engine.kvpool import KVPool
from cloud.engine.request import EngineRequest
from cloud.engine.retiming import Retiming
from cloud.engine.step_pace import CHUNK_SECONDS, StepPace
from cloud.engine.tree_budget import FAR, LEAST, SIZES, TIMED_TOKENS, StepCosts, TreeBudget, measure_costs
from cloud.engine.watchdog import Watchdog
from cloud.torch_engine.runner import padded_rows
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Generate, Open, Verdict, pack_ids
from outrider_core.targets.part import Part
from tests.cloud.drive import Direct, expected_path, make_verifier, random_tree, started
from tests.tiers import first
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG, until

pytestmark = pytest.mark.gpu

demands = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=12)


@given(demands, st.integers(0, 200))
def test_shares_are_fair(asked: list[tuple[int, int]], capacity: int) -> None:
    owners, wants = [owner for owner, _ in asked], [want for _, want in asked]
    shares = fair_shares(owners, wants, capacity)
    assert sum(shares) == min(capacity, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    given_to, asked_by = defaultdict[int, int](int), defaultdict[int, int](int)
    for owner, share, want in zip(owners, shares, wants, strict=True):
        given_to[owner] += share
        asked_by[owner] += want
    for one in given_to:
        for other in given_to:
            # who did not get all that was asked for has no less than any other, but for the remainder of a division
            assert given_to[one] == asked_by[one] or given_to[one] >= given_to[other] - 1
    for i, (owner, share, want) in enumerate(zip(owners, shares, wants, strict=True)):
        same = [s for j, (o, s) in enumerate(zip(owners, shares, strict=True)) if o == owner and j != i]
        assert share == want or all(share >= s - 1 for s in same)


CURVE = CostCurve((1, 8, 32, 128), (10.0, 11.0, 20.0, 80.0))


def test_cost_curve_is_piecewise_linear() -> None:
    assert [CURVE.at(n) for n in (0, 1, 8, 20, 32, 80, 128)] == [10, 10, 11, 15.5, 20, 50, 80]
    assert CURVE.at(160) == pytest.approx(100)


def test_budget_follows_load() -> None:
    """Cheap steps and long pauses: large trees. Many sessions on a compute-bound device: small ones."""
    budget = TreeBudget(128, StepCosts(CostCurve((1, 64, 128, 256), (0.004, 0.0042, 0.005, 0.009))))
    alone = budget.nodes
    for _ in range(200):
        budget.observe_step([32] * 40, 40 * 2)
    crowded = budget.nodes
    assert alone >= 48 and LEAST <= crowded <= 16
    for _ in range(300):
        budget.observe_pause(0.4)
        budget.observe_step([32], 2)
    assert budget.nodes >= alone
    assert TreeBudget(24).nodes == 24
    steep = TreeBudget(128, StepCosts(CostCurve((1, 128), (0.01, 1.28))), pause=0.0)
    assert steep.nodes == LEAST
    for _ in range(50):
        steep.observe_pause(100.0)  # a user's pause teaches nothing
    assert steep.pause == 0.0


@given(st.integers(0, 400), st.integers(1, 600))
def test_prefill_at_most_doubles_a_step(tokens: int, most: int) -> None:
    budget = TreeBudget(100, StepCosts(CURVE))
    room = budget.prefill_room(tokens, most)
    assert min(16, most) <= room <= most
    assert not tokens or room <= 16 or CURVE.at(tokens + room) <= 2 * CURVE.at(tokens)
    assert room == most or CURVE.at(tokens + room + 1) > 2 * CURVE.at(tokens)
    assert TreeBudget(100).prefill_room(tokens, most) == most


@given(st.lists(st.tuples(st.lists(st.integers(0, 128), max_size=20), st.floats(0, 1)), max_size=30))
def test_budget_is_always_a_size(steps: list[tuple[list[int], float]]) -> None:
    budget = TreeBudget(100, StepCosts(CURVE))
    for sizes, share in steps:
        budget.observe_step(sizes, int(sum(sizes) * share))
        assert budget.nodes in (*SIZES, 100) and LEAST <= budget.nodes <= 100
        assert budget.tau(budget.nodes) > 1


def test_costs_are_measured_on_the_real_target() -> None:
    verifier = make_verifier(tiny_model(), ())
    costs = measure_costs(verifier.engine.runner, 512)
    assert costs.curve.tokens == TIMED_TOKENS and costs.session == 0.0  # no room for several sessions
    assert all(0 < a <= b for a, b in zip(costs.curve.seconds, costs.curve.seconds[1:], strict=False))
    small = measure_costs(verifier.engine.runner, 20).curve
    assert small.tokens == (1, 4, 8, 16) and measure_costs(verifier.engine.runner, 3).at(5) > 0
    verifier.calibrate()
    assert LEAST <= verifier.welcome().tree_budget <= 24


class Disturbed:
    """Steps that take what `costs` say and, one in four, up to five times as long; `now` is the clock."""

    def __init__(self, costs: StepCosts, seed: int, disturbed: float = 0.25) -> None:
        self.costs, self.rng, self.share, self.now, self.steps = costs, random.Random(seed), disturbed, 0.0, 0

    def forward(self, parts: list[Part]) -> HostLogits:
        tokens = sum(map(len, parts))
        slower = self.rng.uniform(1, 5) if self.rng.random() < self.share else 1.0
        past = parts[0].past if parts[0].past == FAR else 0  # few tokens count as none
        self.now += self.costs.at(tokens, len(parts), past) * slower
        self.steps += 1
        return HostLogits(np.zeros((tokens, 1), np.float32))

    def rest(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(20))
def test_a_disturbance_makes_no_size_look_dear(seed: int) -> None:
    """Of four runs one is undisturbed nearly always, and two that agree were; no size costs less than a smaller."""
    true = CostCurve((1, 16, 128), (0.075, 0.11, 0.4))
    disturbed = Disturbed(StepCosts(true), seed)
    found = measure_costs(disturbed, 512, clock=lambda: disturbed.now).curve  # type: ignore[arg-type]
    assert list(found.seconds) == sorted(found.seconds)
    assert found.at(1) <= 1.1 * true.at(4) and found.at(128) == pytest.approx(true.at(128), rel=0.1)


def test_an_undisturbed_start_takes_two_runs_of_each_size() -> None:
    calm = Disturbed(StepCosts(CostCurve((1, 128), (0.01, 0.1))), 0, disturbed=0.0)
    measure_costs(calm, 512, clock=lambda: calm.now)  # type: ignore[arg-type]
    assert calm.steps == len(TIMED_TOKENS) * (1 + 2) + 1  # one of three warms up; the last gives memory back


def test_larger_steps_than_a_long_one_are_not_warmed_up() -> None:
    slow = Disturbed(StepCosts(CostCurve((1, 32, 128), (0.06, 0.11, 0.23))), 0, disturbed=0.0)
    measure_costs(slow, 512, clock=lambda: slow.now)  # type: ignore[arg-type]
    assert slow.steps == len(TIMED_TOKENS) * (1 + 2) - 2 + 1  # without 64 and 128; the last as above


def test_sizes_behind_a_dear_one_are_not_timed() -> None:
    """The curve goes on as a line there."""
    true = CostCurve((1, 16, 64, 128), (0.025, 0.05, 0.17, 0.34))
    calm = Disturbed(StepCosts(true), 0, disturbed=0.0)
    found = measure_costs(calm, 512, clock=lambda: calm.now).curve  # type: ignore[arg-type]
    assert found.tokens == (1, 4, 8, 16, 32, 64) and found.at(128) == pytest.approx(true.at(128), rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_no_disturbance_leaves_out_what_is_not_dear(seed: int) -> None:
    """Up to 64 tokens everything is timed, and all of a fast target, whatever it takes now and then."""
    for true, least in (((0.025, 0.05, 0.17, 0.34), 6), ((0.005, 0.005, 0.006, 0.007), 7)):
        disturbed = Disturbed(StepCosts(CostCurve((1, 16, 64, 128), true)), seed)
        clock = partial(getattr, disturbed, "now")
        tokens = measure_costs(disturbed, 512, clock=clock).curve.tokens  # type: ignore[arg-type]
        assert tokens[:least] == TIMED_TOKENS[:least]


def test_what_a_session_costs_beside_its_tokens_is_measured() -> None:
    true = StepCosts(CostCurve((1, 16, 128), (0.075, 0.11, 0.4)), 0.003)
    steady = Disturbed(true, 0, disturbed=0.0)
    found = measure_costs(steady, 4096, clock=lambda: steady.now)  # type: ignore[arg-type]
    assert found.session == pytest.approx(0.003) and found.at(64, 9) == pytest.approx(true.at(64, 9))
    assert found.at(64, 0.5) == found.at(64) and (found.context, found.token_context) == pytest.approx((0, 0))


@pytest.mark.parametrize("context", [(0.004, 0.002), (0.0, 0.003), (0.005, 0.0), (0.0, 0.0)])
def test_what_the_tokens_before_cost_a_step_and_each_of_its_tokens_is_measured(context: tuple[float, float]) -> None:
    true = StepCosts(CostCurve((1, 16, 128), (0.01, 0.03, 0.2)), 0.0, *context)
    steady = Disturbed(true, 0, disturbed=0.0)
    found = measure_costs(steady, 4096, clock=lambda: steady.now, context=2048)  # type: ignore[arg-type]
    assert (found.context, found.token_context) == pytest.approx(context, abs=1e-9)
    assert found.at(3, 1, FAR / 2) == pytest.approx(true.at(3) + (context[0] + 3 * context[1]) / 2)
    for rows, longest in ((512, 2048), (4096, 1024)):
        short = measure_costs(steady, rows, clock=lambda: steady.now, context=longest)  # type: ignore[arg-type]
        assert (short.context, short.token_context) == (0.0, 0.0)
    chances = [0.5, 0.25, 0.2, 0.15]
    few, many = (TreeBudget(24, found).worth_adding(chances, 1, 1.0, 1, past) for past in (0, 2 * FAR))
    assert (few > many) == (context[1] > 0) or (few, many) == (4, 4)


def test_budget_and_welcome_know_what_sessions_cost() -> None:
    """What sessions cost beside their tokens makes trees larger, and is part of what devices are told."""
    curve = CostCurve((1, 128), (0.004, 0.03))
    budgets = [TreeBudget(128, StepCosts(curve, each), sessions=16.0) for each in (0.0, 0.01)]
    assert budgets[0].nodes < budgets[1].nodes
    told = [budget.advertised() for budget in budgets]
    assert told[0] == curve and told[1] is not None
    assert told[1].seconds == pytest.approx((0.004 + 0.15, 0.03 + 0.15))
    assert budgets[0].prefill_room(64, 512) < budgets[1].prefill_room(64, 512)
    assert TreeBudget(24).advertised() is None


@pytest.mark.parametrize("seconds", [0.0001, 0.02, 0.4, 3.0])
def test_a_chunk_takes_as_many_tokens_as_steps_have_time_for(seconds: float) -> None:
    """Measured in the steps that run, and before the first by what was timed at start, on a machine of any speed."""
    unknown = StepPace(TreeBudget(24))
    assert unknown.chunk(512) == 128 and unknown.longest(512) == 0.0
    expected = StepPace(TreeBudget(24, StepCosts(CostCurve((1, 128), (seconds, 128 * seconds)))))
    for pace in (unknown, expected):
        for _ in range(2):
            assert pace is unknown or pace.chunk(512) in (16, 512) or pace.chunk(512) * seconds <= CHUNK_SECONDS
            pace.observe(1, 1000.0)  # a single token says little of a chunk
            pace.observe(64, 64 * seconds)
        chunk = pace.chunk(512)
        assert 16 <= chunk <= 512 and (chunk == 16 or chunk * seconds <= CHUNK_SECONDS)
        assert chunk == 512 or (chunk + 1) * seconds > CHUNK_SECONDS * 0.99
        assert pace.longest(chunk) >= 10 * chunk * seconds
        pace.observe(64, 640 * seconds)  # the machine is busy from now on
        assert pace.chunk(512) <= max(16, chunk) and pace.longest(100) >= 1000 * seconds
    assert unknown.chunk(7) == 7


def test_a_long_prompt_on_a_slow_machine_goes_in_small_steps() -> None:
    """A step that the machine is too slow for would delay everybody, and look like one that hangs."""
    verifier = make_verifier(tiny_model(), (), max_model_len=600, kv_tokens=1024, prefill_chunk=512)
    verifier.scheduler.budget.costs = StepCosts(CostCurve((1, 128), (0.3, 38.0)))
    session, sizes = b"s" * 16, list[int]()
    forward = verifier.engine.runner.forward

    def counted(parts: list[Part]) -> Any:
        sizes.append(sum(map(len, parts)))
        return forward(parts)

    verifier.engine.runner.forward = counted  # type: ignore[method-assign, assignment]
    with started(verifier) as direct:
        direct.open(session, [5] * 500)
        verdict = direct.verify(session, 1, 500, TokenTree()).get(timeout=HANG)
        assert isinstance(verdict, Verdict)
    assert sizes[0] == 16 and sizes[1] > 16  # this machine is faster, which the first step has shown
    assert verifier.scheduler.budget.slowdown < 1.0


def test_a_hang_is_told_from_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("cloud.engine.watchdog.time.monotonic", lambda: now)
    watchdog = Watchdog(120.0)
    watchdog.start(longest=600.0)
    now = 599.0
    assert not watchdog.hung
    now = 601.0
    assert watchdog.hung
    watchdog.start()
    now += 121.0
    assert watchdog.hung
    watchdog.end()
    assert not watchdog.hung


def test_a_start_on_a_busy_machine_is_not_its_measure_for_good() -> None:
    """Larger steps suffer more from neighbours. What real steps take, and steps of an idle verifier, put it right."""
    true = CostCurve((1, 16, 128), (0.02, 0.024, 0.08))
    idle = TreeBudget(64, StepCosts(true)).nodes
    busy = StepCosts(CostCurve((1, 16, 128), (0.03, 0.06, 0.6)))
    served = TreeBudget(64, busy)
    assert served.nodes < idle
    for _ in range(200):
        served.observe_seconds(16, 1, 0, true.at(16))
    assert served.seconds(16) == pytest.approx(true.at(16), rel=0.01)
    again, calm = TreeBudget(64, busy, slowdown=1.7), Disturbed(StepCosts(true), 3)
    pool = KVPool(512, lambda sources, targets: None)
    assert pool.reserve(b"s" * 16, 64, set())
    retiming = Retiming(calm, pool, again, clock=lambda: calm.now)  # type: ignore[arg-type]
    for _ in range(5 * len(busy.curve.tokens)):
        retiming.tick()
    assert again.costs is not None and again.costs.curve.at(16) == pytest.approx(true.at(16), rel=0.05)
    assert again.nodes == idle and again.slowdown == 1.0 and pool.owners() == [b"s" * 16]
    full = KVPool(64, lambda sources, targets: None)
    assert full.reserve(b"s" * 16, 64, set())
    steps = calm.steps
    Retiming(calm, full, again, clock=lambda: calm.now).tick()  # type: ignore[arg-type]
    Retiming(calm, pool, TreeBudget(64), clock=lambda: calm.now).tick()  # type: ignore[arg-type]
    assert calm.steps == steps and full.owners() == [b"s" * 16]


def test_an_idle_verifier_times_its_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud.engine.batcher.IDLE_SECONDS", 0.01)
    verifier = make_verifier(tiny_model(), ())
    verifier.calibrate()
    before = verifier.scheduler.budget.costs
    with started(verifier):
        assert until(lambda: verifier.scheduler.budget.costs is not before)


VOCAB = 199


@pytest.mark.parametrize("budget", first(1, [3, 1, 7]))
def test_pruned_trees_lose_no_token(budget: int) -> None:
    """Whatever is cut away, what is emitted is the target's own; the node numbers are the device's."""
    model = tiny_model("qwen3", seed=9)
    rng = random.Random(budget)
    with started(make_verifier(model, (), tree_budget=budget, kv_tokens=2048)) as direct:
        talks = []
        for index in range(4):
            prompt = [rng.randrange(4, VOCAB) for _ in range(5)]
            sampling = Sampling(temperature=0.7 * (index % 2), seed=index)
            talk = (os.urandom(16), prompt, plain_decode(model, prompt, sampling, 40, eos_ids=()))
            direct.open(talk[0], prompt, 0, sampling)
            talks.append(talk)
        accepted, sent = 0, 0
        done = [0] * 4
        for seq in range(1, 6):
            waiting = []
            for (session, prompt, truth), at in zip(talks, done, strict=True):
                tree = random_tree(rng, truth[at : at + 10], VOCAB)
                waiting.append((tree, direct.verify(session, seq, len(prompt) + at, tree)))
            for index, (tree, replies) in enumerate(waiting):
                verdict = replies.get(timeout=HANG)
                assert isinstance(verdict, Verdict) and verdict.tree_budget == budget
                truth = talks[index][2][done[index] :]
                path = list(verdict.accepted)
                assert path == expected_path(tree, truth)[: len(path)]
                emitted = [tree.tokens[node] for node in path] + [verdict.bonus]
                assert emitted == truth[: len(emitted)]
                accepted, sent = accepted + len(path), sent + len(tree)
                done[index] += len(emitted)
        metrics = direct.verifier.metrics.registry
        verified = metrics.get_sample_value("outrider:verified_nodes_total")
        assert metrics.get_sample_value("outrider:spec_decode_num_draft_tokens_total") == sent
        assert metrics.get_sample_value("outrider:spec_decode_num_accepted_tokens_total") == accepted
        assert verified is not None and verified < sent and (accepted > 0 or budget == 1)


def order_of(direct: Direct, jobs: list[tuple[bytes, Any, dict[str, Any]]]) -> list[bytes]:
    """Submit jobs while the engine is in a step; the order in which they are answered."""
    answered: queue.Queue[bytes] = queue.Queue()
    for session, request, content in jobs:
        direct.verifier.submit(
            EngineRequest(session, request, lambda reply, done, s=session: answered.put(s) if done else None, **content)  # type: ignore[misc]
        )
    return [answered.get(timeout=HANG) for _ in jobs]


def test_verifies_do_not_wait_for_long_prompts() -> None:
    """A verify that comes behind four long prompts is answered before any of them is through."""
    model = tiny_model(seed=2)
    with started(make_verifier(model, (), kv_tokens=4096, prefill_chunk=16)) as direct:
        quick = os.urandom(16)
        direct.open(quick, [4, 5, 6])
        jobs: list[tuple[bytes, Any, dict[str, Any]]] = []
        for index in range(4):
            session, text = bytes([index]) * 16, [index + 4] * 120
            jobs.append((session, Open(0, session, 0, pack_ids(text), 0, Sampling()), {"tokens": text}))
        jobs.append((quick, Generate(0, 1, 3, 5), {}))
        assert order_of(direct, jobs)[0] == quick


def test_a_small_account_is_not_behind_a_large_one() -> None:
    """Five long prompts of one account, a shorter one of another that came last: it has half of each step to itself."""
    model = tiny_model(seed=2)
    with started(make_verifier(model, (), kv_tokens=4096, prefill_chunk=16)) as direct:
        jobs: list[tuple[bytes, Any, dict[str, Any]]] = []
        for index in range(6):
            session, text = bytes([index]) * 16, [index + 4] * (60 if index == 5 else 120)
            content = {"tokens": text, "account": "small" if index == 5 else "large"}
            jobs.append((session, Open(0, session, 0, pack_ids(text), 0, Sampling()), content))
        assert order_of(direct, jobs)[0] == bytes([5]) * 16


def test_writing_alone_does_not_keep_others_from_the_pool() -> None:
    """Room for two extents and three sessions that all write: each ends, with the right text."""
    model = tiny_model(seed=8)
    prompts = [[10 + index, 20, 30] for index in range(3)]
    with started(make_verifier(model, (), kv_tokens=256)) as direct:
        waiting = []
        for index, prompt in enumerate(prompts):
            session = bytes([index]) * 16
            direct.open(session, prompt)
            waiting.append(direct.submit(session, Generate(0, 1, 3, 70))[1])
        for prompt, replies in zip(prompts, waiting, strict=True):
            got = [replies.get(timeout=HANG).bonus for _ in range(70)]  # type: ignore[union-attr]
            assert got == plain_decode(model, prompt, Sampling(), 70, eos_ids=())
        assert direct.verifier.engine.pool.evictions > 0


def test_a_chunk_smaller_than_the_crowd_starves_nobody() -> None:
    """A pool that holds the oldest session alone, which lacks most, and less prefill a step than sessions wait."""
    model = tiny_model(seed=8)
    texts = [[10 + index] * (110 if index == 0 else 90) for index in range(6)]
    with started(make_verifier(model, (), kv_tokens=160, prefill_chunk=4)) as direct:
        jobs = [(bytes([index]) * 16, text) for index, text in enumerate(texts)]
        for session, text in jobs:
            direct.open(session, text)
        waiting = [direct.submit(session, Generate(0, 1, len(text), 3))[1] for session, text in jobs]
        for text, replies in zip(texts, waiting, strict=True):
            got = [replies.get(timeout=HANG).bonus for _ in range(3)]  # type: ignore[union-attr]
            assert got == plain_decode(model, text, Sampling(), 3, eos_ids=())


def test_free_rows_are_never_read() -> None:
    """Rows that a session did not write may hold anything, here NaN: no other session's text can reach it."""
    model = tiny_model("mistral", seed=3)
    prompt = [7, 8, 9]
    truth = plain_decode(model, prompt, Sampling(), 30, eos_ids=())
    rng = random.Random(0)
    verifier = make_verifier(model, (), kv_tokens=512)
    store = verifier.engine.runner.store  # type: ignore[attr-defined]
    for tensor in (*store.keys, *store.values):
        tensor.fill_(float("nan"))
    with started(verifier) as direct:
        session, length, seq = os.urandom(16), 3, 0
        direct.open(session, prompt)
        while length < 20:
            seq += 1
            tree = random_tree(rng, truth[length - 3 :][:10], VOCAB)
            verdict = direct.verify(session, seq, length, tree).get(timeout=HANG)
            assert isinstance(verdict, Verdict)
            emitted = [tree.tokens[node] for node in verdict.accepted] + [verdict.bonus]
            assert emitted == truth[length - 3 :][: len(emitted)]
            length += len(emitted)


def test_longest_chain_fits_a_step() -> None:
    verifier = make_verifier(tiny_model(), (), max_nodes=24)
    with started(verifier) as direct:
        direct.open(b"s" * 16, [5, 6])
        verdict = direct.verify(b"s" * 16, 1, 2, TokenTree.chain(range(10, 34))).get(timeout=HANG)
        assert isinstance(verdict, Verdict)


def test_an_idle_engine_waits_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions whose trees come one shortly after the other share a step; a lone session never waits."""
    monkeypatch.setattr("cloud.engine.batcher.IDLE_WINDOW", 2.0)
    with started(make_verifier(tiny_model(), ())) as direct:
        steps = partial(direct.verifier.metrics.registry.get_sample_value, "outrider:step_seconds_count")
        one, other = b"1" * 16, b"2" * 16
        direct.open(one, [4, 5, 6])
        direct.open(other, [4, 5, 6])
        before = steps() or 0
        replies = direct.verify(one, 1, 3, TokenTree())
        time.sleep(0.1)
        assert replies.empty()
        assert isinstance(direct.verify(other, 1, 3, TokenTree()).get(timeout=HANG), Verdict)
        assert isinstance(replies.get(timeout=HANG), Verdict)
        assert (steps() or 0) - before == 1
    monkeypatch.setattr("cloud.engine.batcher.IDLE_WINDOW", 1000.0)
    with started(make_verifier(tiny_model(), ())) as direct:
        direct.open(one, [4, 5, 6])
        assert isinstance(direct.verify(one, 1, 3, TokenTree()).get(timeout=HANG), Verdict)


def test_steps_come_in_few_sizes() -> None:
    """Each number of rows costs a CPU its own kernels, so there must be few; and filling up must stay cheap."""
    sizes = [padded_rows(tokens) for tokens in range(1, 1025)]
    assert all(size >= tokens for tokens, size in enumerate(sizes, 1))
    assert all(size < 1.2 * tokens for tokens, size in enumerate(sizes, 1) if tokens > 16)
    assert len(set(sizes)) < 55 and sizes[:2] == [1, 2]
    assert all(padded_rows(size) == size for size in sizes)
