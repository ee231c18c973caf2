"""Every state that a short answer can reach, by every order of events: nothing is lost, and nothing hangs.

Two tokens (three in the slow tests), a drafter that is right or wrong, a verifier that answers, is slow, deaf or gone,
and a clock that jumps from one deadline to the next. `World.expect_sound` is checked on every edge; from every state a
way leads to the answer's end.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - of this test's own objects
import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import pytest

from edge_runtime.session.actions import DraftTree, WriteToken
from edge_runtime.session.policy import Policy
from edge_runtime.session.states import Writer
from edge_runtime.session.timeouts import Patience, RoundTimer
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_BUSY, Error, Features, Opened, Verdict
from tests.edge_runtime.world import PROMPT, VOCAB, World, plain, target

#: what a session takes without doing anything but noting rows
IDLE = (Opened, Features)
PATIENCE = Patience(open=0.5, connect=0.2, silence=1.0, offline=2.0)


@dataclass
class FixedTimer(RoundTimer):
    """Learns nothing, so that the space stays finite."""

    def add(self, seconds: float) -> None:
        pass


def successors(world: World, name: str) -> list[tuple[str, World]]:
    """What may happen next."""
    events = ["cut", "silence"] if world.verifier and not world.deaf else ["cut"] if world.verifier else ["connect"]
    if world.to_device:
        events += ["deliver", "refuse"]
    if world.jobs:
        events += ["right"] if getattr(world.jobs[0], "writer", None) is Writer.UNDERSTUDY else ["right", "wrong"]
    events += ["reading"] if world.readings else []
    events += ["failure"] if world.readings or ("right" in events and "wrong" not in events) else []
    if world.session.wake_at() is not None:
        events.append("timer")
    if "understudy" in name:
        events = [event for event in events if event != "refuse"]
    elif name == "streaming":
        events.append("stream" if world.session.arm == "tree" else "draft")
    else:
        events.append("pause" if not world.session.offline.paused else "proceed")
    after, packed = [], pickle.dumps(world, -1)  # several times as fast as copy.deepcopy
    for event in events:
        copy = pickle.loads(packed)  # noqa: S301
        step(copy, event)
        after.append((event, copy))
    return after


def step(world: World, event: str) -> None:
    session = world.session
    if event == "timer":
        wake = session.wake_at()
        assert wake is not None
        world.tick(max(0.0, wake - world.now))
    elif event == "refuse":  # in place of what it would have said
        world.to_device = [Error(ERR_BUSY, "no room", 0, 100)]
        world.verifier.tokens = None  # type: ignore[union-attr]
        world.deliver()
    elif event in ("right", "wrong"):
        job = world.jobs.pop()
        if isinstance(job, WriteToken):
            world.write(job, event == "right", 0.1)
        else:
            world.do(session.tree_ready(Draft(tree(job, event == "right")), job.version, world.now))
    else:
        world.happen(event)
    # replies to what is not awaited any more say nothing to a session (test_session.py), and feature rows only speed
    asked = session.verifier.in_flight
    flight = asked.seq if asked else -1
    world.to_device = [m for m in world.to_device if getattr(m, "seq", flight) == flight and not isinstance(m, IDLE)]


def tree(job: DraftTree, right: bool) -> TokenTree:
    token = target(job.prefix)
    if not job.depth:
        return TokenTree()
    return TokenTree((token, (token + 1) % VOCAB), (-1, -1)) if right else TokenTree(((token + 2) % VOCAB,), (-1,))


def key(world: World) -> Hashable:
    """What the future depends on: numbers relative to the session's, and of a clock whether it runs or has run out."""
    s = world.session

    def ahead(moment: float | None) -> bool | None:
        return None if moment is None else moment > world.now

    asked = s.verifier.in_flight
    flight = asked and (asked.arm, asked.tree, ahead(asked.due), asked.seq - s.verifier.seq)
    coming = tuple(
        (m.seq - s.verifier.seq, m.base_len, m.accepted, m.bonus) if isinstance(m, Verdict) else type(m).__name__
        for m in world.to_device
    )
    jobs = tuple((type(job).__name__, job.version == s.job.version, tuple(job.prefix)) for job in world.jobs)
    readings = tuple((tuple(reading.prefix), reading.base, s.still_reads(reading)) for reading in world.readings)
    verifier = world.verifier and (
        tuple(world.verifier.tokens or ()),
        max(-2, world.verifier.seq - s.verifier.seq),
        world.deaf,
    )
    return (
        tuple(s.committed),
        tuple(s.provisional),
        tuple(s.text.writers),
        s.offline.reading,
        s.offline.holds,
        s.offline.writer,
        s.offline.drafter_is_done,
        readings,
        s.offline.active,
        s.offline.paused,
        s.verifier.linked,
        s.arm,
        s.job.busy,
        s.verifier.fresh_open,
        s.verifier.seq == 0,
        s.job.ready and (s.job.ready[0], s.job.ready[1].tree),
        s.finished,
        ahead(s.verifier.retry_at),
        ahead(s.verifier.connect_by),
        ahead(s.offline.give_up_at),
        flight,
        coming,
        jobs,
        verifier,
    )


POLICIES = {
    "prefer-cloud": Policy(),
    "streaming": Policy(),
    "keep": Policy(on_return="keep"),
    "cloud-only": Policy(writer="cloud-only"),
    "prefer-device": Policy(writer="prefer-device", lead=1),
    "sentence": Policy(),
    "understudy": Policy(),
    "understudy, keep": Policy(on_return="keep"),
    "understudy, warm": Policy(understudy="warm"),
}


QUICK = ("prefer-cloud", "cloud-only", "prefer-device", "sentence", "understudy, keep")
#: with them three tokens have too many states
LARGE = ("sentence", "understudy")
CASES = [
    *(pytest.param(name, 2, marks=() if name in QUICK else pytest.mark.slow) for name in POLICIES),
    *(pytest.param(name, 3, marks=pytest.mark.slow) for name in POLICIES if not name.startswith(LARGE)),
]


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_every_order_of_events(name: str, tokens: int) -> None:
    policy = POLICIES[name]
    understudy, ends_sentence = "understudy" in name, frozenset([1] if name == "sentence" else [])
    world = World(
        random.Random(0), tokens, policy, PATIENCE, FixedTimer(), understudy=understudy, sentence_ends=ends_sentence
    )
    del world.rng  # nothing is drawn, and its state is most of what would be copied
    world.do(world.session.start(0.0))
    seen: dict[Hashable, World] = {key(world): world}
    before: dict[Hashable, set[Hashable]] = {}
    todo, ends = deque([world]), set[Hashable]()
    expected = plain(PROMPT, tokens)
    while todo:
        world = todo.popleft()
        here = key(world)
        if world.done:
            ends.add(here)
            text = world.session.text
            by_target = "stop" if text.ended else "length"
            if text.provisional or world.done != by_target:
                assert world.done == (text.end_alone or "unreachable"), "the target was waited for in vain"
            elif not text.adopted:
                assert world.shown == expected and world.verified == len(expected)
            continue
        for _, after in successors(world, name):
            there = key(after)
            before.setdefault(there, set()).add(here)
            if there not in seen:
                seen[there] = after
                todo.append(after)
        assert len(seen) < 20_000, "the space is larger than it was; look why"
    reach, backwards = set(ends), list(ends)
    while backwards:
        for state in before.get(backwards.pop(), ()):
            if state not in reach:
                reach.add(state)
                backwards.append(state)
    assert len(reach) == len(seen), "from some states no way leads to the end"
    print(f"{name}: {len(seen)} states, {len(ends)} ends")
    assert len(seen) > 150
