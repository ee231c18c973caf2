"""A conversation in virtual time: the real session and controller in a world of `benchmarks.scenarios`."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, log2

from benchmarks.links import LEAST_RETRY, RETRY_TRIPS, LabLink
from benchmarks.scenarios import CHOICES, Scenario, draft
from edge_runtime.session.actions import (
    Action,
    Compare,
    DraftAhead,
    DraftChain,
    DraftTree,
    ReadText,
    Send,
)
from edge_runtime.session.policy import Policy, UnderstudyUse, WhoWrites
from edge_runtime.session.session import Session
from edge_runtime.session.states import Writer
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.tuning import LARGEST, Tuning
from edge_runtime.speed.arms import Arm, TreeArm
from edge_runtime.speed.controller import Controller
from outrider_core.drafting.drafter import PROMPT_CHUNK, Draft, TreeShape
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import FINISH_LENGTH, FINISH_NONE, Cancel, Generate, Open, Verdict, Verify, Welcome

CHOSEN = "chosen"
CHAINS = (4, 8, 16)
#: share of verdicts whose next root was expanded ahead (lab/notebook.md)
FORESEEN = 0.62
#: a device that is suspended is so in every other answer
SUSPEND_EVERY = 2
#: no answer is given up
PATIENCE = Patience(open=60.0, silence=1e9, offline=1e9)


class Device:
    """State that a device keeps from answer to answer. arm: CHOSEN, or the fixed one. step: a drafting step, in
    seconds."""

    def __init__(self, arm: str, step: float) -> None:
        chain = arm.removeprefix("chain ") if arm.startswith("chain") else ""
        mode = None if arm == CHOSEN else Arm.STREAM if arm == "stream" else Arm.TREE
        self.controller, self.timer = Controller(tree=TreeArm(step=step), pinned=mode), RoundTimer()
        self.drafter, self.understudy = not chain, bool(chain) or arm == CHOSEN
        self.largest, self.shaping = TreeShape(depth=int(chain)) if chain else LARGEST, not chain

    def tuning(self) -> Tuning:
        """Make an answer's."""
        return Tuning(self.controller, self.largest, self.shaping)


class Simulation:
    """An answer: the real session, and everything around it in virtual time."""

    def __init__(self, world: Scenario, number: int, device: Device) -> None:
        self.world, self.number, self.passage = world, number, world.passages[number]
        self.text = [rank + 1 for rank in self.passage.ranks]
        self.rng = random.Random(f"{world.number} {number}")
        self.link = LabLink(world.profile, world.number, 0.0, 1.0)
        self.link.rngs = [self.rng, self.rng]
        self.prompt = 1  # tokens of the session's: reading it takes as long as the passage's would
        understudy = world.token is not None and device.understudy
        use = UnderstudyUse.WARM if understudy else UnderstudyUse.OFF
        self.session = Session(
            prompt=[1] * self.prompt, sampling=Sampling(), eos_ids=frozenset(), max_new=self.passage.length,
            max_context=1 << 14, row_shape=RowShape(1, 2), session_id=bytes(16), patience=PATIENCE,
            policy=Policy(writer=WhoWrites.CLOUD_ONLY, understudy=use), timer=device.timer, tuning=device.tuning(),
            drafter=device.drafter, understudy=understudy,
        )  # fmt: skip
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], list[Action]]]] = []
        self._count = 0
        self._up = self._down = 0.0  # when the last message of each direction arrives: they keep their order
        self._engine_free = self._drafter_free = self._understudy_free = 0.0
        self._generation = 0  # of the verifier's stream: an older one has ended
        self._read = self.prompt - self.passage.prompt  # tokens of the text that the drafter has read
        self._ahead = self._ahead_before = False  # the device drafts ahead; did for the tree that was verified
        self._chain_ahead: int | None = None  # tokens that the understudy knows behind the last chain

    def run(self, first: bool) -> float:
        """Write the answer. first: the link has just come up. Returns the seconds that it took."""
        world, session = self.world, self.session
        costs = world.advertised.pack() if world.advertised else b""
        welcome = Welcome(1, "t", "d", 10, 1 << 14, 64, 64, "", costs, 0, "", *world.told())
        self._do(session.start(0.0))
        self._do(session.link_up(welcome, 0.0, world.profile.rtt / 1000 if first else None))
        while not session.finished:
            wake = session.wake_at()
            if wake is not None and (not self._events or self._awake(wake) < self._events[0][0]):
                self.now = max(self.now, self._awake(wake))
                self._do(session.tick(self.now))
                continue
            self.now, _, event = heapq.heappop(self._events)
            self._do(event())
        return self.now

    # --- time ---

    def _at(self, when: float, event: Callable[[], list[Action]]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def _on_device(self, when: float, event: Callable[[], list[Action]]) -> None:
        self._at(self._awake(when), event)

    def _awake(self, when: float) -> float:
        """The device is suspended for a while; what happens to it then, it sees later."""
        begin, end = self.world.asleep
        if self.number % SUSPEND_EVERY:
            return when
        return end if begin <= when < end else when

    def _trip(self, sent: float, last: float) -> float:
        """Return the arrival of a message that was sent after one that arrives at `last`."""
        profile, seconds = self.world.profile, self.link.trip(up=False)
        if self.rng.random() < profile.loss / 100:
            seconds += max(LEAST_RETRY, RETRY_TRIPS * profile.rtt / 1000)
        arrival = sent + seconds
        if profile.outage:
            since = (arrival + profile.period / 2) % profile.period  # the first outage: after half a period
            arrival += max(0.0, profile.outage - since)
        return max(last, arrival)

    # --- the device ---

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self._up = self._trip(self.now, self._up)
                    self._at(self._up, partial(self._receive, message))
                case DraftTree():
                    given, seconds = self._tree(action)
                    self._on_device(self._drafter_free, self._ready(given, action.version, seconds))
                case DraftChain():
                    chain, seconds = self._chain(action.prefix, action.tokens)
                    self._on_device(self._understudy_free, self._ready(chain, action.version, seconds))
                case Compare(arm=Arm.TREE):
                    given, seconds = self._tree(action)
                    ready = partial(self.session.tree_compared, given, len(action.prefix), seconds)
                    self._on_device(self._drafter_free, ready)
                case Compare():
                    given, seconds = self._chain(action.prefix, action.nodes)
                    ready = partial(self.session.tree_compared, given, len(action.prefix), seconds)
                    self._on_device(self._understudy_free, ready)
                case DraftAhead():
                    self._ahead = self.session.drafts_ahead is Writer.DRAFTER
                    if self.session.drafts_ahead is Writer.UNDERSTUDY:
                        self._chain_ahead = 0
                case ReadText():
                    self._understudy_free = max(self.now, self._understudy_free) + 0.1 * (self.world.token or 0.0)
                    self._on_device(self._understudy_free, lambda: self.session.text_read(0, self.now))
                case _:
                    pass

    def _ready(self, drafted: Draft, version: int, seconds: float) -> Callable[[], list[Action]]:
        return lambda: self.session.tree_ready(drafted, version, self.now, seconds)

    def _arrival(self, verdict: Verdict) -> Callable[[], list[Action]]:
        return lambda: self.session.message(verdict, self.now)

    def _tree(self, action: DraftTree | Compare) -> tuple[Draft, float]:
        """The tree that is asked for, and the seconds that it takes once the drafter is free."""
        world, at = self.world, len(action.prefix) - self.prompt
        new, self._read = len(action.prefix) - self._read, len(action.prefix)
        self._drafter_free = max(self.now, self._drafter_free)
        if action.depth < 1 or at >= self.passage.length:
            return Draft(), 0.0
        gain = LARGEST.gain if not action.gain else 2 ** (round(4 * log2(action.gain)) / 4)  # few trees are grown
        level = self.passage.levels[at]
        tree, scores, steps = draft(level, world.boast, max(1, action.nodes), gain)
        if tree.tokens and max(tree.depths) > action.depth:
            kept = tree.pruned(len(tree), action.depth)
            scores = tuple(s for s, depth in zip(scores, tree.depths, strict=True) if depth <= action.depth)
            tree = kept
        ahead = self._ahead_before and isinstance(action, DraftTree) and self.rng.random() < FORESEEN
        steps = min(steps, 1) if ahead else steps
        chunks = max(0, (new - 1) // PROMPT_CHUNK)
        seconds = (steps + chunks) * world.draft_step + new * world.reading
        self._drafter_free += seconds
        return Draft(tree, scores, steps, ahead), seconds

    def _chain(self, prefix: list[int], count: int) -> tuple[Draft, float]:
        at, tokens = len(prefix) - self.prompt, list[int]()
        for place in range(at, min(at + count, self.passage.length)):
            tokens.append(self.text[place] if self.passage.written[place] else 1 + self.text[place] % (CHOICES + 1))
            if not self.passage.written[place]:
                tokens += [1] * (min(at + count, self.passage.length) - place - 1)
                break
        known, self._chain_ahead = self._chain_ahead or 0, None
        steps = max(0, len(tokens) - known)
        seconds = steps * (self.world.token or 0.0)
        self._understudy_free = max(self.now, self._understudy_free) + seconds
        return Draft(TokenTree.chain(tokens), (0.0,) * len(tokens), steps), seconds

    # --- the verifier ---

    def _receive(self, message: object) -> list[Action]:
        match message:
            case Open():
                self._generation += 1
            case Cancel():
                self._generation += 1
            case Verify():
                self._generation += 1
                self._verify(message)
            case Generate():
                self._generation += 1
                self._step(message, self._generation, message.base_len, self.world.queue(self.number, self.now))
        return []

    def _engine(self, tokens: int, start: float, crowded: bool) -> float:
        world = self.world
        factor = world.slow(self.number, start) * self.rng.uniform(0.95, 1.06)
        return factor * (world.crowding if crowded else 1.0) * world.curve.at(tokens)

    def _verify(self, message: Verify) -> None:
        request = self.session.verifier.in_flight
        tree = request.tree if request and request.seq == message.seq else TokenTree()
        queue = self.world.queue(self.number, self.now)
        start = max(self.now, self._engine_free) + queue
        engine = self._engine(1 + len(tree), start, self._ahead)
        self._engine_free = start + engine
        at, node, path = message.base_len - self.prompt, ROOT, list[int]()
        while at < self.passage.length - 1 and (child := tree.child(node, self.text[at])) is not None:
            node, at = child, at + 1
            path.append(child)
        chained = self._chain_ahead is not None
        right = len(path) == len(tree) and self.passage.written[at]
        waiting = self.world.profile.rtt / 1000 + queue + engine
        known = max(0, int(waiting / (self.world.token or inf)) - 1) if chained and right else 0

        def arrive() -> list[Action]:
            self._ahead_before, self._ahead = self._ahead, False
            self._chain_ahead = known if chained else None
            return self.session.message(verdict, self.now)

        verdict = self._verdict(message.seq, message.base_len, path, at, queue, engine)
        self._down = self._trip(self._engine_free, self._down)
        self._on_device(self._down, arrive)

    def _step(self, message: Generate, generation: int, base: int, queue: float = 0.0) -> list[Action]:
        """A step of a stream: its token, and what lookup brings with it. queue: seconds that the first one waits."""
        at, end = base - self.prompt, self.passage.length
        if generation != self._generation or at >= end:
            return []
        count = self.passage.together(at)
        start = max(self.now, self._engine_free) + queue
        engine = self._engine(count, start, self._drafter_free > start)
        self._engine_free = start + engine
        for place in range(count):
            told = (queue, engine) if place == 0 else (0.0, 0.0)
            verdict = self._verdict(message.seq, base + place, [], at + place, *told)
            self._down = self._trip(self._engine_free, self._down)
            self._on_device(self._down, self._arrival(verdict))
        self._at(self._engine_free, partial(self._step, message, generation, base + count))
        return []

    def _verdict(self, seq: int, base: int, path: list[int], at: int, queue: float, engine: float) -> Verdict:
        finish = FINISH_LENGTH if at >= self.passage.length - 1 else FINISH_NONE
        timed = int(1e6 * queue), int(1e6 * engine)
        return Verdict(0, seq, base, bytes(path), self.text[at], finish, b"", 0, *timed)


def arms(world: Scenario) -> list[str]:
    """The fixed ones."""
    return ["tree", "stream", *(f"chain {count}" for count in CHAINS if world.token is not None)]


def write(world: Scenario, arm: str) -> list[float]:
    """Seconds of every answer."""
    device = Device(arm, world.draft_step)
    return [Simulation(world, number, device).run(number == 0) for number in range(len(world.passages))]
