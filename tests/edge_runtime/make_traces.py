"""Write outrider_core/protocol/vectors/sessions.json: `python -m tests.edge_runtime.make_traces`. For ports, and the
tests.

Each trace is one answer: how the session was made, then every event with its time and the actions it gave. A port
replays the events and must give the same actions (times to a microsecond).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

import outrider_core.protocol
from edge_runtime.session.actions import Action, AddRows, Send, WriteToken
from edge_runtime.session.offline import REFUSED_SECONDS
from edge_runtime.session.policy import Policy
from edge_runtime.session.session import Session
from edge_runtime.session.states import SessionEvent, State
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.tuning import Tuning
from edge_runtime.speed.arms import Arm
from outrider_core.drafting.drafter import Draft, TreeShape
from outrider_core.protocol.constraint import (
    GRAMMAR_JSON_SCHEMA,
    OBEYS_BIAS,
    OBEYS_JSON,
    OBEYS_TOOLS,
    Constraint,
    pack_bias,
)
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_BOUNDS, ERR_BUSY, ERR_MALFORMED, ERR_TOO_LONG, ERR_UNKNOWN
from tests.edge_runtime.world import EVENTS, PATIENCE, VOCAB, WELCOME, SimulatedLink, World, pinned, understudy
from tests.protocol.make_vectors import decoded, fields_of, message_of, text
from tests.protocol.make_vectors import plain as plain_field

FILE = Path(outrider_core.protocol.__file__).parent / "vectors" / "sessions.json"
COUNT = 240
#: of these, sessions that choose for themselves
CHOOSING = 40
#: of these, recorded with a time that the session does not ask for
TIMELESS = ("cancel", "stop")
POLICIES = (
    Policy(), Policy(), Policy(writer="prefer-device", lead=4), Policy(writer="cloud-only"),
    Policy(writer="device-only"), Policy(on_return="keep"), Policy(offline="pause", min_confidence=0.5),
)  # fmt: skip
#: with an understudy, or with sentences that end
ALONE_POLICIES = (
    Policy(), Policy(understudy="warm"), Policy(understudy="off"), Policy(writer="device-only"),
    Policy(on_return="keep"), Policy(offline="pause", min_confidence=0.5), Policy(writer="prefer-device", lead=4),
)  # fmt: skip
#: of these, recorded sessions
ALONE = 84
#: sessions without a drafter
UNDRAFTED = 56
#: what verifiers behind one address compute in
FLEET = ("onnx-8-v6", "torch-float32")
ALONE_EVENTS = (*EVENTS, *["job"] * 6, *["reading"] * 4, "failure")
CURVES = (CostCurve((1, 8, 32), (0.012, 0.015, 0.03)), CostCurve((1, 64), (0.025, 0.026)))
CHOOSING_EVENTS = (
    *["deliver"] * 40,
    *["job"] * 20,
    *["comparison"] * 6,
    *["short", "short", "long", "cut", "connect", "connect", "connect", "silence"],
    *["pause", "proceed", "proceed", "busy"],
)  # fmt: skip
#: sessions that choose for themselves, and whose understudy may draft
DRAFTING = 40
DRAFTING_EVENTS = (
    *["deliver"] * 60,
    *["job"] * 60,
    *["comparison"] * 16,
    *["reading"] * 12,
    *["short", "long", "cut", "connect", "connect", "connect", "connect", "failure"],
)


def plain(value: Any) -> Any:
    """JSON form of an argument or a field."""
    match value:
        case Draft():
            tree = {"tokens": list(value.tree.tokens), "parents": list(value.tree.parents)}
            other = {"scores": list(value.scores), "steps": value.steps, "ahead": value.ahead, "kept": value.kept}
            return tree if value == Draft(value.tree) else tree | other
        case np.ndarray():
            return value.tolist()
        case msgspec.Struct():
            return fields_of(value)  # type: ignore[arg-type]
    return value


def action_json(action: Action) -> list[Any]:
    name = type(action).__name__
    if isinstance(action, Send):
        return [name, fields_of(action.message)]
    if isinstance(action, AddRows):  # a row's content is checked by rows of outrider_core/protocol/vectors alone
        return [name, {"positions": action.positions.tolist()}]
    return [name, {field: plain(value) for field, value in vars(action).items() if value is not None}]


def setup_of(session: Session) -> dict[str, Any]:
    """How a session was made. tuning: only where it is free to choose."""
    tuning, sentence_ends = session.tuning, session.sentence_ends
    assert isinstance(sentence_ends, frozenset)
    setup = {
        "prompt": list(session.prompt),
        "sampling": msgspec.structs.asdict(session.sampling),
        "eos_ids": sorted(session.eos_ids),
        "max_new": session.max_new,
        "max_context": session.max_context,
        "row_shape": list(session.row_shape),
        "session": session.session_id.hex(),
        "stream": session.stream,
        "patience": asdict(session.patience),
        "policy": asdict(session.policy),
        "timer": {"floor": session.timer.floor, "ceiling": session.timer.ceiling, "first": session.timer.first},
        "arm": session.arm,
        "understudy": session.understudy,
        "sentence_ends": sorted(sentence_ends),
    }
    if not session.obeys:
        setup["obeys"] = False
    if not session.drafter:
        setup["drafter"] = False
    if session.constraint:
        setup["constraint"] = plain_field(session.constraint)
    if session.verifier.pinned:
        setup["arithmetic"] = session.verifier.pinned
    return (
        setup if tuning.controller.pinned else setup | {"tuning": asdict(tuning.largest) | {"shaping": tuning.shaping}}
    )


def tuning_of(setup: dict[str, Any]) -> Tuning:
    if "tuning" not in setup:
        return pinned(Arm(setup["arm"]))
    shape = dict(setup["tuning"])
    return Tuning(shaping=shape.pop("shaping"), largest=TreeShape(**shape))


def session_of(setup: dict[str, Any]) -> Session:
    """The inverse of `setup_of`."""
    session = Session(
        prompt=list(setup["prompt"]), sampling=Sampling(**setup["sampling"]), eos_ids=frozenset(setup["eos_ids"]),
        max_new=setup["max_new"], max_context=setup["max_context"], row_shape=RowShape(*setup["row_shape"]),
        session_id=bytes.fromhex(setup["session"]), stream=setup["stream"], patience=Patience(**setup["patience"]),
        policy=Policy(**setup["policy"]), timer=RoundTimer(**setup["timer"]), tuning=tuning_of(setup),
        understudy=setup["understudy"], sentence_ends=frozenset(setup["sentence_ends"]),
        obeys=setup.get("obeys", True), drafter=setup.get("drafter", True),
        constraint=Constraint(**decoded(setup["constraint"])) if "constraint" in setup else None,
    )  # fmt: skip
    session.arm = Arm(setup["arm"])
    session.verifier.pinned = setup.get("arithmetic", "")
    return session


def replay(trace: dict[str, Any]) -> None:
    """Feed a trace's events to a new session; raise AssertionError where it acts otherwise."""
    session = session_of(trace["setup"])
    for number, (call, arguments, actions, state) in enumerate(trace["steps"]):
        given = [action_json(action) for action in happen(session, call, [argument_of(value) for value in arguments])]
        assert same(given, actions), f"{trace['name']}, step {number}: {call} gives {given}, not {actions}"
        assert session.state == state


def happen(session: Session, call: str, arguments: list[Any]) -> list[Action]:
    """One step of a trace."""
    if call in TIMELESS:
        arguments.pop()
    if call == "set_arm":
        arguments[0] = session.tuning.controller.pinned = Arm(arguments[0])
    actions: list[Action] = getattr(session, call)(*arguments)
    return actions


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return abs(one - other) <= 1e-6
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def argument_of(value: Any) -> Any:
    if isinstance(value, dict):
        return draft_of(**value) if "parents" in value else message_of(value)
    return value


def draft_of(tokens: list[int], parents: list[int], scores: Sequence[float] = (), **other: Any) -> Draft:
    return Draft(TokenTree(tuple(tokens), tuple(parents)), tuple(scores), **other)


class Recording:
    """Everything that is called on a session of a world, as it happens."""

    def __init__(self, world: World) -> None:
        self.world, self.inside = world, False
        self.setup, self.steps = setup_of(world.session), list[Any]()
        for call in SessionEvent:
            setattr(world.session, call, self._recorded(world.session, call))

    def _recorded(self, session: Session, call: str) -> Callable[..., list[Action]]:
        inner = getattr(session, call)

        @wraps(inner)
        def event(*arguments: Any) -> list[Action]:
            if self.inside:  # an event that the session gives itself
                return inner(*arguments)  # type: ignore[no-any-return]
            given = [plain(argument) for argument in arguments] + [self.world.now] * (call in TIMELESS)
            self.inside = True
            actions: list[Action] = inner(*arguments)
            self.inside = False
            self.steps.append([call, given, [action_json(action) for action in actions], session.state])
            return actions

        return event


def make_trace(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    policy = POLICIES[number % len(POLICIES)]
    patience = PATIENCE if rng.random() < 0.7 else Patience(open=0.5, connect=0.2, silence=1.0, offline=2.0)
    world = World(rng, rng.choice([1, 6, 12]), policy, patience)
    world.begin_in(Arm.STREAM if rng.random() < 0.25 else Arm.TREE)
    recording = Recording(world)
    world.do(world.session.start(world.now))
    for event in rng.choices(EVENTS, k=rng.choice([0, 10, 40])):
        if world.session.finished:
            break
        world.happen(event)
        if world.verified and not world.session.finished and rng.random() < 0.05:
            world.session.stop(1)  # not carried out: this world knows of no stop strings
    if not world.session.finished and rng.random() < 0.1:
        world.do(world.session.cancel())
    if policy.writer == "device-only":
        while not world.session.finished:
            world.do(world.session.proceed(world.now))
            world.run_job()
    elif not world.session.finished:
        world.settle()
    return {
        "name": f"{number}: {policy.writer}, {policy.on_return}",
        "setup": recording.setup,
        "steps": recording.steps,
    }


def choosing_trace(number: int, drafts: bool = False) -> dict[str, Any]:
    """The session measures, and chooses trees or a stream and the size of what it asks for; chains of a warm understudy
    too, where that `drafts`."""
    rng = random.Random((3000 if drafts else 1000) + number)
    together = 1 + 2 * (number % 4 == 3)
    link = SimulatedLink(rng.choice([0.001, 0.02, 0.3]), rng.choice(CURVES), rng.choice([0.5, 1.0, 3.0]), together)
    policies = [p for p in POLICIES if (p.target_first if drafts else p.writer != "device-only")]
    policy = policies[number % len(policies)]
    shaping = rng.random() < (0.9 if drafts else 0.8)
    if drafts:
        policy = replace(policy, understudy="warm")
    world = World(rng, 60, policy, link=link, tuning=Tuning(shaping=shaping), understudy=drafts)
    recording = Recording(world)
    world.do(world.session.start(world.now))
    for event in rng.choices(DRAFTING_EVENTS if drafts else CHOOSING_EVENTS, k=200 if drafts else 120):
        if world.session.finished:
            break
        world.happen(event)
    if not world.session.finished:
        world.do(world.session.cancel())
    name = f"{'understudy drafts' if drafts else 'chooses'} {number}: {policy.writer}"
    return {"name": name, "setup": recording.setup, "steps": recording.steps}


def alone_trace(number: int, drafter: bool = True) -> dict[str, Any]:
    """Who writes alone: the drafter to the end of a sentence, or the understudy once it has read the text.

    drafter: there is one; else the understudy also drafts.
    """
    rng = random.Random(2000 + number + (0 if drafter else 1000))
    policy = ALONE_POLICIES[number % len(ALONE_POLICIES)]
    present = rng.random() < 0.8
    ends = frozenset([rng.randrange(1, VOCAB)])
    world = World(rng, rng.choice([6, 12, 40]), policy, understudy=present, sentence_ends=ends, drafter=drafter)
    recording = Recording(world)
    world.do(world.session.start(world.now))
    dials = drafter or policy.writer != "device-only"
    for event in rng.choices(ALONE_EVENTS, k=rng.choice([20, 60])):
        if not world.session.finished and (dials or event != "connect"):
            world.happen(event)
    if policy.writer == "device-only":
        while not world.session.finished:
            world.do(world.session.proceed(world.now))
            world.run_reading()
            world.run_job()
    elif not world.session.finished:
        world.settle()
    name = f"alone {number}: {policy.writer}, {'understudy ' + policy.understudy if present else 'no understudy'}"
    name += "" if drafter else ", no drafter"
    return {"name": name, "setup": recording.setup, "steps": recording.steps}


def hand_over_traces() -> list[dict[str, Any]]:
    """The moments at which the understudy may come in, and fail."""
    traces = []

    def record(name: str, policy: Policy | None = None) -> World:
        world = World(random.Random(0), 12, policy, understudy=True)
        recording = Recording(world)
        traces.append({"name": f"understudy: {name}", "setup": recording.setup, "steps": recording.steps})
        world.do(world.session.start(world.now))
        return world

    def silent(world: World, written: int = 2) -> World:
        """Some tokens are verified; then the target falls silent, and the drafter has written `written` of its own."""
        world.connect()
        for _ in range(3):
            world.deliver()
        while world.session.state is not State.VERIFYING:
            world.run_job()
        world.deaf, world.to_device = True, []
        world.tick(5.0)
        for _ in range(written):
            world.run_job()
        assert world.session.provisional and world.readings
        return world

    def back(world: World) -> None:
        world.cut()
        world.connect()
        for _ in range(4):
            world.deliver()

    world = record("before the first token")
    world.tick(PATIENCE.connect)
    world.run_reading()
    world.settle()
    world = silent(record("takes over"))
    world.run_reading()
    for _ in range(3):
        world.run_job()
    world.settle()
    for agrees in (True, False):
        world = silent(record(f"judges what was written while it read, and {'agrees' if agrees else 'does not'}"), 1)
        for _ in range(2):
            job = world.jobs.pop()
            assert isinstance(job, WriteToken)
            token = understudy(job.prefix) if agrees else 1 + understudy(job.prefix) % (VOCAB - 1)
            world.do(world.session.token_written(token, 1.0, job.version, world.now))
        world.finish_reading()
        world.run_job()
        assert world.readings and not world.jobs
        world.run_reading()
        world.run_job()
        world.settle()
    world = silent(record("judges what was written while it read, and the target returns"), 1)
    world.run_job()
    world.finish_reading()
    assert world.readings
    back(world)
    world.run_reading()
    world.settle()
    world = silent(record("the target returns while it reads"))
    back(world)
    world.run_reading()
    world.settle()
    world = silent(record("the target returns while it writes"))
    world.run_reading()
    back(world)
    world.run_job()
    world.settle()
    world = silent(record("fails while it reads"))
    world.fail()
    world.run_job()
    world.settle()
    world = silent(record("fails while it writes"))
    world.run_reading()
    world.run_job()
    world.fail()
    world.run_job()
    world.settle()
    world = silent(record("fails after the target's return"))
    world.run_reading()
    world.run_job()
    back(world)
    world.fail()
    world.settle()
    world = silent(record("twice in one answer"))
    world.run_reading()
    world.run_job()
    back(world)
    world.run_job()
    world.run_job()
    world.cut()
    world.run_job()
    world.run_reading()
    world.run_job()
    world.settle()
    world = silent(record("kept warm", Policy(understudy="warm")))
    world.run_reading()
    world.run_job()
    world.settle()
    world = record("device only, and it fails", Policy(writer="device-only"))
    world.fail()
    while not world.session.finished:
        world.run_job()
    return traces


def refusal_traces() -> list[dict[str, Any]]:
    """What ends or stalls an answer before a request is under way."""
    traces = []

    def begin(name: str, policy: Policy | None = None, max_new: int = 6) -> World:
        world = World(random.Random(0), max_new, policy)
        recording = Recording(world)
        traces.append({"name": name, "setup": recording.setup, "steps": recording.steps})
        world.do(world.session.start(world.now))
        return world

    begin("no room for a token", max_new=0)
    world = begin("a verifier with less context than the prompt")
    world.do(world.session.link_up(structs.replace(WELCOME, max_context=len(world.session.prompt)), world.now))
    for writer, code in (("prefer-cloud", ERR_BUSY), ("cloud-only", ERR_BUSY), ("prefer-cloud", ERR_TOO_LONG)):
        world = begin(f"refused while drafting, {writer}, code {code}", Policy(writer=writer))  # type: ignore[arg-type]
        world.connect()
        while world.to_device:
            world.deliver()
        assert world.session.state is State.DRAFTING
        world.refuse(code)
    return traces


def left_stream_trace() -> dict[str, Any]:
    """A stream is left for trees while provisional text is still to be verified."""
    world = World(random.Random(3))
    world.begin_in(Arm.STREAM)
    recording = Recording(world)
    world.do(world.session.start(world.now))
    world.connect()
    world.deliver()
    world.deliver()
    held = list(world.to_device)
    world.to_device.clear()
    world.tick(5.0)
    for _ in range(3):
        job = world.jobs.pop()
        assert isinstance(job, WriteToken)
        world.write(job, right=True, confidence=1.0)
    world.to_device = held
    world.deliver()
    world.do(world.pin(Arm.TREE))
    assert world.session.state is State.VERIFYING
    world.settle()
    return {"name": "a stream left while catching up", "setup": recording.setup, "steps": recording.steps}


def late_verdict_trace() -> dict[str, Any]:
    """A suspended device reads a verdict long after it came, before its clock ticks: the link is as fast as before."""
    world = World(random.Random(0), 60, link=SimulatedLink(0.001, CURVES[1], 1.0), tuning=Tuning())
    recording = Recording(world)
    world.do(world.session.start(world.now))
    world.connect()
    for seconds in (*[0.026] * 6, 9.0, *[0.026] * 15):
        world.run_job()
        world.now = round(world.now + seconds, 6)
        world.deliver()
        world.run_comparison()
    if not world.session.finished:
        world.do(world.session.cancel())
    return {"name": "a verdict that is read late", "setup": recording.setup, "steps": recording.steps}


def looping_trace() -> dict[str, Any]:
    """The drafter says the same three tokens for ever, until the link is there."""
    world = World(random.Random(COUNT), 60)
    recording = Recording(world)
    world.do(world.session.start(world.now))
    world.run_job()
    world.tick(PATIENCE.connect)
    while world.jobs:
        job = world.jobs.pop()
        world.do(world.session.token_written(1 + len(world.session.provisional) % 3, 1.0, job.version, world.now))
    world.settle()
    return {"name": "a drafter that repeats itself", "setup": recording.setup, "steps": recording.steps}


def refused_request_traces() -> list[dict[str, Any]]:
    """Requests that a verifier will never take, and contexts that are shorter than the text."""
    traces = []

    def record(name: str, policy: Policy | None = None, sentence_ends: frozenset[int] = frozenset()) -> World:
        world = World(random.Random(0), 40, policy, sentence_ends=sentence_ends)
        recording = Recording(world)
        traces.append({"name": name, "setup": recording.setup, "steps": recording.steps})
        return world

    def narrow(world: World, context: int) -> None:
        world.welcome = structs.replace(WELCOME, max_context=context)

    refusals = (("prefer-cloud", ERR_MALFORMED), ("cloud-only", ERR_BOUNDS), ("prefer-device", ERR_BOUNDS))
    for writer, code in refusals:
        for again in (False, True):
            world = record(f"never asked again, {writer}, code {code}", Policy(writer=writer))  # type: ignore[arg-type]
            world.do(world.session.start(world.now))
            world.connect()
            world.refuse(code)
            for _ in range(3 if again else 60):
                world.run_job()
                if not world.session.finished and not again:
                    world.tick(0.1)
            if again and not world.session.finished:
                world.cut()
                world.settle()
    for why, policy in (("it is not sure", Policy(offline="pause")), ("its sentence ends", Policy())):
        world = record(f"refused for good, and the drafter pauses: {why}", policy, frozenset([2]))
        world.do(world.session.start(world.now))
        world.connect()
        world.deliver()
        world.run_job()
        world.refuse(ERR_BOUNDS)
        while not world.session.finished:
            token, job = (1, 3, 2)[len(world.session.provisional) % 3], world.jobs.pop()
            world.do(world.session.token_written(token, 0.1, job.version, world.now))
        assert world.session.finished == "refused" and world.session.stats.pauses == 1
    world = record("refused for good in a pause that was asked for", Policy(), frozenset([2]))
    world.do(world.session.start(world.now))
    world.connect()
    world.do(world.session.pause(world.now))
    world.refuse(ERR_BOUNDS)
    world.run_job()
    world.do(world.session.proceed(world.now))
    while not world.session.finished:
        world.run_job()
    for writer in ("prefer-cloud", "cloud-only"):
        world = record(f"a verifier that does not accept this device, {writer}", Policy(writer=writer))  # type: ignore[arg-type]
        world.do(world.session.start(world.now))
        world.tick(PATIENCE.connect)
        world.do(world.session.link_down(world.now, True))
        for _ in range(60):
            world.run_job()
        world.do(world.session.link_down(world.now, True))
        world.tick(REFUSED_SECONDS)
    world = record("a chain as long as the verifier's context allows")
    world.write_alone(15)
    narrow(world, 12)
    world.settle()
    world = record("no room for what was written alone")
    world.write_alone(4)
    narrow(world, len(world.session.prompt))
    world.connect()
    world = record("a context that is full, with text written alone")
    world.write_alone(4)
    world.connect()
    world.refuse(ERR_TOO_LONG)
    world = record("more context than the verifier before had")
    narrow(world, 9)
    world.do(world.session.start(world.now))
    world.connect()
    world.deliver()
    world.cut()
    narrow(world, 64)
    world.settle()
    return traces


def vain_open_traces() -> list[dict[str, Any]]:
    """An OPEN that is refused, with what was asked behind it; and one that is of no help."""
    traces = []
    for writer in ("prefer-cloud", "cloud-only"):
        for codes in ((ERR_BUSY, ERR_UNKNOWN), (ERR_UNKNOWN, ERR_UNKNOWN)):
            world = World(random.Random(0), 6, Policy(writer=writer))  # type: ignore[arg-type]
            recording = Recording(world)
            name = f"an OPEN in vain, {writer}, codes {codes}"
            traces.append({"name": name, "setup": recording.setup, "steps": recording.steps})
            world.do(world.session.start(world.now))
            world.connect()
            for code in codes:
                world.refuse(code)
            world.tick(2.0)
            world.settle()
    return traces


def obedience_traces() -> list[dict[str, Any]]:
    """Under a constraint that the device's writers can be held to later, not any more, or never."""
    traces = []

    def record(name: str, **given: Any) -> World:
        world = World(random.Random(len(traces)), 8, obeys=False, **given)
        recording = Recording(world)
        traces.append({"name": f"rules {name}", "setup": recording.setup, "steps": recording.steps})
        world.do(world.session.start(world.now))
        return world

    def set_obeys(world: World, obeys: bool) -> None:
        world.do(world.session.set_obeys(obeys, world.now))

    for writer in ("prefer-cloud", "prefer-device", "device-only"):
        world = record(f"before the link, {writer}", policy=Policy(writer=writer))
        set_obeys(world, True)
        set_obeys(world, True)
        while writer == "device-only" and not world.session.finished:
            world.happen("job")
        if writer != "device-only":
            world.connect()
            world.settle()
    for present, on_return in ((False, "repair"), (True, "repair"), (True, "keep")):
        policy = Policy(on_return=on_return)
        world = record(f"while nothing is written alone, {on_return}", policy=policy, understudy=present)
        world.connect()
        world.deliver()
        world.cut()
        world.tick(0.5)
        set_obeys(world, True)
        for event in ("job", "job", "reading", "job", "job"):
            world.happen(event)
        world.connect()
        world.settle()
    world = record("that end while the device writes alone")
    set_obeys(world, True)
    world.cut()
    world.tick(5.0)
    for event in ("job", "job"):
        world.happen(event)
    set_obeys(world, False)
    world.happen("job")
    world.connect()
    world.settle()
    world = record("that never come", patience=Patience(open=0.5, connect=0.2, silence=1.0, offline=2.0))
    world.tick(1.0)
    world.tick(3.0)
    assert world.session.finished == "unreachable"
    world = record("that come during a pause")
    world.tick(5.0)
    world.do(world.session.pause(world.now))
    set_obeys(world, True)
    world.do(world.session.proceed(world.now))
    world.connect()
    world.settle()
    return traces


def constrained_traces() -> list[dict[str, Any]]:
    """OPEN carries what an answer is held to; a verifier that does not know that is not asked, another one is."""
    traces = []
    biased = Constraint(3, 0.5, -0.25, *pack_bias({7: 2.5, 11: -100.0}))
    formed = Constraint(3, grammar=GRAMMAR_JSON_SCHEMA, schema='{"type":"object"}')
    offers = {"nothing": 0, "biases": OBEYS_BIAS, "all": OBEYS_BIAS | OBEYS_JSON | OBEYS_TOOLS}
    for what, constraint in (("biases", biased), ("a schema", formed)):
        # where no grammar can be obeyed here, the target alone writes
        policy = Policy() if constraint is biased else Policy(writer="cloud-only")
        for offer, obeys in offers.items():
            world = World(random.Random(len(traces)), 8, policy=policy, constraint=constraint)
            recording = Recording(world)
            name = f"held to {what}, offered {offer}"
            traces.append({"name": name, "setup": recording.setup, "steps": recording.steps})
            world.do(world.session.start(world.now))
            world.welcome = structs.replace(WELCOME, constraints=obeys)
            world.connect()
            for event in ("job", "deliver", "job", "deliver"):
                world.happen(event)
            world.cut()
            world.tick(0.5)
            world.happen("job")
            world.welcome = structs.replace(WELCOME, constraints=offers["all"])
            world.connect()
            world.settle()
    return traces


def arithmetic_traces() -> list[dict[str, Any]]:
    """Verifiers behind one address that compute differently; some do not say how, or do not look at what HELLO asks."""
    traces = []

    def record(name: str, seed: int = 0, **given: Any) -> World:
        world = World(random.Random(seed), 12, **given)
        recording = Recording(world)
        traces.append({"name": f"arithmetic: {name}", "setup": recording.setup, "steps": recording.steps})
        world.do(world.session.start(world.now))
        return world

    def verify(world: World) -> None:
        """Until a verdict has brought some text."""
        before = world.trace.count("Commit")
        while world.trace.count("Commit") == before and not world.session.finished:
            world.deliver()
            world.run_job()

    for on_return in ("repair", "keep"):
        world = record(f"two, {on_return}", policy=Policy(on_return=on_return), fleet=FLEET)
        world.connect("onnx-8-v6")
        world.cut()  # before it has written anything
        world.connect("torch-float32")
        verify(world)
        for _ in range(4):
            world.cut()
            world.tick(0.5)
            world.connect("onnx-8-v6")
            world.run_job()
        world.settle()
        assert world.wanted == "torch-float32"
    world = record("unknown, then known, then unknown again", fleet=("", ""))
    for arithmetic in ("", "onnx-8-v6", ""):
        world.connect(arithmetic)
        verify(world)
        world.cut()
    world.connect("torch-float32")
    world.settle()
    for seed in range(2):
        world = record(f"a record, {seed}", seed, fleet=FLEET, begun="onnx-8-v6")
        world.connect("torch-float32")
        world.tick(0.5)
        world.settle()
    world = record("nobody with the first one comes back", fleet=FLEET)
    world.connect("onnx-8-v6")
    verify(world)
    world.cut()
    while not world.session.finished:
        world.connect("torch-float32")
        world.run_job()
        world.tick(1.0)
    assert world.session.finished in ("stop", "length") and world.session.provisional and world.now < 60
    for number in range(12):
        policy = POLICIES[number % len(POLICIES)]
        if policy.writer != "device-only":
            world = record(f"{number}: {policy.writer}, {policy.on_return}", number, policy=policy, fleet=FLEET)
            for event in world.rng.choices(EVENTS, k=40):
                if not world.session.finished:
                    world.happen(event)
            if not world.session.finished:
                world.settle()
    return traces


def traces() -> list[dict[str, Any]]:
    chosen = [choosing_trace(number) for number in range(CHOOSING)]
    chosen += [choosing_trace(number, drafts=True) for number in range(DRAFTING)]
    return [
        *(make_trace(number) for number in range(COUNT)),
        looping_trace(),
        *chosen,
        *refusal_traces(),
        left_stream_trace(),
        late_verdict_trace(),
        *refused_request_traces(),
        *vain_open_traces(),
        *(alone_trace(number) for number in range(ALONE)),
        *hand_over_traces(),
        *obedience_traces(),
        *constrained_traces(),
        *arithmetic_traces(),
        *(alone_trace(number, drafter=False) for number in range(UNDRAFTED)),
    ]


if __name__ == "__main__":
    made = traces()
    FILE.write_text(text(made), encoding="utf-8")
    print(f"{FILE}: {len(made)} traces, {FILE.stat().st_size:,} bytes")
