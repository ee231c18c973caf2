"""Lookup in streams: the same text as token by token, in fewer steps, within every bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engine.acceptance import NO_TOKEN
from cloud.engine.stream_lookup import MOST_GUESSES, SEARCHED, StreamLookup, likeliest
from cloud.engine.tree_budget import StepCosts, TreeBudget
from cloud.server.service import Verifier
from export.train.ngrams import count_ngrams
from outrider_core.drafting.ngrams import NgramTable
from outrider_core.protocol.constraint import GRAMMAR_JSON_OBJECT, Constraint, Rules
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import FINISH_EOS, FINISH_LENGTH, Error, Generate, Verdict
from tests.cloud.by_hand import Asked, ByHand
from tests.cloud.drive import make_verifier
from tests.tiny import plain_decode, tiny_model

VOCAB = 64


def repetitive_model() -> Any:
    """A tiny model whose next token depends on the last one most of all, so that its text soon repeats itself."""
    model = tiny_model("llama", seed=1, vocab=VOCAB)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    return model


MODEL = repetitive_model()
#: steps whose rows cost next to nothing, and steps whose rows cost what a step of their own would
FLAT, STEEP = (StepCosts(CostCurve((1, 64), seconds)) for seconds in ((0.01, 0.011), (0.01, 0.64)))
SAMPLINGS = [Sampling(), Sampling(temperature=0.3, seed=4)]


def looking_up(costs: StepCosts | None = FLAT, lookup: str = "on", **values: Any) -> ByHand:
    verifier = make_verifier(MODEL, (), lookup=lookup, **{"kv_tokens": 1024, **values})
    budget(verifier).costs = costs
    budget(verifier).choose()
    return ByHand(verifier)


def budget(verifier: Verifier) -> TreeBudget:
    return verifier.scheduler.budget


def verdicts(asked: Asked) -> list[Verdict]:
    return [reply for reply in asked.replies if isinstance(reply, Verdict)]


def steps_of(hand: ByHand, asked: Sequence[Asked]) -> int:
    for count in range(1, 1000):
        hand.step()
        if all(each.done for each in asked):
            return count
    raise AssertionError("a stream never ends")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rows", [False, True])
def test_the_same_text_in_fewer_steps(sampling: Sampling, rows: bool) -> None:
    prompt = [4, 5] * 6
    truth = plain_decode(MODEL, prompt, sampling, 60, eos_ids=())
    told = []
    for lookup in ("on", "off"):
        hand = looking_up(lookup=lookup)
        hand.open(bytes(16), prompt, sampling=sampling)
        hand.finish()
        asked = hand.submit(bytes(16), Generate(0, 1, len(prompt), 60, rows))
        steps = steps_of(hand, [asked])
        assert asked.drawn == truth
        assert [verdict.base_len for verdict in verdicts(asked)] == [len(prompt) + i for i in range(60)]
        assert all(not verdict.accepted for verdict in verdicts(asked))
        whole = [verdict for verdict in verdicts(asked) if verdict.engine_us]
        assert len(whole) == steps, "a step's time is told once"
        told.append(b"".join(verdict.rows for verdict in verdicts(asked)))
        kept = hand.kept(bytes(16))
        assert len(kept) == len(prompt) + 59
        accepted = hand.metric("stream_lookup_accepted_tokens")
        assert (steps, accepted) == (60, 0) if lookup == "off" else steps == 60 - accepted
        assert lookup == "off" or accepted > 5
        assert hand.metric("spec_decode_num_drafts") == 0, "no device drafted"
    assert len(told[0]) == len(told[1]) and bool(told[0]) == rows


@pytest.mark.parametrize("lookup", ["on", "off"])
def test_devices_are_told_what_streams_bring(lookup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On average over many steps, so that nobody can tell what single ones brought; trees say nothing of it."""
    monkeypatch.setattr("cloud.engine.recent_rounds.STREAM_STEPS", 4)
    prompt, hand, brought = [4, 5] * 6, looking_up(lookup=lookup), list[int]()
    first, *_ = plain_decode(MODEL, prompt, Sampling(), 60, eos_ids=())
    for session in (bytes(16), b"s" * 16):
        hand.open(session, prompt)
        verified = hand.verify(session, 1, 12, TokenTree.chain([first]))
        hand.finish()
        verdict = verdicts(verified)[-1]
        assert len(verdict.accepted) == 1
        stream = hand.generate(session, 2, 14, 40)
        while not stream.done:
            before = len(stream.drawn)
            hand.step()
            brought.append(len(stream.drawn) - before)
            complete = len(brought) // 4 * 4
            told = round(25 * sum(brought[complete - 4 : complete])) if complete else 0
            assert hand.verifier.welcome().stream_tokens == told
    assert len(brought) > 8 and (max(brought) > 1) == (lookup == "on")


@settings(max_examples=10, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(4, 11), min_size=1, max_size=30), min_size=1, max_size=4),
    news=st.lists(st.integers(1, 140), min_size=4, max_size=4),
    seed=st.integers(0, 99),
    eos=st.sampled_from([(), (5,), (5, 7)]),
)
def test_whatever_is_asked_for_beside_others(
    prompts: list[list[int]], news: list[int], seed: int, eos: tuple[int, ...]
) -> None:
    """Several streams at once, to their ends: the answer's, the one asked for, or the context's."""
    verifier = make_verifier(MODEL, eos, lookup="on", kv_tokens=1024)
    budget(verifier).costs = FLAT
    hand, waiting = ByHand(verifier), []
    for index, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.4 * (index % 2), seed=seed)
        hand.open(bytes([index]) * 16, prompt, sampling=sampling)
        asked = hand.generate(bytes([index]) * 16, 1, len(prompt), news[index])
        waiting.append((asked, prompt, sampling, news[index]))
    hand.finish()
    for asked, prompt, sampling, new in waiting:
        truth = plain_decode(MODEL, prompt, sampling, min(new, 128 - len(prompt)), eos_ids=eos)
        assert asked.drawn == truth and asked.done
        finish = verdicts(asked)[-1].finish
        assert finish == FINISH_EOS if truth[-1] in eos else (finish == FINISH_LENGTH) == (len(prompt + truth) == 128)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_answers_usually_say_is_foreseen_too(sampling: Sampling) -> None:
    """A table counted from this very answer, behind a prompt in which nothing of it stands."""
    prompt = [11, 12, 13]
    truth = plain_decode(MODEL, prompt, sampling, 40, eos_ids=())
    hand, other = looking_up(), looking_up()
    table = count_ngrams([(prompt + truth, [(3, 43)])] * 9)
    hand.verifier.scheduler._lookup = lambda: StreamLookup(table)
    steps = []
    for each in (hand, other):
        each.open(bytes(16), prompt, sampling=sampling)
        each.finish()
        asked = each.generate(bytes(16), 1, 3, 40)
        steps.append(steps_of(each, [asked]))
        assert asked.drawn == truth
    assert steps[0] < 25 and steps[0] < steps[1]


def test_the_surer_of_both_guesses_counts() -> None:
    table = NgramTable(np.array([8], np.uint64), np.array([9], np.uint32), np.array([200], np.uint8))
    repeated, usual = [5, 6, 7, 8, 4, 5, 6, 7, 8], [8, 4, 8]
    assert StreamLookup(table).guesses(repeated, 1)[0][0] == 9, "0.78 for a run of four, 0.67"
    assert StreamLookup(table).guesses([3, *repeated[:4], 3, 3, *repeated], 1)[0][0] == 9
    assert StreamLookup(table).guesses([1, 2, *repeated[:5], 1, 2, *repeated[:4]], 1)[0][0] == 4, "0.82 for one of six"
    assert StreamLookup(table).guesses(usual, 1) == [(9, pytest.approx(200 / 255))]
    assert StreamLookup(table).guesses([8], 1)[0][0] == 9 and not StreamLookup(table).guesses([7], 1)


def test_rows_that_cost_as_much_as_steps_are_not_taken() -> None:
    for costs in (STEEP, None):
        hand = looking_up(costs)
        hand.open(bytes(16), [4, 5, 4, 5, 4])
        hand.finish()
        asked = hand.generate(bytes(16), 1, 5, 40)
        assert steps_of(hand, [asked]) == 40 and hand.metric("stream_lookup_tokens") == 0


def test_nothing_is_foreseen_for_trees_nor_beyond_their_budget() -> None:
    hand = looking_up(tree_budget=4)
    hand.open(bytes(16), [4, 5, 6] * 10)
    hand.finish()
    before = hand.ran
    hand.generate(bytes(16), 1, 30, 50)
    hand.step()
    assert 1 < hand.ran - before <= 1 + 4
    hand.finish()
    found = hand.metric("stream_lookup_tokens")
    hand.verify(bytes(16), 2, 80, TokenTree.chain([4, 5, 6]))
    hand.finish()
    assert hand.metric("stream_lookup_tokens") == found


def test_a_tree_is_verified_whole_before_anything_is_foreseen() -> None:
    """A device's tree may take more than its even share where the others have none; lookup takes what it leaves."""
    truth = plain_decode(MODEL, [7, 8], Sampling(), 20, eos_ids=())
    hand = looking_up(tree_budget=4)
    for number in range(1, 5):
        hand.open(bytes([number]) * 16, [4, 5] * 10)
    hand.open(bytes(16), [7, 8])
    hand.finish()
    streams = [hand.generate(bytes([number]) * 16, 1, 20, 20) for number in range(1, 5)]
    asked = hand.verify(bytes(16), 1, 2, TokenTree.chain(truth[:18]))
    hand.step()
    [verdict] = verdicts(asked)
    assert len(verdict.accepted) == 18
    hand.finish()
    assert all(stream.drawn == plain_decode(MODEL, [4, 5] * 10, Sampling(), 20, eos_ids=()) for stream in streams)


@pytest.mark.parametrize("accounts", [("mine", "mine"), ("mine", "yours")])
def test_no_accounts_texts_make_another_wait_much_longer(accounts: tuple[str, str]) -> None:
    """A text that repeats itself beside one that does not; each row more takes a tenth of a step."""
    hand = looking_up(StepCosts(CostCurve((2, 12), (0.01, 0.02))))
    hand.open(bytes(16), [4, 5] * 10, accounts[0])
    hand.open(bytes([1]) * 16, list(range(4, 24)), accounts[1])
    hand.finish()
    for number, account in enumerate(accounts):
        hand.generate(bytes([number]) * 16, 1, 20, 30, account)
    before, most = hand.ran, 0
    for _ in range(5):
        hand.step()
        before, most = hand.ran, max(most, hand.ran - before)
    assert most == 3 if accounts[1] == "yours" else most > 4


def test_a_long_text_is_taken_in_over_several_steps_and_only_where_that_is_worth_it() -> None:
    lookup, text = StreamLookup(), [4, 5, 6, 7] * 900
    found = [len(lookup.guesses(text, 4)) for _ in range(6)]
    assert found == [0, 0, 0, 4, 4, 4] and len(lookup._lookup._text) == SEARCHED
    assert lookup.guesses([*text, 4], 4) and lookup.guesses([8, 9, 8], 1)[0][0] == 9, "an OPEN took tokens back"
    steep, short = looking_up(STEEP), looking_up()
    for each, new in ((steep, 30), (short, 4)):
        each.open(bytes(16), [4, 5] * 20)
        each.finish()
        each.generate(bytes(16), 1, 40, new)
        each.step()
        [session] = each.verifier.batcher.requests.waiting()
        assert session.round and session.round.lookup is None


def test_what_is_known_of_a_text_goes_with_its_keys_and_values() -> None:
    hand = looking_up(kv_tokens=256, max_model_len=128)
    for number in range(3):
        hand.open(bytes([number]) * 16, [4, 5] * 20)
        hand.finish()
    streams = [hand.generate(bytes([number]) * 16, 1, 40, 60) for number in range(3)]
    pool = hand.verifier.engine.pool
    while waiting := hand.verifier.batcher.requests.waiting():
        evicted = [session for session in waiting if not pool.used(session.id)]
        hand.step()
        rounds = [session.round for session in evicted if not pool.used(session.id)]
        assert not any(request.lookup for request in rounds if request)
    truth = plain_decode(MODEL, [4, 5] * 20, Sampling(), 60, eos_ids=())
    assert all(stream.drawn == truth for stream in streams) and hand.verifier.engine.pool.evictions > 0


def test_a_stream_that_has_ended_keeps_nothing_of_its_text() -> None:
    """A connection may keep its last request until it asks again."""
    hand, requests = looking_up(), []
    hand.open(bytes(16), [4, 5] * 20)
    hand.finish()
    asked = hand.generate(bytes(16), 1, 40, 20)
    while not asked.done:
        requests += [session.round for session in hand.verifier.batcher.requests.waiting() if session.round]
        hand.step()
    assert any(request.generated == 20 for request in requests)
    assert not any(request.lookup for request in requests)


def test_where_nothing_can_be_drawn_the_tokens_before_have_come() -> None:
    """As in plain decoding: a chain that leads there is given up, and the tokens come one by one."""
    prompt = [4, 5] * 6
    for broken in (31, 32, 35):
        delivered = []
        for lookup in ("off", "on"):
            hand = looking_up(lookup=lookup)
            forward = hand.verifier.engine.runner.forward

            def unusable(parts: Any, forward: Any = forward, at: int = broken) -> Any:
                """Logits that are not numbers from a position on."""
                logits = forward(parts)
                draw = logits.draw
                logits.draw = lambda rows, samplings, positions, adjustments=(): [
                    token if position < at else NO_TOKEN
                    for token, position in zip(draw(rows, samplings, positions, adjustments), positions, strict=True)
                ]
                return logits

            hand.verifier.engine.runner.forward = unusable  # type: ignore[method-assign]
            hand.open(bytes(16), prompt)
            hand.finish()
            asked = hand.generate(bytes(16), 1, 12, 60)
            hand.finish()
            assert isinstance(asked.replies[-1], Error)
            delivered.append(asked.drawn)
        assert delivered[0] == delivered[1] and len(delivered[0]) == broken - 12


def test_another_text_under_the_same_session() -> None:
    """An OPEN that takes tokens back, and one in mid-stream: what is foreseen is of the text as it is."""
    hand = looking_up()
    for seq, prompt in enumerate(([4, 5, 4, 5, 4, 5], [4, 5, 9, 9, 9, 9], [6, 7]), 1):
        hand.open(bytes(16), prompt, seq=seq - 1)
        asked = hand.generate(bytes(16), seq, len(prompt), 30)
        if seq == 2:  # given up on its way
            hand.step()
            hand.step()
            asked.request.cancelled = True
            continue
        hand.finish()
        assert asked.drawn == plain_decode(MODEL, prompt, Sampling(), 30, eos_ids=())


class Even:
    """A grammar of even tokens alone."""

    error = ""

    def __init__(self) -> None:
        self.text: list[int] = []

    def allowed(self) -> Any:
        return np.full(-(-VOCAB // 32), 0x55555555, np.uint32)

    def advance(self, token: int) -> None:
        assert token % 2 == 0
        self.text.append(token)

    def rewind(self, tokens: Sequence[int]) -> None:
        self.text = list(tokens)


def test_a_constraint_is_followed_through_what_is_foreseen() -> None:
    drawn = []
    for lookup in ("on", "off"):
        hand, prompt = looking_up(lookup=lookup), [4, 5, 6, 8, 10, 5, 6, 8, 10, 6, 8]
        asked_open = hand.open(bytes(16), prompt)
        asked_open.request.rules = None
        hand.verifier.sessions.get(bytes(16)).rules = Rules(  # type: ignore[union-attr]
            Constraint(len(prompt), grammar=GRAMMAR_JSON_OBJECT), Even()
        )
        asked = hand.generate(bytes(16), 1, len(prompt), 40)
        hand.finish()
        drawn.append(asked.drawn)
        assert all(token % 2 == 0 for token in asked.drawn)
        assert (hand.metric("stream_lookup_accepted_tokens") > 0) == (lookup == "on")
    assert drawn[0] == drawn[1] and len(drawn[0]) == 40


def test_a_streams_own_luck_is_learnt() -> None:
    lucky, unlucky = StreamLookup(), StreamLookup()
    text = [4, 5, 6, 7, 8] * 4
    for _ in range(20):
        before = lucky.guesses(text, 8)
        lucky.observe(8, 8)
        unlucky.guesses(text, 8)
        unlucky.observe(8, 0)
    better, worse = lucky.guesses(text, 8), unlucky.guesses(text, 8)
    assert [token for token, _ in better] == [token for token, _ in worse] == [4, 5, 6, 7, 8, 4, 5, 6]
    assert better[0][1] >= before[0][1] > 0.8 > 0.4 > worse[0][1]
    for found in (better, worse):
        assert all(first > second for (_, first), (_, second) in pairwise(found))
    assert len(lucky.guesses(text, 100)) == MOST_GUESSES and not StreamLookup().guesses([4, 5, 6], 8)
    lucky.guesses([4], 8)
    lucky.observe(0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), max_size=12), st.integers(1, 20), st.integers(0, 10**6))
def test_as_many_as_bring_most_tokens_per_second(chances: list[float], tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0.01, 0.05) for _ in range(3))
    costs = StepCosts(CostCurve((1, 8, 40), tuple(times)), 0.001)
    chances = sorted(chances, reverse=True)

    def rate(count: int) -> float:
        return (tokens + sum(chances[:count])) / costs.at(tokens + count, tokens)

    count = TreeBudget(24, costs).worth_adding(chances, tokens, tokens, tokens)
    assert rate(count) == pytest.approx(max(rate(each) for each in range(len(chances) + 1)))
    assert TreeBudget(24).worth_adding(chances, tokens, tokens, tokens) == 0


def test_of_several_streams_the_likeliest_first() -> None:
    ranked = likeliest([[(7, 0.9), (8, 0.3)], [], [(5, 0.5)]])
    assert ranked == [(0.9, 0), (0.5, 2), (0.3, 0)]
