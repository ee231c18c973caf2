"""The session alone, against a tiny simulated target, under every kind of interleaving."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.session.actions import Done, DraftAhead, DraftTree, Pin, ReadText, Send, WriteToken
from edge_runtime.session.offline import CONFIDENCE_WINDOW, FEW_TOKENS
from edge_runtime.session.policy import Policy
from edge_runtime.session.record import check_record, record_of, restore
from edge_runtime.session.session import Session
from edge_runtime.session.states import PauseReason, State, Writer
from edge_runtime.session.timeouts import Patience
from edge_runtime.session.transcript import LOOP
from edge_runtime.speed.arms import Arm
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_BUSY, Error, Generate, Open, Verify, unpack_ids
from tests.edge_runtime.world import EOS, EVENTS, PATIENCE, PROMPT, SHAPE, VOCAB, WELCOME, World, plain, understudy

policies = st.builds(
    Policy, writer=st.sampled_from(["prefer-cloud", "prefer-cloud", "prefer-device", "cloud-only"]),
    offline=st.sampled_from(["continue", "pause"]), lead=st.sampled_from([1, 3, 48]),
)  # fmt: skip


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), policies, st.lists(st.sampled_from(EVENTS), max_size=120))
def test_any_interleaving_ends_in_the_targets_own_text(seed: int, policy: Policy, events: list[str]) -> None:
    world = World(random.Random(seed), policy=policy)
    world.do(world.session.start(world.now))
    for event in events:
        if world.done:
            break
        world.happen(event)
    world.settle()
    expected = plain(PROMPT, 20)
    assert world.shown == expected
    assert world.done == ("stop" if expected[-1] == EOS else "length")
    assert world.verified == len(expected)
    if policy.writer == "cloud-only":
        assert world.session.stats.provisional == 0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), policies, st.lists(st.sampled_from(EVENTS), max_size=120))
def test_no_answer_mixes_two_arithmetics(seed: int, policy: Policy, events: list[str]) -> None:
    """Every connection may reach a verifier that computes otherwise; the text is that of the first that wrote."""
    fleet = ("onnx-8-v6", "torch-float32")
    texts = {arithmetic: plain(PROMPT, 20, arithmetic) for arithmetic in fleet}
    assert texts[fleet[0]] != texts[fleet[1]]
    world = World(random.Random(seed), policy=policy, fleet=fleet)
    world.do(world.session.start(world.now))
    for event in events:
        if world.done:
            break
        world.happen(event)
    if not world.done:
        world.settle()
    pinned = world.session.verifier.pinned
    assert world.verified == 0 or pinned in fleet
    if world.done in ("stop", "length") and not world.session.provisional:
        assert world.shown == texts[pinned] and world.verified == len(world.shown)
    else:  # the one that began it did not come back for ten seconds, with nothing left to write
        assert world.done == (world.session.text.end_alone or "unreachable")
        assert world.shown[: world.verified] == texts.get(pinned, [])[: world.verified]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.lists(st.sampled_from(EVENTS), max_size=120))
def test_what_was_kept_stays_and_everything_else_is_the_targets(seed: int, events: list[str]) -> None:
    """`World.expect_sound` checks each token: adopted, or the target's own behind what stands before it."""
    world = World(random.Random(seed), policy=Policy(on_return="keep"))
    world.do(world.session.start(world.now))
    for event in events:
        if world.done:
            break
        world.happen(event)
    world.settle()
    stats = world.session.stats
    assert world.shown and stats.adopted == sum(span.end - span.begin for span in world.session.text.adopted)
    assert world.done in ("stop", "length")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.lists(st.sampled_from(EVENTS), max_size=60), st.sampled_from(["repair", "keep"]))
def test_an_answer_goes_on_from_its_record(seed: int, events: list[str], on_return: str) -> None:
    """The process dies at any moment; its record, through JSON, makes a session that ends in the same text."""
    policy = Policy(on_return=on_return)  # type: ignore[arg-type]
    first = World(random.Random(seed), policy=policy)
    first.do(first.session.start(0.0))
    for event in events:
        if first.done:
            break
        first.happen(event)
    record = json.loads(json.dumps(record_of(first.session)))
    second = World(random.Random(seed + 1), policy=policy)
    second.session = Session(
        prompt=record["prompt"], sampling=Sampling(**record["sampling"]), eos_ids=frozenset([EOS]),
        max_new=record["max_new"], max_context=64, row_shape=SHAPE, session_id=bytes.fromhex(record["session"]),
        patience=PATIENCE, policy=policy,
    )  # fmt: skip
    check_record(record, VOCAB)
    restore(second.session, record)
    assert second.session.text.answer == first.session.text.answer
    second.shown = list(second.session.text.answer)
    second.verified = len(second.session.committed) - len(PROMPT)
    second.session.stats.provisional = len(second.session.provisional)
    second.do(second.session.start(0.0))
    second.settle()
    if not second.session.text.adopted:
        assert second.shown == plain(PROMPT, 20)


def test_a_record_names_the_arithmetic_once_something_was_verified() -> None:
    world = World(random.Random(0), fleet=("onnx-8-v6",))
    world.do(world.session.start(0.0))
    world.connect()
    assert record_of(world.session)["arithmetic"] == ""
    while not world.verified:
        world.deliver()
    record = json.loads(json.dumps(record_of(world.session)))
    check_record(record, VOCAB)
    assert record["arithmetic"] == "onnx-8-v6"
    second = World(random.Random(1)).session
    restore(second, record)
    assert Pin("onnx-8-v6") in second.start(0.0)
    free = World(random.Random(1)).session
    restore(free, record | {"arithmetic": ""})
    assert not [action for action in free.start(0.0) if isinstance(action, Pin)]


def test_a_record_of_another_version_is_refused() -> None:
    session = World(random.Random(0)).session
    with pytest.raises(ValueError, match="version 1"):
        check_record(record_of(session) | {"version": 2}, VOCAB)


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt": []}, {"prompt": ["a"]}, {"committed": [VOCAB]}, {"committed": [-1]}, {"provisional": [1.5]},
        {"provisional": None}, {"writers": []}, {"writers": [[0, 10**12, "target"]]}, {"writers": [[0, 4, "nobody"]]},
        {"writers": [[0, 2, "target"], [0, 2, "drafter"]]}, {"sampling": {"temperature": -1.0}}, {"max_new": 0},
        {"sampling": {"warmth": 1.0}}, {"seq": "1"}, {"stream": 1 << 16}, {"session": "ab"}, {"arithmetic": 8},
        {"arithmetic": "x" * 65}, {"arithmetic": "onnx\n"}, {"arithmetic": "\x1b[2J"}, {"arithmetic": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_record_is_refused(broken: dict[str, Any]) -> None:
    world = World(random.Random(0))
    world.write_alone(4)
    record = json.loads(json.dumps(record_of(world.session)))
    check_record(record, VOCAB)
    with pytest.raises((ValueError, TypeError)):
        check_record(record | broken, VOCAB)


def test_rows_reach_the_drafter_once_each() -> None:
    world = World(random.Random(1))
    world.do(world.session.start(0.0))
    world.connect()
    for _ in range(6):
        world.deliver()
        world.run_job()
    world.cut()
    world.settle()
    assert world.rows == len(world.session.committed) - 1


def test_silence_starts_writing_at_the_deadline_and_not_before() -> None:
    world = World(random.Random(2), patience=Patience(open=0.5))
    world.do(world.session.start(0.0))
    world.connect()
    world.deaf = True  # the verifier never hears the VERIFY: a half-open link
    world.to_device.clear()
    world.run_job()
    due = world.session.wake_at()
    assert due == 2.0  # the round timer's first allowance (patience.open is shorter)
    world.tick(due - 0.01)
    assert "Stall" not in world.trace
    world.tick(0.01)
    world.run_job()
    assert world.trace[-4:] == ["Stall", "WriteToken", "Provide", "WriteToken"]


def test_a_late_verdict_is_used() -> None:
    world = World(random.Random(3))
    world.do(world.session.start(0.0))
    world.connect()
    world.run_job()
    late = list(world.to_device)
    world.to_device.clear()
    world.tick(5.0)
    for _ in range(3):
        world.run_job()
    assert world.session.provisional
    opens = world.session.stats.opens
    world.to_device = late
    while world.to_device:
        world.deliver()
    assert world.verified > 0 and world.session.stats.opens == opens


def test_without_a_link_the_answer_is_written_and_stays_unverified() -> None:
    world = World(random.Random(4), max_new=6, patience=Patience(connect=0.2, offline=2.0))
    world.do(world.session.start(0.0))
    world.tick(0.2)
    for _ in range(12):
        world.run_job()
    assert 0 < len(world.shown) <= 6 and world.verified == 0
    world.tick(10.0)
    assert world.done in ("stop", "length") and world.shown == world.session.text.answer


def test_busy_verifier_is_asked_again() -> None:
    world = World(random.Random(5))
    world.do(world.session.start(0.0))
    world.connect()
    world.run_job()
    world.to_device = [Error(ERR_BUSY, "no room", 0, retry_after_ms=300)]
    world.deliver()
    opens = world.session.stats.opens
    world.tick(0.2)
    assert world.session.stats.opens == opens
    world.tick(0.2)
    assert world.session.stats.opens == opens + 1
    world.settle()
    assert world.shown == plain(PROMPT, 20)


def test_cancel_ends_at_once() -> None:
    world = World(random.Random(6))
    world.do(world.session.start(0.0))
    world.connect()
    world.do(world.session.cancel())
    assert world.done == "cancelled"
    world.run_job()
    assert world.session.wake_at() is None


def test_a_prompt_that_fills_the_context_ends_with_length() -> None:
    session = Session(
        prompt=[1] * 64, sampling=Sampling(), eos_ids=frozenset([EOS]), max_new=5, max_context=64, row_shape=SHAPE,
        session_id=bytes(16),
    )  # fmt: skip
    assert session.start(0.0) == [Done("length")]


# drafting ahead, modes, policies


def test_the_drafter_drafts_on_while_a_verdict_is_awaited() -> None:
    world = World(random.Random(1))
    world.do(world.session.start(0.0))
    world.connect()
    world.deliver(), world.deliver(), world.deliver()  # the prompt's own token
    world.do(world.session.tree_ready(Draft(), world.jobs.pop().version, 0.0))
    assert "DraftAhead" not in world.trace
    version, verified = world.session.job.version, world.verified
    actions = world.session.tree_ready(Draft(), world.jobs.pop().version, 0.0)
    assert [type(action) for action in actions] == [Send, DraftAhead]
    assert actions[1] == DraftAhead(version)
    world.do(actions)
    world.deliver()
    assert world.verified > verified and world.session.job.version != version  # which is what ends it


@pytest.mark.parametrize("ready", [False, True], ids=["no tree yet", "a tree is ready"])
def test_the_first_token_waits_for_no_tree(ready: bool) -> None:
    """A tree that is there goes along with OPEN; else the verifier is asked for the prompt's own token meanwhile."""
    session = World(random.Random(1)).session
    (draft,) = session.start(0.0)
    assert isinstance(draft, DraftTree) and draft.prefix == PROMPT
    if ready:
        assert not session.tree_ready(Draft(TokenTree.chain([1, 2])), draft.version, 0.0)
    messages = [action.message for action in session.link_up(WELCOME, 0.0) if isinstance(action, Send)]
    assert [type(message) for message in messages] == [Open, Verify]
    assert isinstance(messages[1], Verify) and unpack_ids(messages[1].tokens) == ([1, 2] if ready else [])
    assert session.stats.calls == 1


def test_streaming_asks_once_and_takes_what_comes() -> None:
    world = World(random.Random(2))
    world.begin_in(Arm.STREAM)
    world.do(world.session.start(0.0))
    world.connect()
    while world.to_device:
        world.deliver()
    assert world.done == "length" and world.shown == plain(PROMPT, 20)
    stats = world.session.stats
    assert stats.calls == 1 and stats.streamed == len(world.shown) and stats.rounds == 0
    assert not world.jobs and world.rows == len(world.session.committed) - 1


def test_a_switch_in_mid_stream_cancels_and_opens_again_with_what_arrived() -> None:
    world = World(random.Random(2))
    world.begin_in(Arm.STREAM)
    world.do(world.session.start(0.0))
    world.connect()
    for _ in range(4):
        world.deliver()
    there = world.verified
    assert there == 2
    world.trace.clear()
    world.do(world.pin(Arm.TREE))
    assert world.trace == ["Send", "Send", "DraftTree"]
    world.settle()
    assert world.shown == plain(PROMPT, 20) and world.session.stats.streamed == there


def test_a_stalled_stream_goes_on_from_the_drafter() -> None:
    world = World(random.Random(3))
    world.begin_in(Arm.STREAM)
    world.do(world.session.start(0.0))
    world.connect()
    for _ in range(3):
        world.deliver()
    late = list(world.to_device)
    world.to_device.clear()
    world.tick(5.0)
    world.run_job()
    assert world.session.provisional and world.session.offline.active
    world.to_device = late
    world.deliver()
    assert not world.session.offline.active and world.verified == 2


def test_prefer_device_shows_tokens_at_once_and_never_runs_too_far_ahead() -> None:
    world = World(random.Random(4), policy=Policy(writer="prefer-device", lead=3))
    world.do(world.session.start(0.0))
    for _ in range(6):
        world.run_job()
    assert len(world.shown) == 3 and world.verified == 0 and not world.jobs
    world.connect()
    for _ in range(3):
        world.deliver()
    assert world.verified
    world.settle()
    assert world.shown == plain(PROMPT, 20)


def test_cloud_only_waits_and_says_so() -> None:
    patience = Patience(connect=0.2, offline=2.0)
    world = World(random.Random(4), policy=Policy(writer="cloud-only"), patience=patience)
    world.do(world.session.start(0.0))
    world.tick(0.2)
    for _ in range(4):
        world.run_job()
    assert not world.shown and "Stall" in world.trace
    world.tick(2.0)
    assert world.done == "unreachable"


def test_device_only_writes_to_the_end_and_asks_nobody() -> None:
    world = World(random.Random(4), max_new=6, policy=Policy(writer="device-only"))
    world.do(world.session.start(0.0))
    while world.jobs:
        world.run_job()
    assert world.done == "length" and len(world.shown) == 6 and "Send" not in world.trace


def repeat_alone(world: World, period: int) -> None:
    """Nobody answers, and the drafter says the same `period` tokens in turn until it may say no more."""
    world.do(world.session.start(0.0))
    world.run_job()
    world.tick(0.2)
    while world.jobs:
        job = world.jobs.pop()
        assert isinstance(job, WriteToken)
        token = 1 + len(world.session.provisional) % period
        world.do(world.session.token_written(token, 1.0, job.version, world.now))


@pytest.mark.parametrize("period", [1, 3])
def test_a_drafter_that_repeats_itself_writes_no_more_until_the_target_is_back(period: int) -> None:
    world = World(random.Random(0), max_new=60, policy=Policy(offline="continue"))
    repeat_alone(world, period)
    assert len(world.session.provisional) == LOOP + period
    world.settle()
    assert world.shown == plain(PROMPT, 60)


def test_a_drafter_without_an_understudy_finishes_its_sentence_and_waits() -> None:
    for ends, expected in ((frozenset([4]), [1, 2, 3, 4]), (frozenset[int](), [1, 2, 3, 4] * 6)):
        world = World(random.Random(0), max_new=60, sentence_ends=ends)
        repeat_alone(world, 4)
        assert world.session.provisional == expected and world.session.state is State.WAITING
        world.do(world.session.proceed(world.now))  # whoever asks for more gets more
        assert world.jobs and world.session.state is State.ALONE
        world.settle()
        assert world.shown == plain(PROMPT, 60)


def test_an_understudy_takes_back_what_it_would_not_write_and_writes_on() -> None:
    world = World(random.Random(0), max_new=12, understudy=True)
    world.do(world.session.start(0.0))
    world.run_job()
    world.tick(0.2)
    for _ in range(2):
        world.run_job()
    (reading,) = world.readings
    assert reading == ReadText([*PROMPT, world.shown[0]], len(PROMPT)) and world.session.still_reads(reading)
    assert world.session.text.writers == [Writer.DRAFTER] * 2
    world.run_reading()
    while len(world.shown) < 8:
        world.run_job()
    text = list(PROMPT)
    while len(text) < len(PROMPT) + 8:
        text.append(understudy(text))
    assert world.shown == text[len(PROMPT) :] and set(world.session.text.writers) == {Writer.UNDERSTUDY}
    assert world.session.stats.understudy == 8
    world.settle()
    assert world.shown == plain(PROMPT, 12)


def reading_world(agrees: int, rest: int) -> World:
    """The target is silent. The understudy is asked to read a text of which it agrees with all; the drafter goes on
    with `agrees` tokens of which that is true too, and `rest` of which it is not."""
    world = World(random.Random(0), max_new=40, understudy=True)
    world.do(world.session.start(0.0))
    world.run_job()
    world.tick(0.2)
    for wrong in [0] * (1 + agrees) + [1] * rest:
        job = world.jobs.pop()
        assert isinstance(job, WriteToken) and job.writer is Writer.DRAFTER
        token = 1 + (understudy(job.prefix) - 1 + wrong) % (VOCAB - 1)
        world.do(world.session.token_written(token, 1.0, job.version, world.now))
    (reading,) = world.readings
    assert len(reading.prefix) == len(PROMPT) + 1
    return world


@pytest.mark.parametrize("rest", [0, 1, 3])
@pytest.mark.parametrize("agrees", [0, 1, 6])
def test_what_the_drafter_writes_while_the_understudy_reads_is_judged_too(agrees: int, rest: int) -> None:
    world = reading_world(agrees, rest)
    text = [*PROMPT, *world.shown]
    world.run_reading()
    if agrees + rest:
        assert world.readings == [ReadText(text, len(PROMPT) + 1)] and world.session.provisional == text[len(PROMPT) :]
        world.run_job()  # that was under way, and comes too late
        assert not world.jobs and world.shown == text[len(PROMPT) :], "the drafter waits for the verdict on its words"
        world.run_reading()
    assert world.shown == text[len(PROMPT) : len(PROMPT) + 1 + agrees] and not world.readings
    world.run_job()
    world.run_job()
    assert world.session.text.writers[-1] is Writer.UNDERSTUDY
    world.settle()
    assert world.shown == plain(PROMPT, 40)


def test_a_drafter_that_waits_for_a_verdict_writes_on_where_there_is_none() -> None:
    for end in ("failure", "target"):
        world = reading_world(4, 0)
        world.run_reading()
        world.run_job()
        assert world.readings and not world.jobs
        if end == "failure":
            world.fail()
        else:
            world.connect()
            while world.session.offline.active:
                world.deliver()
            world.cut()
            while world.jobs and not isinstance(world.jobs[0], WriteToken):
                world.run_job()
            assert not world.session.still_reads(world.readings[0]) or world.session.offline.active
        job = world.jobs[0]
        assert isinstance(job, WriteToken) and job.writer is Writer.DRAFTER, end
        world.settle()
        assert world.shown == plain(PROMPT, 40)


def test_a_reading_that_was_given_up_says_nothing_about_the_text() -> None:
    world = reading_world(2, 0)
    shown = list(world.shown)
    world.readings.clear()
    world.do(world.session.text_read(None, world.now))
    assert world.shown == shown and world.readings == [ReadText([*PROMPT, *shown], len(PROMPT))], "it is asked again"


@pytest.mark.parametrize("policy", [Policy(), Policy(understudy="off")])
def test_an_understudy_is_asked_for_nothing_while_the_target_answers_or_where_nobody_wants_it(policy: Policy) -> None:
    world = World(random.Random(1), max_new=12, understudy=True, policy=policy)
    world.do(world.session.start(0.0))
    if policy.understudy == "off":
        world.tick(0.2)
        for _ in range(5):
            world.run_job()
        assert world.session.provisional
    world.settle()
    assert "ReadText" not in world.trace and world.shown == plain(PROMPT, 12)


def test_a_reading_that_the_targets_return_ended_lets_nobody_write_in_the_next_silence() -> None:
    world = World(random.Random(1), max_new=40, understudy=True)
    world.do(world.session.start(0.0))
    world.run_job()
    world.tick(0.2)
    world.write(world.jobs.pop(), right=True, confidence=1.0)  # type: ignore[arg-type]
    assert world.readings
    world.connect()
    while world.session.offline.active:
        world.deliver()
    assert not world.session.still_reads(world.readings[0]), "it is given up"
    world.run_reading()
    while world.jobs:
        world.run_job()
    world.cut()
    while not world.session.provisional:
        world.run_job()
    assert world.session.text.writers[-1] is Writer.DRAFTER, "the drafter writes at once"
    assert world.readings, "and the understudy reads what it has not read"


@pytest.mark.parametrize(("shown", "first"), [(4, Writer.UNDERSTUDY), (18, Writer.DRAFTER)])
def test_a_warm_understudy_writes_the_first_token_alone_if_it_has_read_enough(shown: int, first: Writer) -> None:
    world = World(random.Random(1), max_new=200, understudy=True, policy=Policy(understudy="warm"))
    world.do(world.session.start(0.0))
    world.connect()
    while len(world.shown) < shown:
        world.deliver()
        world.run_job()
        world.run_reading()
    assert world.trace.count("ReadText") == 1, "64 tokens make it worth the while"
    while world.jobs:
        world.run_job()
    unread = len(world.session.committed) - len(world.session.offline._read)
    assert (unread > FEW_TOKENS) == (first is Writer.DRAFTER)
    world.cut()
    world.run_job()
    assert world.session.text.writers[-1] is first and "Provide" in world.trace
    for _ in range(4):
        world.run_reading()
        world.run_job()
    assert world.session.text.writers[-1] is Writer.UNDERSTUDY


def test_a_drafter_alone_for_good_ends_where_it_repeats_itself() -> None:
    world = World(random.Random(0), max_new=60, policy=Policy(writer="device-only"))
    world.do(world.session.start(0.0))
    while world.jobs:
        job = world.jobs.pop()
        assert isinstance(job, WriteToken)
        world.do(world.session.token_written(1, 1.0, job.version, world.now))
    assert world.done == "length" and len(world.shown) == LOOP + 1


def test_an_unsure_drafter_pauses_and_the_targets_return_ends_it() -> None:
    world = World(random.Random(5), policy=Policy(offline="pause", min_confidence=0.5))
    world.do(world.session.start(0.0))
    world.tick(0.2)
    world.jobs.pop()
    for number in range(CONFIDENCE_WINDOW):
        assert world.session.job.busy or number == 0
        job = WriteToken(world.session.committed + world.session.provisional, world.session.job.version)
        world.jobs.clear()
        world.write(job, right=True, confidence=0.45)
    assert world.trace[-1] == "Pause" and world.session.offline.paused is PauseReason.UNSURE and not world.jobs
    world.connect()
    while not world.verified:
        world.deliver()
    assert world.session.offline.paused is None
    world.settle()
    assert world.shown == plain(PROMPT, 20)


def test_a_stop_string_ends_the_answer_where_it_stood() -> None:
    world = World(random.Random(6))
    world.do(world.session.start(0.0))
    world.connect()
    while world.verified < 3:
        world.deliver()
        world.run_job()
    kept = world.session.committed[:-2]
    assert world.session.stop(2)[-1] == Done("stop")
    assert world.session.committed == kept and world.session.finished == "stop"


def test_nothing_is_written_behind_a_provisional_stop_string() -> None:
    world = World(random.Random(7))
    world.do(world.session.start(0.0))
    world.tick(0.2)
    world.run_job()
    world.run_job()
    assert world.session.provisional
    world.session.enough()
    world.run_job()
    assert not world.jobs
    world.settle()
    assert world.shown == plain(PROMPT, 20)  # taken back, or the target said it too: then the caller ends the answer


@pytest.mark.parametrize("kind", [Verify, Generate])
def test_a_request_is_numbered_and_says_what_it_hangs_below(kind: type) -> None:
    world = World(random.Random(8))
    sent: list[object] = []
    world.send = sent.append  # type: ignore[method-assign]
    if kind is Generate:
        world.begin_in(Arm.STREAM)
    world.do(world.session.start(0.0))
    world.verifier = object()  # type: ignore[assignment]
    world.do(world.session.link_up(WELCOME, 0.0))
    world.run_job()
    request = next(message for message in sent if isinstance(message, kind))
    assert (request.seq, request.base_len) == (1, len(PROMPT))
    if isinstance(request, Generate):
        assert request.rows and request.max_new == 20
