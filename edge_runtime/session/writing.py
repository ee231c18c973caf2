"""Writing without the target: the drafter at once, the understudy once it has read the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_runtime.session.actions import Action, HandOver, Pause, Provide, WriteToken
from edge_runtime.session.handover import Reading
from edge_runtime.session.states import FinishReason, PauseReason, Writer

if TYPE_CHECKING:
    from edge_runtime.session.session import Session


def write(session: Session, now: float) -> list[Action]:
    """Ask for one more provisional token, where one may be written and the answer is not full."""
    if not (session.solo.may_write(len(session.provisional)) and not session.text.full):
        return _wait(session, now) if session.alone else []
    handover, text = session.handover, session.committed + session.provisional
    if session.alone and not session.provisional:
        handover.begin(text)
    actions: list[Action] = []
    # the drafter's first token comes before the work of loading and reading
    begun = bool(session.provisional) or session.policy.writer == "device-only"
    if session.alone and handover.reading is Reading.IDLE and begun:
        actions.append(handover.read(text, len(session.committed)))
    if session.busy:
        return actions
    writer = handover.next_writer
    if session.alone and writer is Writer.DRAFTER:
        enough = session.solo.drafter_is_done or session.policy.writer == "device-only" or handover.holds
        if handover.coming and enough:
            return actions
        if session.solo.drafter_is_done:
            return [pause(session, PauseReason.LIMIT), *_wait(session, now)]
    if writer is not handover.writer:
        handover.writer = writer
        session.solo.handed_over()
        actions.append(HandOver(writer))
    session.busy = writer
    return [*actions, WriteToken(text, session.version, writer)]


def take_token(session: Session, token: int, confidence: float, version: int) -> list[Action]:
    """The token that was asked for has come; it may not be wanted any more."""
    writer, session.busy = session.busy or Writer.DRAFTER, None
    if version != session.version or session.finished or not session.solo.may_write(len(session.provisional)):
        return []
    session.text.provide(token, writer)
    session.version += 1
    session.solo.wrote(token, confidence, writer)
    # a better writer that is on its way may be surer
    doubts = [pause(session, PauseReason.UNSURE)] if session.solo.doubts and not session.handover.coming else []
    return [Provide(token, writer), *doubts]


def take_reading(session: Session, agreed: int | None) -> list[Action]:
    """The understudy has read the text, or gave that up (None). If the target is still silent, what it would not have
    written is withdrawn. Where there is no such thing, it reads what the drafter wrote meanwhile; that one waits."""
    handover, text = session.handover, session.committed + session.provisional
    if session.finished:
        return []
    if agreed is None:
        handover.gave_up()
    elif handover.has_read(text, session.alone) and session.alone:
        judged = max(handover.base + agreed, len(session.committed))
        if judged < len(text):
            session.version += 1  # a token under way is not wanted any more
            if judged >= len(handover.text):
                return [handover.read(text, judged, holds=True)]
            return session.text.withdraw_provisional(judged - len(session.committed))
    return [*handover.read_along(session.committed)]


def pause(session: Session, reason: PauseReason) -> Pause:
    """Write nothing more, until the target answers or somebody asks to go on."""
    session.solo.paused = reason
    session.stats.pauses += 1
    session.version += 1  # a token under way is not wanted any more
    return Pause(reason)


def _wait(session: Session, now: float) -> list[Action]:
    """Nothing more can be written alone: wait for the target, but not for ever."""
    wait = session.patience.offline if session.solo.paused else session.return_wait
    session.deadlines.give_up = session.deadlines.give_up or now + wait
    if session.policy.writer == "device-only" and session.solo.obeys and not session.solo.paused:
        return session.finish(FinishReason.UNVERIFIED)
    return []
