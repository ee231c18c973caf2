"""One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.

`committed` tokens were drawn by the target (or are the prompt); `provisional` tokens behind them were
written without it, by the drafter or the understudy. The text a user sees is committed + provisional.

One rule covers late verdicts, catching up after an outage and the normal round. A verdict commits the
accepted path and the bonus token. If these agree with the provisional tokens, the agreeing part becomes
verified; at the first difference the provisional rest is rolled back (`repair`) or stays as it is (`keep`). While
provisional tokens remain, the next VERIFY is the chain of them instead of a drafted tree.

When the target falls silent the drafter writes at once, and the understudy, where there is one, begins to read the
text, and then what the drafter wrote meanwhile, as far as it would have written that itself. The rest is withdrawn, and
it writes on.

Times are seconds on any monotonic clock, handed in with each event. `states` lists which state may follow which;
`verdicts` and `refusals` have what replies do, `writing` what is written without them, `work` what comes next,
`edge_runtime.speed.tuning` what measurements decide.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from edge_runtime.session.actions import (
    Action,
    Done,
    HandOver,
    ReadText,
    Reconnect,
    Send,
    Stall,
)
from edge_runtime.session.arithmetic import AnswerArithmetic
from edge_runtime.session.deadlines import Deadline, Deadlines
from edge_runtime.session.feature_rows import RowsSeen
from edge_runtime.session.handover import Handover
from edge_runtime.session.policy import Mode, Policy
from edge_runtime.session.refusals import REFUSED_SECONDS, ask_anew, disobeyed, expect_return, no_room, take_error
from edge_runtime.session.requests import Flight, Requests
from edge_runtime.session.solo import Solo
from edge_runtime.session.states import FinishReason, PauseReason, State, Writer
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.transcript import AnswerTokens, SessionStats
from edge_runtime.session.verdicts import adopt, take_verdict
from edge_runtime.session.work import work
from edge_runtime.session.writing import pause, take_reading, take_token
from edge_runtime.speed.tuning import Tuning
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES
from outrider_core.protocol.wire import (
    Cancel,
    Error,
    Features,
    Opened,
    Resync,
    ServerMessage,
    Verdict,
    Welcome,
)


@dataclass
class Session:
    """One answer. Feed events by calling the methods; each returns the actions to carry out, in order.

    prompt: token ids of the conversation so far. max_new: committed tokens at most. stream, session_id: as
    on the wire. row_shape: the drafter's. rows_seen: the prompt's rows that the drafter holds. timer: of rounds.
    understudy: there is one. sentence_ends: tokens that end a sentence or a line. constraint: what tokens are drawn
    under. obeys: the device's own writers can be held to it; where not, nothing is written alone.
    """

    prompt: list[int]
    sampling: Sampling
    eos_ids: frozenset[int]
    max_new: int
    max_context: int
    row_shape: RowShape
    session_id: bytes
    stream: int = 0
    rows_seen: RowsSeen = field(default_factory=RowsSeen)
    patience: Patience = field(default_factory=Patience)
    timer: RoundTimer = field(default_factory=RoundTimer)
    policy: Policy = field(default_factory=Policy)
    tuning: Tuning = field(default_factory=Tuning)
    understudy: bool = False
    sentence_ends: Container[int] = frozenset()
    constraint: Constraint | None = None
    obeys: bool = True

    def __post_init__(self) -> None:
        self.stats = SessionStats()
        self.text = AnswerTokens(list(self.prompt), len(self.prompt), self._own_limit, self.eos_ids, self.stats)
        self.requests = Requests(
            self.stream, self.session_id, self.sampling, self.patience, self.timer, self.stats, self.constraint
        )
        self.deadlines = Deadlines(self.patience.silence)
        self.solo = Solo(self.policy, self.sentence_ends)
        self.solo.obeys = self.obeys
        self.handover = Handover(self.understudy, self.policy)
        self.arithmetic = AnswerArithmetic()
        self.mode = Mode.TREE
        self.finished: FinishReason | None = None
        self.linked = False
        self.refused = False  # this link's verifier will never take what it was asked
        self.complaint = ""  # why the verifier refused what it was asked last; "" once it has answered
        self.return_wait = self.patience.offline  # for the target's return, where nothing more can be written
        self.ready: Draft | None = None  # the tree to send next
        self.busy: Writer | None = None  # who has a job of ours, to draft or to write
        self.version = 0  # of what the drafter is asked for: a job of another one is stale
        self.max_nodes = 64
        self.context = self.max_context  # the verifier's
        self.tree_budget = MAX_NODES  # what the verifier asks for now; larger trees it may prune

    @property
    def state(self) -> State:
        if self.finished:
            return State.FINISHED
        if self.alone:
            return State.WAITING if self.solo.mute else State.ALONE
        if self.flight:
            return State.STREAMING if self.flight.tree is None else State.VERIFYING
        return State.DRAFTING

    @property
    def _own_limit(self) -> int:
        """Tokens of the text at most, whatever the verifier's context."""
        return min(len(self.prompt) + self.max_new, self.max_context)

    @property
    def flight(self) -> Flight | None:
        """The request whose reply is awaited."""
        return self.requests.flight

    @property
    def alone(self) -> bool:
        """The target is silent."""
        return self.solo.alone

    @property
    def committed(self) -> list[int]:
        return self.text.committed

    @property
    def provisional(self) -> list[int]:
        return self.text.provisional

    @property
    def drafts_ahead(self) -> bool:
        """Whether to draft on below the tree under way: nobody has anything else to do, and it is worth it."""
        flight = self.flight
        idle = bool(flight and flight.tree) and not self.provisional and not self.busy
        return idle and self.tuning.drafts_ahead(self.chain_flies)

    @property
    def chain_flies(self) -> bool:
        """The tree under way is a chain of the understudy."""
        return bool(self.flight and self.flight.chain)

    # --- events ---

    def start(self, now: float) -> list[Action]:
        """Begin. Drafting starts at once, so that the first tree is ready when the link is."""
        self.deadlines.heard = now
        if self.policy.target_first:
            self.mode = self.tuning.begin()
        if self.text.over:
            return self.finish(FinishReason.STOP if self.text.ended else FinishReason.LENGTH)
        if self.policy.writer == "device-only":
            return self.go_on_alone(now, now)
        if not self.linked:
            self.deadlines.connect = now + self.patience.connect
        return [*self.arithmetic.wanted, *self.handover.read_along(self.committed), *self.work(now)]

    def link_up(self, welcome: Welcome, now: float, rtt: float | None = None) -> list[Action]:
        """The link is up and the hashes agree: OPEN with everything committed, and go on; with a verifier that computes
        otherwise than the one before, wait as where there is none.

        rtt: seconds of the handshake, if it happened during this answer.
        """
        if not welcome.computes_in(self.arithmetic.pinned):
            return [*self.arithmetic.wanted, *self.link_down(now, True)]
        self.arithmetic.offered = welcome.arithmetic
        actions: list[Action] = []
        if rtt is not None:
            self.tuning.linked(welcome, rtt)
            if self.policy.target_first:
                actions = self.set_mode(self.tuning.begin(), now)
        self.linked, self.deadlines.heard = True, now
        self.max_nodes = min(welcome.max_nodes, MAX_NODES)
        self.tree_budget = welcome.tree_budget or MAX_NODES
        self.context = welcome.max_context
        self.text.limit = min(self._own_limit, self.context)
        self.refused, self.complaint, self.return_wait = False, "", self.patience.offline
        if self.constraint and self.constraint.needs & ~welcome.constraints:
            return actions + disobeyed(self, now)
        return actions + self.open(now)

    def link_down(self, now: float, refused: bool = False) -> list[Action]:
        """There is no link. refused: a verifier was there, and does not accept this device; another one may."""
        self.linked, self.requests.flight, self.deadlines.retry = False, None, None
        if refused:
            expect_return(self, min(self.patience.offline, REFUSED_SECONDS), now)
        if self.finished or self.deadlines.connect is not None:  # before a first link `connect_by` decides
            return []
        return self.go_on_alone(now, now)

    def message(self, message: ServerMessage, now: float) -> list[Action]:
        """A message for this stream arrived."""
        self.deadlines.heard = now
        if self.finished:
            return []
        match message:
            case Verdict():
                return take_verdict(self, message, now)
            case Features():
                return self.add_rows(message.start, message.rows)
            case Resync():
                return ask_anew(self, now)
            case Error():
                return take_error(self, message, now)
            case Opened() | Welcome():
                return []

    def tree_ready(self, draft: Draft, version: int, now: float, seconds: float = 0.0) -> list[Action]:
        """A tree was drafted in `seconds` (the answer to DraftTree), or a chain (to DraftChain)."""
        self.busy = None
        self.tuning.drafted(draft, seconds, self.stats, version == self.version)
        if version == self.version:
            self.ready = self.tuning.worth_sending(draft)
        return self.work(now)

    def tree_compared(self, draft: Draft, base: int, seconds: float) -> list[Action]:
        """A tree below the first `base` tokens was drafted in `seconds` (the answer to Compare)."""
        self.tuning.compared(draft, base, seconds)
        return []

    def token_written(self, token: int, confidence: float, version: int, now: float) -> list[Action]:
        """A token was written, to which its writer gives the probability `confidence` (the answer to WriteToken)."""
        return take_token(self, token, confidence, version) + self.work(now)

    def text_read(self, agreed: int | None, now: float) -> list[Action]:
        """The understudy has read what it was asked to; see `ReadText` for `agreed`."""
        return take_reading(self, agreed) + self.work(now)

    def understudy_failed(self, why: str, now: float) -> list[Action]:
        """The understudy cannot be used: `why`, in words for people. The drafter writes on."""
        self.handover.failed()
        self.tuning.understudy_failed()
        if self.busy is Writer.UNDERSTUDY:
            self.busy = None
        told = [HandOver(Writer.DRAFTER, why)] if self.alone and not self.finished else []
        return [*told, *self.work(now)]

    def set_obeys(self, obeys: bool, now: float) -> list[Action]:
        """From now on the device's writers can be held to the answer's constraint, or cannot."""
        if self.finished or self.solo.obeys == obeys:
            return []
        self.solo.obeys = obeys
        self.version += 1  # a token under way is not wanted any more
        if obeys and not self.solo.paused:
            self.deadlines.give_up = None
        return self.work(now)

    def reads(self, action: ReadText) -> bool:
        """Whether the understudy is still to read this: somebody waits for it, or it reads along."""
        return not self.finished and self.handover.reads(action, self.alone)

    def wake_at(self) -> float | None:
        """When `tick` wants to be called, or None."""
        return min((moment for _, moment in self._pending()), default=None)

    def tick(self, now: float) -> list[Action]:
        """Time passed: act on the first deadline that has passed."""
        deadline, due = next(((name, moment) for name, moment in self._pending() if now >= moment), (None, now))
        match deadline:
            case Deadline.CONNECT:
                self.deadlines.connect = None
                return self.go_on_alone(due, now)
            case Deadline.GIVE_UP:
                silent = self.policy.writer == "cloud-only" or not self.solo.obeys
                return self.finish(FinishReason.UNREACHABLE if silent else FinishReason.UNVERIFIED)
            case Deadline.RETRY:
                return self.open(now)
            case Deadline.REPLY:
                return self.go_on_alone(due, now)
            case Deadline.RENEW:
                self.deadlines.heard = now
                return [Reconnect()]
            case None:
                return []

    def set_mode(self, mode: Mode, now: float) -> list[Action]:
        """From now on draft trees, or let the target write alone and stream."""
        if mode == self.mode or self.finished:
            return []
        self.mode = mode
        self.version += 1
        self.ready = None
        if self.flight and self.flight.tree is None:  # a GENERATE ends by CANCEL; OPEN says how much of it arrived
            return [Send(Cancel(self.stream)), *self.open(now)]
        return self.work(now)

    def pause(self, now: float) -> list[Action]:
        """Write nothing alone until `proceed`: the battery is low, or the user said so."""
        if self.finished or self.solo.paused is PauseReason.ASKED:
            return []
        return [pause(self, PauseReason.ASKED), *self.work(now)]

    def proceed(self, now: float) -> list[Action]:
        """Write alone again where the policy lets."""
        if self.finished or not self.solo.paused:
            return []
        self.deadlines.give_up = None
        self.solo.proceed()
        return self.work(now)

    def cancel(self) -> list[Action]:
        return [] if self.finished else self.finish(FinishReason.CANCELLED)

    def stop(self, surplus: int) -> list[Action]:
        """A stop string ended the text `surplus` committed tokens ago; even if they ended the answer themselves."""
        self.text.withdraw(surplus)
        return self.finish(FinishReason.STOP)

    def enough(self) -> None:
        """A stop string came in the provisional text: nothing more is written, unless it is taken back."""
        self.text.enough = True

    # --- what to do next ---

    def _pending(self) -> list[tuple[Deadline, float]]:
        return [] if self.finished else self.deadlines.pending(self.flight, self.alone)

    def work(self, now: float) -> list[Action]:
        """Whatever can be done next: see `edge_runtime.session.work`."""
        return work(self, now)

    def open(self, now: float) -> list[Action]:
        """OPEN with everything committed; whatever was under way is forgotten."""
        self.requests.flight, self.deadlines.retry, self.deadlines.connect = None, None, None
        actions = adopt(self) if self.policy.on_return == "keep" else []
        if self.text.over:
            return actions + self.finish(FinishReason.STOP if self.text.ended else no_room(self))
        self.stats.opens += 1
        return [*actions, self.requests.open(self.committed, self.rows_seen.leading()), *self.work(now)]

    def add_rows(self, start: int, data: bytes, most: int | None = None) -> list[Action]:
        """Take in rows of positions `start` and on; of a verdict's, `most` belong to our text."""
        return [*self.rows_seen.add(start, data, self.row_shape, self.max_context, most)]

    # --- the target is silent, and the end ---

    def go_on_alone(self, due: float, now: float) -> list[Action]:
        """The target is silent: go on without it."""
        if self.alone:
            return self.work(now)
        self.solo.alone = True
        self.ready = None
        self.version += 1
        self.stats.stalls += 1
        return [Stall(due), *self.work(now)]

    def finish(self, reason: FinishReason) -> list[Action]:
        """The answer ends."""
        self.finished = reason
        actions: list[Action] = []
        if self.flight and self.flight.tree is None and self.linked:
            actions.append(Send(Cancel(self.stream)))  # else it would write on
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            actions += self.text.withdraw_provisional()
        return [*actions, Done(reason)]
