"""Turn the session's actions into the events that a user sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_runtime.answer.answer_text import AnswerText
from edge_runtime.answer.stats import StatsRecorder
from edge_runtime.events import (
    Adopted,
    Event,
    Finished,
    HandedOver,
    LinkState,
    LinkStatus,
    Provisional,
    RolledBack,
    Verified,
)
from edge_runtime.session.actions import Action, Adopt, Commit, Done, HandOver, Pause, Provide, Resume, RollBack, Stall
from edge_runtime.session.session import Session
from edge_runtime.session.states import PauseReason, State
from outrider_core.chat.tool_grammar import ends_with_call
from outrider_core.protocol.constraint import GRAMMAR_TOOLS
from outrider_core.protocol.ending import COMPLETE, FinishReason

#: why the device writes or waits
SILENT = "the verifier is silent"
#: why nothing is written, in words for people
PAUSED = {
    PauseReason.UNSURE: "paused: the device is not sure how to continue",
    PauseReason.LIMIT: "waiting for the link: more text by the drafter alone would not be worth reading",
    PauseReason.ASKED: "paused on request",
}


class Display:
    """Collects the events of one answer, in order, until they are taken.

    stops: strings that end the text. why: why the verifier does not answer; "" while it does or nothing is known.
    """

    def __init__(
        self,
        session: Session,
        stats: StatsRecorder,
        decode: Callable[[list[int]], str],
        stops: Sequence[str],
        why: str = "",
    ) -> None:
        self._session, self._stats, self._why = session, stats, why
        self._text = AnswerText(decode, stops)
        self._text.commit(session.committed[len(session.prompt) :])
        self._text.rebase(session.provisional)
        self._events: list[Event] = []
        self._status: LinkStatus | None = None

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def keep(self, action: Commit | Adopt) -> int | None:
        """Show committed tokens. Returns how many of them follow a stop string; None without one."""
        text, tokens = self._text, action.tokens
        count = text.commit(tokens)
        text.rebase(self._session.provisional)
        surplus = None if count is None else len(tokens) - count
        if isinstance(action, Commit):
            self._stats.committed()
            self._events.append(Verified(*self._shown(), tokens[:count], action.confirmed))
            self.tell(LinkStatus.VERIFIED, "")
        else:
            if surplus:
                self._events.append(RolledBack(*self._shown(), surplus))
            self._events.append(Adopted(*self._shown(), tokens[:count]))
        return surplus

    def show(self, action: Action) -> None:
        """Show any other action; many show nothing."""
        session = self._session
        match action:
            case Provide(token=token, writer=writer):
                self._stats.wrote()
                if not self._text.provide(token):
                    session.enough()
                self._events.append(Provisional(*self._shown(), token, writer))
            case HandOver(writer=writer, why=why):
                self._events.append(HandedOver(*self._shown(), writer, why))
            case RollBack(tokens=tokens):
                self._text.rebase(session.provisional)
                self._events.append(RolledBack(*self._shown(), len(tokens)))
            case Stall(deadline=deadline):
                self._stats.stalled(deadline)
                waiting = session.state is State.WAITING
                self.tell(LinkStatus.WAITING if waiting else LinkStatus.ALONE, SILENT)
            case Pause(reason=reason) if session.offline.active:  # else the target's text continues
                self.tell(LinkStatus.WAITING, PAUSED[reason])
            case Resume():
                self._stats.resumed()
                self.tell(LinkStatus.VERIFIED, "")
            case Done(reason=reason):
                self._end(reason)

    def proceeded(self) -> None:
        """Show that a pause was lifted and the device writes again."""
        if self._session.state is State.ALONE:
            self.tell(LinkStatus.ALONE, SILENT)

    def because(self, why: str) -> None:
        """Set why the verifier does not answer, or "". It is shown at once if the link's state depends on it."""
        if why == self._why:
            return
        self._why = why
        if why and self._status not in (None, LinkStatus.VERIFIED):
            self._events.append(LinkState(*self._shown(), self._status, why))

    def tell(self, status: LinkStatus, detail: str) -> None:
        """Show the link's state, unless it is shown already."""
        if status is not self._status:
            self._status = status
            if self._why and status is not LinkStatus.VERIFIED:
                detail = f"{detail}: {self._why}"
            self._events.append(LinkState(*self._shown(), status, detail))

    def failed(self, why: str) -> None:
        """Keep the reason for the end of an answer that cannot continue."""
        self._why = why

    def _end(self, reason: FinishReason) -> None:
        session, text = self._session, self._session.text
        self._text.end()
        verified, provisional = self._shown()
        unanswered = reason not in COMPLETE or bool(provisional)
        detail = (self._why if unanswered else "") or session.verifier.complaint
        calls = session.constraint is not None and session.constraint.grammar == GRAMMAR_TOOLS
        if reason is FinishReason.STOP and calls and ends_with_call(verified + provisional):
            reason = FinishReason.TOOL_CALLS
        stats = self._stats.end(session.stats, len(text.committed) - text.begin)
        self._events.append(Finished(verified, provisional, reason, text.answer, stats, detail, text.spans))

    def _shown(self) -> tuple[str, str]:
        """Return (verified, provisional) text."""
        return self._text.verified, self._text.provisional
