"""An answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.

The whole idea: `committed` tokens were drawn by the target (or are the prompt); `provisional` tokens after them were
written offline. The user sees both. A verdict commits the accepted path and the token that the target drew after it.
Provisional text that agrees with these becomes verified; at the first difference the rest is rolled back (`repair`) or
stays as it is (`keep`). While provisional tokens remain, the next VERIFY is the chain of them instead of a drafted
tree: so late verdicts, catching up after an outage and the normal round follow one rule. Three objects hold the state,
and none of them knows the session: `VerifierState` the link, the request in flight and refusals; `OfflineWriter` who
writes while the target is silent; `JobSlot` the one job of drafter or understudy. Each returns values; `Session` turns
them into actions, and `Session._next` alone decides what to do.

Times are seconds on any monotonic clock, passed in with each event. `edge_runtime.session.states` lists which state may
follow which.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from edge_runtime.session.actions import (
    Action,
    Adopt,
    Compare,
    Done,
    DraftAhead,
    DraftChain,
    DraftTree,
    HandOver,
    Pause,
    Provide,
    ReadText,
    Reconnect,
    Resume,
    Send,
    Stall,
    WriteToken,
)
from edge_runtime.session.feature_rows import RowsSeen
from edge_runtime.session.job import JobSlot
from edge_runtime.session.offline import REFUSED_SECONDS, OfflineWriter
from edge_runtime.session.policy import OnReturn, Policy
from edge_runtime.session.settled import Settled
from edge_runtime.session.states import PauseReason, State, Writer
from edge_runtime.session.stats import SessionStats
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.transcript import Transcript
from edge_runtime.session.tuning import Tuning
from edge_runtime.session.verifier import Deadline, Refusal, VerifierState
from edge_runtime.speed.arms import Arm
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.ending import FinishReason
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Error, Features, Opened, Resync, ServerMessage, Verdict, Welcome


@dataclass
class Session:
    """State machine of one answer. Each method is an event and returns the actions to carry out, in order.

    prompt: token ids of the conversation so far. max_new: most committed tokens. stream, session_id: as on the wire.
    row_shape: the drafter's. rows_seen: the prompt's rows that the drafter holds. timer: of rounds. drafter,
    understudy: there is one. sentence_ends: tokens that end a sentence or a line. constraint: on the tokens drawn.
    obeys: the device's own writers can obey it; otherwise nothing is written offline.
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
    drafter: bool = True
    understudy: bool = False
    sentence_ends: Container[int] = frozenset()
    constraint: Constraint | None = None
    obeys: bool = True

    def __post_init__(self) -> None:
        self.stats = SessionStats()
        self.text = Transcript(list(self.prompt), len(self.prompt), self._own_limit, self.eos_ids, self.stats)
        self.verifier = VerifierState(
            self.stream, self.session_id, self.sampling, self.constraint, self.max_context, self.patience, self.timer
        )
        self.offline = OfflineWriter(
            self.policy, self.understudy, self.sentence_ends, self.obeys, self.patience.offline, self.drafter
        )
        self.job = JobSlot()
        self.arm = Arm.TREE
        self.finished: FinishReason | None = None

    @property
    def state(self) -> State:
        if self.finished:
            return State.FINISHED
        if self.offline.active:
            return State.WAITING if self.offline.muted else State.ALONE
        if self.verifier.in_flight:
            return State.STREAMING if self.verifier.streams else State.VERIFYING
        return State.DRAFTING

    @property
    def _own_limit(self) -> int:
        """Most tokens of the text, whatever the verifier's context."""
        return min(len(self.prompt) + self.max_new, self.max_context)

    @property
    def committed(self) -> list[int]:
        return self.text.committed

    @property
    def provisional(self) -> list[int]:
        return self.text.provisional

    # --- what jobs in other threads ask ---

    def cancelled(self, version: int) -> bool:
        """Return whether the result of a job that carries `version` is no longer wanted."""
        return self.finished is not None or version != self.job.version

    def still_reads(self, action: ReadText) -> bool:
        """Return whether the understudy should still read this: a writer waits for it, or it reads along."""
        return not self.finished and self.offline.still_reads(action)

    @property
    def drafts_ahead(self) -> Writer | None:
        """Return who drafts ahead, below the present tree or after the chain.

        None if that is not worthwhile or the drafter has another job.
        """
        request = self.verifier.in_flight
        if request is None or request.arm is None or not request.tree or self.provisional or self.job.busy:
            return None
        writer = Writer.UNDERSTUDY if request.arm is Arm.CHAIN else Writer.DRAFTER
        return writer if self.tuning.drafts_ahead(request.arm) else None

    # --- events ---

    def start(self, now: float) -> list[Action]:
        """Begin. Drafting starts at once, so that the first tree is ready when the link is."""
        self.verifier.heard = now
        if self.policy.target_first:
            self.arm = self.tuning.begin()
        if self.text.over:
            return self._complete()
        if self.offline.device_only:
            return self._go_offline(now, now)
        if not self.verifier.linked:
            self.verifier.connect_by = now + self.patience.connect
        return [*self.verifier.wanted, *self.offline.read_along(self.committed), *self._next(now)]

    def link_up(self, welcome: Welcome, now: float, rtt: float | None = None) -> list[Action]:
        """Continue on a new link whose hashes agree: OPEN with everything committed.

        A verifier with another arithmetic than the last one is not asked, as if there were none.

        rtt: seconds of the handshake, if it happened during this answer.
        """
        if not welcome.computes_in(self.verifier.pinned):
            return [*self.verifier.wanted, *self.link_down(now, True)]
        actions: list[Action] = []
        if rtt is not None:
            self.tuning.controller.linked(welcome, rtt)
            if self.policy.target_first:
                actions = self.set_arm(self.tuning.begin(), now)
        supported = self.verifier.link_up(welcome, now)
        self.text.limit = min(self._own_limit, self.verifier.context)
        self.offline.accepted()
        return actions + (self._open(now) if supported else self._go_offline(now, now))

    def link_down(self, now: float, refused: bool = False) -> list[Action]:
        """Handle a lost link. refused: a verifier was there and does not accept this device; another one may."""
        self.verifier.link_down()
        if refused:
            self.offline.expect_return(REFUSED_SECONDS, now)
        if self.finished or self.verifier.connect_by is not None:  # before a first link, that decides
            return []
        return self._go_offline(now, now)

    def message(self, message: ServerMessage, now: float) -> list[Action]:
        """Handle a message for this stream."""
        self.verifier.heard = now
        if self.finished:
            return []
        match message:
            case Verdict():
                settled = self.verifier.settle(message, len(self.committed), now)
                return [] if settled is None else self._settled(settled, message.rows, now)
            case Features():
                return self._add_rows(message.start, message.rows)
            case Resync():
                return self._follow(self.verifier.resync(now), now)
            case Error():
                return self._follow(self.verifier.refuse(message, now), now)
            case Opened() | Welcome():
                return []

    def tree_ready(self, draft: Draft, version: int, now: float, seconds: float = 0.0) -> list[Action]:
        """Take a tree (the answer to DraftTree) or a chain (to DraftChain), drafted in `seconds`."""
        arm = Arm.CHAIN if self.job.done() is Writer.UNDERSTUDY else Arm.TREE
        self.tuning.drafted(arm, draft, seconds, version == self.job.version)
        self.stats.drafted(arm, draft)
        if version == self.job.version:
            self.job.ready = arm, self.tuning.worth_sending(arm, draft)
        return self._next(now)

    def tree_compared(self, draft: Draft, base: int, seconds: float) -> list[Action]:
        """Take what was drafted below the first `base` tokens, in `seconds` (the answer to Compare)."""
        self.tuning.compared(draft, base, seconds)
        return []

    def token_written(self, token: int, confidence: float, version: int, now: float) -> list[Action]:
        """Take an offline token and its probability (the answer to WriteToken)."""
        actions: list[Action] = []
        writer = self.job.done() or Writer.DRAFTER
        if not self.cancelled(version) and self.offline.may_write(len(self.provisional)):
            self.text.provide(token, writer)
            self.job.cancel()
            actions.append(Provide(token, writer))
            if not self.offline.wrote(token, confidence, writer):
                actions.append(self._pause(PauseReason.UNSURE))
        return actions + self._next(now)

    def text_read(self, agreed: int | None, now: float) -> list[Action]:
        """Note that the understudy has read its text; see `ReadText` for `agreed`.

        If the target is still silent, tokens that it would not have written are withdrawn.
        """
        if self.finished:
            return []
        actions: list[Action]
        match self.offline.has_read(agreed, self.committed, self.provisional):
            case None:
                actions = [*self.offline.read_along(self.committed)]
            case ReadText() as reading:
                self.job.cancel()
                actions = [reading]
            case keep:
                self.job.cancel()
                actions = self.text.withdraw_provisional(keep)
        return actions + self._next(now)

    def understudy_failed(self, why: str, now: float) -> list[Action]:
        """Note that the understudy is unusable: `why`, in words for people. The drafter writes on."""
        self.offline.understudy_failed()
        self.tuning.understudy_failed()
        if self.job.busy is Writer.UNDERSTUDY:
            self.job.done()
        told = [HandOver(Writer.DRAFTER, why)] if self.offline.active and not self.finished else []
        return [*told, *self._next(now)]

    def set_obeys(self, obeys: bool, now: float) -> list[Action]:
        """Set whether the device's writers can obey the answer's constraint."""
        if self.finished or self.offline.supported == obeys:
            return []
        self.offline.set_supported(obeys)
        self.job.cancel()
        return self._next(now)

    def wake_at(self) -> float | None:
        """Return when to call `tick`, or None."""
        return min((moment for _, moment in self._deadlines()), default=None)

    def tick(self, now: float) -> list[Action]:
        """Time passed: act on the first deadline that has passed."""
        deadline, due = next(((name, moment) for name, moment in self._deadlines() if now >= moment), (None, now))
        match deadline:
            case Deadline.CONNECT:
                self.verifier.connect_by = None
                return self._go_offline(due, now)
            case Deadline.GIVE_UP:
                return self._unanswered()
            case Deadline.RETRY:
                return self._open(now)
            case Deadline.REPLY:
                return self._go_offline(due, now)
            case Deadline.RENEW:
                self.verifier.heard = now
                return [Reconnect()]
            case None:
                return []

    def set_arm(self, arm: Arm, now: float) -> list[Action]:
        """Switch to trees or chains, or let the target stream."""
        if arm == self.arm or self.finished:
            return []
        self.arm = arm
        self.job.discard()
        if self.verifier.streams:  # it ends by CANCEL; OPEN tells how much of it arrived
            return [*self.verifier.cancel(), *self._open(now)]
        return self._next(now)

    def pause(self, now: float) -> list[Action]:
        """Stop writing offline until `proceed`: the battery is low, or the user asked for it."""
        if self.finished or self.offline.paused is PauseReason.ASKED:
            return []
        return [self._pause(PauseReason.ASKED), *self._next(now)]

    def proceed(self, now: float) -> list[Action]:
        """Allow writing offline again, as the policy says."""
        if self.finished or not self.offline.paused:
            return []
        self.offline.proceed()
        return self._next(now)

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> list[Action]:
        """End the answer, which was cancelled or has failed."""
        return [] if self.finished else self._finish(reason)

    def stop(self, surplus: int) -> list[Action]:
        """End the answer at a stop string, `surplus` committed tokens ago; even if they ended the answer themselves."""
        self.text.withdraw(surplus)
        return [*self.text.withdraw_provisional(), *self._finish(FinishReason.STOP)]

    def enough(self) -> None:
        """Write nothing more after a stop string in the provisional text, unless it is rolled back."""
        self.text.enough = True

    # --- what to do next ---

    def _next(self, now: float) -> list[Action]:
        """Decide what to do next; nothing else does.

        The order: catch up with offline text; let the device write, if it writes first; let the target stream; send the
        tree that is ready; ask for the first token, which waits for no tree; write on while the target is silent; have
        a tree drafted.
        """
        if self.finished:
            return []
        verifier, text, job = self.verifier, self.text, self.job
        if verifier.can_ask and text.provisional:
            return [self._catch_up(now), *self._write(now)]
        if self.offline.writes_first:
            return self._write(now)
        if verifier.can_ask and self.arm is Arm.STREAM:
            return [self._ask(verifier.generate(len(text.committed), text.limit - len(text.committed), now))]
        if verifier.can_ask and job.ready is not None:
            return [self._verify(*job.ready, now), *([] if job.busy else [DraftAhead(job.version)])]
        if verifier.can_ask and not verifier.seq:
            return [self._verify(Arm.TREE, Draft(), now)]
        if self.offline.active:
            written = self._write(now)
            if written or not verifier.can_ask:
                return written
        idle = not job.busy and job.ready is None and verifier.in_flight is None
        return self._draft() if idle and self.arm is not Arm.STREAM else []

    def _draft(self) -> list[Action]:
        """Have a tree drafted, or a chain by the understudy."""
        limits, text = self.verifier.limits(self.text.room), self.committed
        if tokens := self.tuning.chain(limits.nodes, limits.depth, self.offline.drafts, not self.drafter):
            version = self.job.take(Writer.UNDERSTUDY)
            return [DraftChain(self.offline.read_to_draft(text), version, tokens), *self._compare()]
        return [DraftTree(list(text), self.job.take(Writer.DRAFTER), *self.tuning.tree_size(*limits))]

    def _verify(self, arm: Arm, draft: Draft, now: float) -> Send:
        self.job.ready = None
        self.tuning.asked(arm, now)
        tree = draft.tree.pruned(self.verifier.max_nodes, self.text.room)  # it may be older than the verifier's limits
        return self._ask(self.verifier.verify(arm, tree, len(self.committed), now, draft.scores))

    def _catch_up(self, now: float) -> Send:
        """Have the provisional text verified."""
        levels = min(self.verifier.max_nodes, self.verifier.context - len(self.committed))
        chain = TokenTree.chain(self.provisional[: max(0, levels)])
        return self._ask(self.verifier.verify(None, chain, len(self.committed), now))

    def _ask(self, request: Send) -> Send:
        self.stats.calls += 1
        return request

    def _write(self, now: float) -> list[Action]:
        """Request one more provisional token, if one may be written and the answer is not full."""
        offline, text = self.offline, self.text
        if text.full or not offline.may_write(len(text.provisional)):
            return self._wait(now) if offline.active else []
        reading = offline.read_to_write(text.committed, text.provisional)
        match offline.next_writer():
            case PauseReason() as reason:
                return [self._pause(reason), *self._wait(now)]
            case None:
                return [*reading]
            case _ if self.job.busy:
                return [*reading]
            case writer:
                token = WriteToken(text.committed + text.provisional, self.job.take(writer), writer)
                return [*reading, *offline.hand_over(writer), token]

    def _wait(self, now: float) -> list[Action]:
        """Offline writing has stopped: wait for the target, unless it refused the answer permanently."""
        refused = self.verifier.refused and self.offline.paused is not PauseReason.ASKED
        return self._unanswered() if refused or not self.offline.wait(now) else []

    def _deadlines(self) -> list[tuple[Deadline, float]]:
        return [] if self.finished else self.verifier.deadlines(self.offline.active, self.offline.give_up_at)

    # --- what the verifier says ---

    def _open(self, now: float) -> list[Action]:
        """OPEN with everything committed; forget whatever was in progress."""
        self.verifier.forget_request()
        actions = self._adopt() if self.policy.on_return is OnReturn.KEEP else []
        if self.text.over:
            whole = self.text.ended or len(self.committed) >= self._own_limit
            return actions + (self._complete() if whole else self._no_room())
        self.stats.opens += 1
        return [*actions, self.verifier.open(self.committed, self.rows_seen.leading()), *self._next(now)]

    def _settled(self, settled: Settled, rows: bytes, now: float) -> list[Action]:
        """Commit the accepted path and the token after it, measure, and choose how to continue."""
        text, base, ends_at = self.text, len(self.committed), len(self.committed) + len(settled.accepted)
        self.tuning.answered(settled, now)
        fresh = text.within(settled.tokens)
        self.stats.settled(settled, len(fresh), bool(text.provisional))
        same = text.agreeing(fresh)
        keep = self.policy.on_return is OnReturn.KEEP and same < min(len(fresh), len(text.provisional))
        start = ends_at - len(rows) // self.row_shape.nbytes  # its rows end with that of the last accepted token
        own = base + same if keep else ends_at
        actions = self._add_rows(start, rows, max(0, own - start))
        if keep:
            actions += self._commit(fresh[:same]) + self._resume() + self._open(now)
            return actions + self._choose(now)
        actions += self._commit(fresh) + self._resume()
        if text.over or settled.ended:
            return actions + self._complete()
        if self.policy.target_first and self.verifier.in_flight:  # a stream continues
            actions += self._compare()
        return actions + self._choose(now) + self._next(now)

    def _compare(self) -> list[Action]:
        """Beside a stream or chains, now and then, have a tree or a chain drafted that is not sent."""
        match self.tuning.comparison(self.offline.drafts):
            case None:
                return []
            case arm, size:
                return [Compare(list(self.committed), *size, arm)]

    def _choose(self, now: float) -> list[Action]:
        """Choose the arm from here on."""
        if self.finished or not self.policy.target_first:
            return []
        return self.set_arm(self.tuning.choose(self.offline.drafts), now)

    def _add_rows(self, start: int, data: bytes, limit: int | None = None) -> list[Action]:
        """Take rows of positions `start` and on; of a verdict's, `limit` belong to our text."""
        return [*self.rows_seen.add(start, data, self.row_shape, self.max_context, limit)]

    def _commit(self, fresh: list[int]) -> list[Action]:
        self.job.discard()
        actions = [*(self.verifier.pin() if fresh else []), *self.text.commit(fresh)]
        self.tuning.committed(self.committed)
        return [*actions, *self.offline.read_along(self.committed)]

    def _adopt(self) -> list[Action]:
        """Make provisional text part of the answer as it is."""
        tokens = self.text.adopt()
        if not tokens:
            return []
        self.job.cancel()
        return [Adopt(tokens), *self._resume()]

    def _follow(self, refusal: Refusal, now: float) -> list[Action]:
        """Carry out the consequence of a refusal."""
        match refusal:
            case Refusal.IGNORE:
                return []
            case Refusal.REOPEN:
                return self._open(now)
            case Refusal.RETRY | Refusal.FATAL:  # after a permanent refusal nothing is requested again
                return self._go_offline(now, now)
            case Refusal.FULL:
                return self._no_room()

    # --- the target is silent, and the end ---

    def _go_offline(self, due: float, now: float) -> list[Action]:
        """Continue without the silent target."""
        if self.offline.active:
            return self._next(now)
        self.offline.start()
        self.job.discard()
        self.stats.stalls += 1
        return [Stall(due), *self._next(now)]

    def _resume(self) -> list[Action]:
        """Report that the target answers, if it was silent."""
        if not self.offline.active:
            return []
        self.offline.stop()
        return [Resume()]

    def _pause(self, reason: PauseReason) -> Pause:
        """Write nothing more, until the target answers or `proceed` is called."""
        self.offline.pause(reason)
        self.stats.pauses += 1
        self.job.cancel()
        return Pause(reason)

    def _no_room(self) -> list[Action]:
        """Handle a full context: offline text stays as it is.

        A verifier that has no room for any of the answer refuses it.
        """
        context = self.verifier.context
        self.verifier.complaint = f"the verifier's context holds {context} tokens; this conversation needs more"
        begun = len(self.committed) > len(self.prompt)
        return self._finish(FinishReason.LENGTH if begun else FinishReason.REFUSED)

    def _complete(self) -> list[Action]:
        """End the answer, which the target has written completely."""
        reason = FinishReason.STOP if self.text.ended else FinishReason.LENGTH
        return [*self.text.withdraw_provisional(), *self._finish(reason)]

    def _unanswered(self) -> list[Action]:
        """End the answer without the target; offline text stays."""
        if self.verifier.refused:
            return self._finish(FinishReason.REFUSED)
        return self._finish(self.text.end_alone or FinishReason.UNREACHABLE)

    def _finish(self, reason: FinishReason) -> list[Action]:
        """End the answer as it is."""
        self.finished = reason
        return [*self.verifier.cancel(), Done(reason)]
