"""Carry out a session's actions, and report events to it with their times."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from edge_runtime.answer.constraints import ConstraintSupport, ConstraintUnsupported
from edge_runtime.answer.display import Display
from edge_runtime.answer.inbox import (
    Compared,
    Drafted,
    Failed,
    InboxEvent,
    RulesReady,
    TextRead,
    UnderstudyFailed,
    Unsupported,
    Woken,
    Written,
)
from edge_runtime.answer.jobs import DrafterJobs, UnderstudyJobs
from edge_runtime.answer.reading_pacer import ReadingPacer
from edge_runtime.answer.stats import StatsRecorder
from edge_runtime.answer.threads import DrafterFailed, DrafterThread, UnderstudyThread
from edge_runtime.events import Event, LinkStatus
from edge_runtime.link.events import Arrived, EngineFailed, LinkDown, LinkRefused, LinkUp
from edge_runtime.link.transport import VerifierLink
from edge_runtime.session.actions import (
    Action,
    AddRows,
    Adopt,
    Commit,
    Compare,
    DraftAhead,
    DraftChain,
    DraftTree,
    Pin,
    ReadText,
    Reconnect,
    Send,
    WriteToken,
)
from edge_runtime.session.session import Session
from edge_runtime.session.states import Writer
from edge_runtime.speed.arms import Arm
from outrider_core.chat.grammar import GrammarError
from outrider_core.protocol.ending import FinishReason

#: exceptions that end an answer as failed, or as refused by the device itself
FAILURES = (DrafterFailed, LinkRefused, EngineFailed, ConstraintUnsupported)


class Answer:
    """An answer in progress. `inbox` gets link events and finished jobs, in this loop's thread."""

    def __init__(
        self,
        session: Session,
        link: VerifierLink | None,
        worker: DrafterThread,
        understudy: UnderstudyThread,
        inbox: asyncio.Queue[InboxEvent],
        decode: Callable[[list[int]], str],
        stops: Sequence[str],
        why: str = "",
        support: ConstraintSupport | None = None,
    ) -> None:
        """why: why there is no connection; "" while there is one or none was tried yet.

        support: applies the session's constraint to the device's writers, if it has one.
        """
        self.session, self.stops = session, stops
        self._link, self._inbox, self._down = link, inbox, why
        self._stats = StatsRecorder(link)
        self._display = Display(session, self._stats, decode, stops, why)
        self._jobs = DrafterJobs(session, worker, inbox, self._stats)
        self._understudy = UnderstudyJobs(session, understudy, inbox)
        self._held = ReadingPacer(session.policy.offline_rate)
        self._support, self._compiling = support, None if support is None else asyncio.create_task(self._compile())

    async def run(self) -> AsyncIterator[Event]:
        """Yield events until the answer has ended, the last one `Finished`; then raise the cause of a failure:
        DrafterFailed, ConstraintUnsupported, or an error that `link` reports.
        """
        session, failure = self.session, None
        try:
            self._begin()
        except FAILURES as error:
            failure = error
        while True:
            if failure:
                self._display.failed(str(failure))
                refused = isinstance(failure, ConstraintUnsupported)
                self._do(session.cancel(FinishReason.REFUSED if refused else FinishReason.FAILED))
            for event in self._display.take():
                yield event
            if failure:
                raise failure
            if session.finished:
                return
            try:
                await self._next_event()
            except FAILURES as error:
                failure = error

    def close(self) -> None:
        """Cancel unfinished work; any verifier may write the next answer."""
        if self._compiling:
            self._compiling.cancel()
        if self._link:
            self._link.pin("")
        self._do(self.session.cancel())

    def pause(self) -> None:
        self._do(self.session.pause(time.monotonic()))
        self._inbox.put_nowait(Woken())

    def proceed(self) -> None:
        self._do(self.session.proceed(time.monotonic()))
        self._display.proceeded()
        self._inbox.put_nowait(Woken())

    def hurry(self, seconds: float) -> None:
        """Wait no longer than `seconds` for the verifier once offline writing has stopped."""
        self.session.offline.expect_return(seconds, time.monotonic())
        self._inbox.put_nowait(Woken())

    def _begin(self) -> None:
        link = self._link
        self._display.tell(LinkStatus.CONNECTING, link.url if link else "no server given")
        if link and link.refused:
            raise link.refused
        self._do(self.session.start(time.monotonic()))
        if link and link.welcome:
            self._do(self.session.link_up(link.welcome, time.monotonic()))

    async def _compile(self) -> None:
        """Compile the rules of the constraint."""
        session = self.session
        assert self._support and session.constraint
        try:
            of_drafter, of_understudy = await self._support.rules(session.constraint, writers=2)
            self._inbox.put_nowait(RulesReady(session, (of_drafter, of_understudy)))
        except GrammarError as error:
            self._inbox.put_nowait(Unsupported(session, str(error)))

    async def _next_event(self) -> None:
        """Wait for the link, the drafter or the clock, whichever is first, and feed the session."""
        wake = min((t for t in (self.session.wake_at(), self._held.wake_at()) if t is not None), default=None)
        event = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if wake is None else max(0.0, wake - time.monotonic())):
                event = await self._inbox.get()
        if event is not None:
            self._feed(event)
        self._do(self.session.tick(time.monotonic()))
        self._release()

    def _feed(self, event: InboxEvent) -> None:
        session, now = self.session, time.monotonic()
        match event:
            case (
                Drafted(session=owner)
                | Written(session=owner)
                | Compared(session=owner)
                | TextRead(session=owner)
                | UnderstudyFailed(session=owner)
                | RulesReady(session=owner)
                | Unsupported(session=owner)
                | Failed(session=owner)
            ) if owner is not session:
                pass  # an answer that was cancelled since asked for it
            case Drafted():
                self._stats.drafted(event.asked)
                self._do(session.tree_ready(event.draft, event.version, now, event.working))
            case Written():
                self._stats.drafted(event.asked)
                self._do(session.token_written(event.token, event.probability, event.version, now))
            case Compared():
                self._do(session.tree_compared(event.draft, event.base, event.working))
            case TextRead():
                self._do(session.text_read(event.agreed, now))
            case UnderstudyFailed():
                self._do(session.understudy_failed(event.why, now))
            case RulesReady(rules=rules):
                self._jobs.rules, self._understudy.rules = rules
                self._do(session.set_obeys(True, now))
            case Unsupported(why=why):
                if session.offline.device_only:
                    raise ConstraintUnsupported(f"the answer's constraint cannot be met: {why}")
                self._do(session.set_obeys(False, now))
            case Woken():
                pass
            case LinkUp():
                self._down = ""
                self._explained(session.link_up(event.welcome, now, event.rtt))
            case LinkDown():
                self._down = event.reason
                self._explained(session.link_down(now, event.refused))
            case Arrived(message=message):
                if getattr(message, "stream", session.stream) in (session.stream, -1):
                    self._explained(session.message(message, now))
            case Failed(error=error):
                raise error
            case LinkRefused() | EngineFailed():
                raise event

    def _explained(self, actions: list[Action]) -> None:
        """Carry out actions that follow from the link, and show why the verifier does not answer."""
        self._display.because(self._down or self.session.verifier.complaint)
        self._do(actions)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    if self._link:
                        self._link.send(message)
                case Pin(arithmetic=arithmetic):
                    if self._link:
                        self._link.pin(arithmetic)
                case DraftTree():
                    self._jobs.draft(action)
                case DraftChain():
                    self._understudy.draft(action)
                case WriteToken():
                    self._held.hold(action, len(self.session.committed), self.session.offline.may_be_taken_back)
                    self._release()
                case ReadText():
                    self._understudy.read(action)
                case Compare():
                    (self._understudy if action.arm is Arm.CHAIN else self._jobs).compare(action)
                case DraftAhead():
                    self._jobs.draft_ahead()
                    self._understudy.draft_ahead()
                case AddRows():
                    self._jobs.add_rows(action)
                    self._jobs.draft_ahead()  # the last job has stopped it
                case Reconnect():
                    if self._link:
                        self._link.renew()
                case Commit() | Adopt():
                    if (surplus := self._display.keep(action)) is not None:
                        return self._do(self.session.stop(surplus))
                case _:
                    self._display.show(action)

    def _release(self) -> None:
        """Write the held token if its time has come; if it is no longer wanted, tell the session at once."""
        session, now = self.session, time.monotonic()
        action = self._held.release(now, session.job.version)
        if action is None:
            return
        if action.version == session.job.version:
            writer = self._understudy if action.writer is Writer.UNDERSTUDY else self._jobs
            writer.write(action)
        else:
            self._do(session.token_written(0, 0.0, action.version, now))
