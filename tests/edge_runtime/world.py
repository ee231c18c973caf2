"""A session's whole surroundings, simulated: target, verifier, drafter, understudy, link and clock, and what is seen.

Every action is checked as it is carried out; `expect_sound` holds after every event, whatever happened.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from edge_runtime.session.actions import (
    Action,
    AddRows,
    Adopt,
    Commit,
    Compare,
    Done,
    DraftAhead,
    DraftChain,
    DraftTree,
    HandOver,
    Pause,
    Pin,
    Provide,
    ReadText,
    Reconnect,
    Resume,
    RollBack,
    Send,
    Stall,
    WriteToken,
)
from edge_runtime.session.policy import Policy
from edge_runtime.session.session import Session
from edge_runtime.session.states import PauseReason, Writer
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.tuning import Tuning
from edge_runtime.speed.arms import Arm
from edge_runtime.speed.controller import Controller
from outrider_core.drafting.drafter import Draft, TreeShape
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import (
    ERR_BUSY,
    ERR_UNKNOWN,
    FINISH_EOS,
    FINISH_NONE,
    Cancel,
    Error,
    Features,
    Generate,
    Open,
    Opened,
    Resync,
    ServerMessage,
    Verdict,
    Verify,
    Welcome,
    unpack_ids,
    unpack_tree,
)

EOS = 0
VOCAB = 5
PROMPT = [3, 1, 4]
STREAMED_ROWS = 3  # as cloud.engine.features has it, but for answers this short
SHAPE = RowShape(1, 2)
WELCOME = Welcome(1, "t", "d", VOCAB, 64, 8, 8)
PATIENCE = Patience(open=0.5, connect=0.2, silence=1.0, offline=1e9)


def target(prefix: list[int], arithmetic: str = "") -> int:
    """The simulated target's next token: a fixed function of the whole prefix, rarely EOS; in another `arithmetic`
    another one."""
    h = sum(arithmetic.encode())
    for token in prefix:
        h = (h * 31 + token + 7) % 9973
    return EOS if h % 17 == 0 else 1 + h % (VOCAB - 1)


def understudy(prefix: list[int]) -> int:
    """The simulated understudy's next token: the target's, but for one in seven."""
    token = target(prefix)
    return (token + 1) % VOCAB if sum(prefix) % 7 == 0 else token


def plain(prompt: list[int], limit: int, arithmetic: str = "") -> list[int]:
    out: list[int] = []
    while len(out) < limit and (not out or out[-1] != EOS):
        out.append(target(prompt + out, arithmetic))
    return out


class SimulatedVerifier:
    """What one connection answers: the rules of outrider_core.protocol.wire without a model."""

    def __init__(self, arithmetic: str = "") -> None:
        self.arithmetic = arithmetic
        self.tokens: list[int] | None = None
        self.seq = 0
        self.rows_due = 0  # the first position whose row was not sent yet

    def receive(self, message: object) -> list[ServerMessage]:
        if isinstance(message, Open):
            self.tokens, self.seq = unpack_ids(message.tokens), message.seq
            self.rows_due = len(self.tokens) - 1
            rows = bytes(SHAPE.nbytes * (self.rows_due - message.features_have))
            return [Opened(0, len(self.tokens), 0), Features(0, message.features_have, rows)]
        if isinstance(message, Verify | Generate):
            if self.tokens is None:
                return [Error(ERR_UNKNOWN, "open first", 0)]
            assert message.seq == self.seq + 1, "the device skipped or repeated a number"
            if message.base_len != len(self.tokens):
                return [Resync(0, len(self.tokens))]
            self.seq = message.seq
            return [self._walk(message)] if isinstance(message, Verify) else self._write(message)
        return []

    def _walk(self, message: Verify) -> Verdict:
        assert self.tokens is not None
        tree = unpack_tree(message.tokens, message.parents)
        node, path, base = ROOT, list[int](), len(self.tokens)
        while True:
            token = target(self.tokens, self.arithmetic)
            self.tokens.append(token)
            child = None if token == EOS else tree.child(node, token)
            if child is None:
                finish = FINISH_EOS if token == EOS else FINISH_NONE
                return Verdict(0, self.seq, base, bytes(path), token, finish, self._rows(base + len(path)))
            node = child
            path.append(node)

    def _write(self, message: Generate) -> list[ServerMessage]:
        assert self.tokens is not None
        verdicts: list[ServerMessage] = []
        for count in range(1, message.max_new + 1):
            base, token = len(self.tokens), target(self.tokens, self.arithmetic)
            self.tokens.append(token)
            finish = FINISH_EOS if token == EOS else FINISH_NONE
            due = message.rows and (base - self.rows_due >= STREAMED_ROWS or count == message.max_new)
            rows = self._rows(base) if due else b""
            verdicts.append(Verdict(0, self.seq, base, b"", token, finish, rows))
            if token == EOS:
                break
        return verdicts

    def _rows(self, stop: int) -> bytes:
        """Those up to position `stop` that were not sent."""
        start, self.rows_due = self.rows_due, stop
        return bytes(SHAPE.nbytes * (stop - start))


@dataclass(frozen=True)
class SimulatedLink:
    """What a verifier and the way to it cost: seconds of a handshake, a curve, and what a step takes of its time.

    together: a step of a stream brings up to so many tokens, as far as it foresees the text.
    """

    rtt: float
    curve: CostCurve
    slowdown: float
    together: int = 1

    @property
    def welcome(self) -> Welcome:
        return structs.replace(WELCOME, costs=self.curve.pack())

    def timed(self, verdict: Verdict, tokens: int) -> Verdict:
        engine = self.slowdown * self.curve.at(tokens)
        return structs.replace(verdict, engine_us=int(1e6 * engine), queue_us=int(1e5 * engine))


def pinned(mode: Arm = Arm.TREE) -> Tuning:
    """Nothing is chosen: one mode, and trees as large as they come."""
    return Tuning(Controller(pinned=mode), TreeShape(nodes=255, depth=64), shaping=False)


class World:
    """Runs a session against the simulated verifier; a random source picks what happens next.

    tuning: makes the session's choices; without it the mode is pinned (`pin`), and trees are sent as they are drafted.
    link: what there is to measure; without it the session hears of no times. drafter, understudy: there is one. fleet:
    what the verifiers behind the address compute in. begun: what a recorded answer was begun in.
    """

    def __init__(
        self,
        rng: random.Random,
        max_new: int = 20,
        policy: Policy | None = None,
        patience: Patience = PATIENCE,
        timer: RoundTimer | None = None,
        tuning: Tuning | None = None,
        link: SimulatedLink | None = None,
        understudy: bool = False,
        sentence_ends: frozenset[int] = frozenset(),
        obeys: bool = True,
        constraint: Constraint | None = None,
        fleet: tuple[str, ...] = ("",),
        begun: str = "",
        drafter: bool = True,
    ) -> None:
        self.fleet, self.wanted = fleet, ""
        self.rng, self.now, self.link = rng, 0.0, link
        self.welcome = WELCOME  # where there is no `link`
        self.session = Session(
            prompt=list(PROMPT),
            sampling=Sampling(),
            eos_ids=frozenset([EOS]),
            max_new=max_new,
            max_context=64,
            row_shape=SHAPE,
            session_id=bytes(16),
            patience=patience,
            policy=policy or Policy(),
            timer=timer or RoundTimer(),
            tuning=tuning or pinned(),
            drafter=drafter,
            understudy=understudy,
            sentence_ends=sentence_ends,
            obeys=obeys,
            constraint=constraint,
        )
        self.session.verifier.pinned = begun
        self.verifier: SimulatedVerifier | None = None
        self.deaf = False  # the link is half open: nothing gets through until it is cut
        self.to_device: list[ServerMessage] = []
        self.same_step = 0  # streamed tokens to come of the step that brought the last one
        self.jobs: list[DraftTree | DraftChain | WriteToken] = []
        self.readings: list[ReadText] = []
        self.writer = Writer.DRAFTER  # as was told
        self.comparisons: list[Compare] = []
        self.shown: list[int] = []  # what a user would see, built from the events alone
        self.verified = 0
        self.rows = 0
        self.done: str | None = None
        self.trace: list[str] = []
        self.committed = list(PROMPT)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.trace.append(type(action).__name__)
            match action:
                case Send(message=message):
                    self.send(message)
                case Pin(arithmetic=arithmetic):
                    assert arithmetic and self.wanted in ("", arithmetic)
                    self.wanted = arithmetic
                case DraftTree() | DraftChain() | WriteToken():
                    assert not self.jobs, "one drafter job at a time"
                    self.jobs.append(action)
                case ReadText():
                    assert not self.readings, "one reading at a time"
                    self.readings.append(action)
                case HandOver(writer=writer, why=why):
                    assert self.session.offline.active or not self.session.drafter
                    assert why or writer is not self.writer
                    self.writer = writer
                case Compare():
                    self.comparisons.append(action)
                case AddRows(rows=rows):
                    self.rows += len(rows)
                case Commit(tokens=tokens, confirmed=confirmed):
                    assert self.shown[self.verified : self.verified + confirmed] == tokens[:confirmed]
                    if confirmed < len(tokens):
                        assert len(self.shown) == self.verified + confirmed, "provisional text is in the way"
                    self.shown[self.verified :] = tokens + self.shown[self.verified + len(tokens) :]
                    self.verified += len(tokens)
                case Provide(token=token, writer=writer):
                    assert writer is self.writer
                    self.shown.append(token)
                case RollBack(tokens=tokens):
                    assert self.shown[-len(tokens) :] == tokens and len(self.shown) - len(tokens) >= self.verified
                    del self.shown[-len(tokens) :]
                case Adopt(tokens=tokens):
                    assert self.shown[self.verified :] == tokens
                    self.verified += len(tokens)
                case Reconnect():
                    self.cut()
                case Done(reason=reason):
                    assert self.done is None
                    self.done = reason
                case Resume():
                    self.writer = Writer.DRAFTER
                case Stall() | Pause() | DraftAhead():
                    pass
        if self.verifier and self.wanted and self.verifier.arithmetic not in ("", self.wanted):
            return self.cut(refused=True)
        self.expect_sound()

    def expect_sound(self) -> None:
        """What must hold after every event."""
        session = self.session
        assert session.committed[: len(self.committed)] == self.committed, "committed text changed"
        self.committed = list(session.committed)
        answer = session.committed[len(PROMPT) :]
        assert self.shown == answer + session.provisional == session.text.answer and self.verified == len(answer)
        writers = session.text.writers
        assert len(writers) == len(self.shown) and Writer.TARGET not in writers[len(answer) :]
        for index, writer in enumerate(writers):
            text = [*PROMPT, *self.shown[:index]]
            if index < len(answer) and writer is Writer.TARGET:
                assert "" in self.fleet[1:] or self.shown[index] == target(text, session.verifier.pinned)
            if writer is Writer.UNDERSTUDY:
                assert self.shown[index] == understudy(text)
        stats = session.stats
        accounted = stats.kept + stats.rolled_back + stats.adopted + len(session.provisional)
        assert stats.provisional == accounted
        assert len(self.shown) <= session.max_new
        at_work = self.jobs or self.readings
        assert session.finished or at_work or session.wake_at() is not None, "nobody will ever wake it"
        asked = session.offline.paused is PauseReason.ASKED
        assert not session.verifier.refused or session.finished or at_work or asked, "refused, and it waits"

    def send(self, message: Any) -> None:
        if self.verifier and not self.deaf:
            if isinstance(message, Cancel):
                return  # what was written already is on its way
            self.to_device += self.verifier.receive(message)

    def cut(self, refused: bool = False) -> None:
        if self.verifier:
            self.verifier, self.deaf, self.to_device = None, False, []
            self.do(self.session.link_down(self.now, refused) if refused else self.session.link_down(self.now))

    def connect(self, arithmetic: str | None = None) -> None:
        """To one of the fleet, or to one that computes in `arithmetic`; it may pass over what HELLO asks for."""
        if self.verifier:
            return
        if arithmetic is None:
            arithmetic = self.rng.choice(self.fleet) if len(self.fleet) > 1 else self.fleet[0]
        welcome = self.link.welcome if self.link else self.welcome
        if arithmetic:
            welcome = structs.replace(welcome, arithmetic=arithmetic)
        if not welcome.computes_in(self.wanted) and self.rng.random() < 0.5:
            return self.do(self.session.link_down(self.now, True))
        self.verifier, self.to_device = SimulatedVerifier(arithmetic), []
        self.do(self.session.link_up(welcome, self.now, *([self.link.rtt] if self.link else [])))

    def run_job(self) -> None:
        if not self.jobs:
            return
        job = self.jobs.pop()
        if isinstance(job, WriteToken):
            self.write(job, right=self.rng.random() < 0.7, confidence=round(self.rng.random(), 3))
        else:
            draft = Draft(self.chain(job.prefix, job.tokens) if isinstance(job, DraftChain) else self.tree(job))
            if self.link:
                draft = self.weighed(draft, isinstance(job, DraftChain))
                self.do(self.session.tree_ready(draft, job.version, self.now, 0.001 * self.rng.random()))
            else:
                self.do(self.session.tree_ready(draft, job.version, self.now))

    def write_alone(self, tokens: int) -> None:
        """Begin, with nobody there: the drafter writes what the target would."""
        self.do(self.session.start(self.now))
        self.run_job()
        self.tick(PATIENCE.connect)
        for _ in range(tokens):
            job = self.jobs.pop()
            assert isinstance(job, WriteToken)
            self.write(job, right=True, confidence=1.0)

    def run_reading(self) -> None:
        if not self.readings:
            return
        reading, agreed = self.readings.pop(), None
        if self.session.still_reads(reading):
            rest = range(reading.base, len(reading.prefix))
            wrong = (i for i in rest if understudy(reading.prefix[:i]) != reading.prefix[i])
            agreed = next(wrong, len(reading.prefix)) - reading.base
        self.do(self.session.text_read(agreed, self.now))

    def finish_reading(self) -> None:
        """The understudy would have written all that it was asked to read."""
        reading = self.readings.pop()
        self.do(self.session.text_read(len(reading.prefix) - reading.base, self.now))

    def fail(self) -> None:
        """The understudy fails at what it is doing, if it is at work."""
        job = self.jobs[0] if self.jobs else None
        if isinstance(job, DraftChain) or (isinstance(job, WriteToken) and job.writer is Writer.UNDERSTUDY):
            self.jobs.pop()
        elif not self.readings:
            return
        else:
            self.readings.pop()
        self.do(self.session.understudy_failed("out of memory", self.now))

    def write(self, job: WriteToken, right: bool, confidence: float) -> None:
        token = target(job.prefix, self.wanted)
        token = token if right else (token + 1) % VOCAB
        token = understudy(job.prefix) if job.writer is Writer.UNDERSTUDY else token
        self.do(self.session.token_written(token, confidence, job.version, self.now))

    def tree(self, job: DraftTree) -> TokenTree:
        tokens: list[int] = []
        parents: list[int] = []
        prefix, parent = list(job.prefix), ROOT
        for _ in range(min(job.depth, self.rng.randrange(4))):
            right = target(prefix, self.wanted)
            chosen = {right, self.rng.randrange(VOCAB)} if self.rng.random() < 0.8 else {(right + 1) % VOCAB}
            first = len(tokens)
            tokens += chosen
            parents += [parent] * len(chosen)
            if right not in chosen or right == EOS:
                break
            parent = tokens.index(right, first)
            prefix.append(right)
        return TokenTree(tuple(tokens), tuple(parents))

    def chain(self, prefix: list[int], tokens: int) -> TokenTree:
        """What the understudy drafts, or as far as it came."""
        drafted: list[int] = []
        for _ in range(tokens if self.rng.random() < 0.9 else self.rng.randrange(tokens)):
            drafted.append(understudy([*prefix, *drafted]))
        return TokenTree.chain(drafted)

    def weighed(self, draft: Draft, chain: bool = False) -> Draft:
        """With probabilities, and what it took."""
        scores = tuple(sorted((round(-self.rng.expovariate(1.0), 4) for _ in draft.tree.tokens), reverse=True))
        if chain:
            return Draft(draft.tree, scores, len(draft.tree))
        return Draft(draft.tree, scores, self.rng.randrange(1, 4), self.rng.random() < 0.3, self.rng.randrange(3))

    def run_comparison(self) -> None:
        if self.comparisons:
            job = self.comparisons.pop()
            if job.arm is Arm.CHAIN:
                draft = self.weighed(Draft(self.chain(job.prefix, job.nodes)), chain=True)
            else:
                draft = self.weighed(Draft(self.tree(DraftTree(job.prefix, 0, job.nodes, job.depth))))
            self.do(self.session.tree_compared(draft, len(job.prefix), 0.001))

    def deliver(self) -> None:
        if self.to_device:
            message = self.to_device.pop(0)
            if self.link and isinstance(message, Verdict):
                flight = self.session.verifier.in_flight
                tree = flight.tree if flight and flight.arm is not Arm.STREAM else None
                message = self.timed(message, tree)
                seconds = 1.1e-6 * message.engine_us + (0.0 if tree is None else self.link.rtt)
                self.now = round(self.now + seconds, 6)
            self.do(self.session.message(message, self.now))

    def timed(self, verdict: Verdict, tree: TokenTree | None) -> Verdict:
        """With the times of its step; a streamed token that came of the last one's step has none."""
        assert self.link
        if tree is None and self.same_step:
            self.same_step -= 1
            return verdict
        self.same_step = 0 if tree is not None else len(self.session.committed) % self.link.together
        return self.link.timed(verdict, 1 + len(tree or ()))

    def refuse(self, code: int) -> None:
        """The verifier refuses what it was asked last."""
        if self.verifier:
            self.verifier.tokens, self.to_device = None, []
            self.do(self.session.message(Error(code, "no", 0, 100), self.now))

    def tick(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)
        self.do(self.session.tick(self.now))

    def pin(self, mode: Arm) -> list[Action]:
        """Whatever is measured, the session uses `mode` from here on."""
        self.session.tuning.controller.pinned = mode
        return self.session.set_arm(mode, self.now)

    def begin_in(self, mode: Arm) -> None:
        """The session is to start in `mode`."""
        self.session.tuning.controller.pinned = self.session.arm = mode

    def happen(self, event: str) -> None:
        """One of EVENTS."""
        session = self.session
        match event:
            case "deliver":
                self.deliver()
            case "job":
                self.run_job()
            case "short":
                self.tick(0.05)
            case "long":
                self.tick(1.5)
            case "cut":
                self.cut()
            case "connect":
                self.connect()
            case "silence":
                self.deaf = self.verifier is not None
            case "stream":
                self.do(self.pin(Arm.STREAM))
            case "draft":
                self.do(self.pin(Arm.TREE))
            case "comparison":
                self.run_comparison()
            case "reading":
                self.run_reading()
            case "failure":
                self.fail()
            case "busy":
                self.refuse(ERR_BUSY)
            case "pause":
                self.do(session.pause(self.now))
            case "proceed":
                self.do(session.proceed(self.now))
            case _:
                raise AssertionError(event)

    def settle(self, steps: int = 2000) -> None:
        """From here on nothing goes wrong."""
        if self.deaf:
            self.cut()
        self.do(self.session.proceed(self.now))
        for _ in range(steps):
            if self.done:
                return
            self.connect(self.wanted or None)
            self.deliver()
            self.run_job()
            self.run_reading()
            wake = self.session.wake_at()
            if not self.to_device and not self.jobs and not self.readings and wake is not None:
                self.tick(max(0.0, wake - self.now))
        raise AssertionError(f"does not end: {self.trace[-20:]}")


EVENTS = ("deliver", "deliver", "job", "job", "short", "long", "cut", "connect", "silence", "stream", "draft", "pause",
          "proceed")  # fmt: skip
