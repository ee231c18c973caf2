"""The states of an answer, the events, and the transitions between states.

`Session` implements these transitions; the tests hold it to the table, by a walk through every order of events and by
the recorded traces, and `docs/design.md` shows it.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """State of an answer. `TRANSITIONS` lists how it gets from one state to the next."""

    DRAFTING = "drafting"  #: no request is in flight; the drafter is growing a tree, or waits for the first link
    VERIFYING = "verifying"  #: the verdict on a tree is awaited
    STREAMING = "streaming"  #: the target writes; its next token is awaited
    ALONE = "writing alone"  #: the target is silent, and the drafter writes
    WAITING = "waiting for the link"  #: the target is silent, and nothing is written
    FINISHED = "finished"


class Writer(StrEnum):
    """The writer of a token of the answer."""

    TARGET = "target"
    UNDERSTUDY = "understudy"  #: a complete model on the device
    DRAFTER = "drafter"


class PauseReason(StrEnum):
    """The reason why offline writing is paused."""

    UNSURE = "unsure"  #: the last tokens written were too improbable
    LIMIT = "limit"  #: the drafter, without an understudy to follow it, has reached the end of a sentence
    ASKED = "asked"  #: `pause` was called


class SessionEvent(StrEnum):
    """An event of a session: the method of `Session` that is called."""

    START = "start"
    LINK_UP = "link_up"
    LINK_DOWN = "link_down"
    MESSAGE = "message"
    TREE_READY = "tree_ready"
    TREE_COMPARED = "tree_compared"
    TOKEN_WRITTEN = "token_written"
    TEXT_READ = "text_read"
    UNDERSTUDY_FAILED = "understudy_failed"
    SET_OBEYS = "set_obeys"
    TICK = "tick"
    SET_ARM = "set_arm"
    PAUSE = "pause"
    PROCEED = "proceed"
    CANCEL = "cancel"
    STOP = "stop"


#: state -> event -> states that it may lead to, besides staying. CANCEL and STOP lead from everywhere to FINISHED;
#: nothing leads away from there. If `keep` adopts the provisional text, a new link, a retry or another mode ends
#: offline writing at once.
TRANSITIONS: dict[State, dict[SessionEvent, tuple[State, ...]]] = {
    State.DRAFTING: {
        SessionEvent.START: (State.ALONE, State.WAITING, State.FINISHED),
        SessionEvent.LINK_UP: (State.VERIFYING, State.STREAMING, State.ALONE, State.WAITING, State.FINISHED),
        SessionEvent.LINK_DOWN: (State.ALONE, State.WAITING),
        SessionEvent.MESSAGE: (State.ALONE, State.WAITING, State.FINISHED),
        SessionEvent.TREE_READY: (State.VERIFYING,),
        SessionEvent.TOKEN_WRITTEN: (State.VERIFYING,),
        SessionEvent.TICK: (State.ALONE, State.WAITING),
        SessionEvent.SET_ARM: (State.STREAMING,),
        SessionEvent.PAUSE: (State.VERIFYING, State.STREAMING),
    },
    State.VERIFYING: {
        SessionEvent.LINK_DOWN: (State.ALONE, State.WAITING),
        SessionEvent.MESSAGE: (State.DRAFTING, State.STREAMING, State.ALONE, State.WAITING, State.FINISHED),
        SessionEvent.TICK: (State.ALONE, State.WAITING),
    },
    State.STREAMING: {
        SessionEvent.LINK_DOWN: (State.ALONE, State.WAITING),
        SessionEvent.MESSAGE: (State.DRAFTING, State.VERIFYING, State.ALONE, State.WAITING, State.FINISHED),
        SessionEvent.TICK: (State.ALONE, State.WAITING),
        SessionEvent.SET_ARM: (State.DRAFTING, State.VERIFYING),
    },
    State.ALONE: {
        SessionEvent.LINK_UP: (State.DRAFTING, State.VERIFYING, State.STREAMING, State.FINISHED),
        SessionEvent.MESSAGE: (State.DRAFTING, State.VERIFYING, State.STREAMING, State.FINISHED),
        SessionEvent.TOKEN_WRITTEN: (State.WAITING, State.FINISHED),
        SessionEvent.TICK: (State.DRAFTING, State.VERIFYING, State.STREAMING, State.FINISHED),
        SessionEvent.SET_ARM: (State.DRAFTING, State.FINISHED),
        SessionEvent.PAUSE: (State.WAITING,),
        SessionEvent.SET_OBEYS: (State.WAITING, State.FINISHED),
        SessionEvent.UNDERSTUDY_FAILED: (State.WAITING, State.FINISHED),
    },
    State.WAITING: {
        SessionEvent.LINK_UP: (State.DRAFTING, State.VERIFYING, State.STREAMING, State.FINISHED),
        SessionEvent.MESSAGE: (State.DRAFTING, State.VERIFYING, State.STREAMING, State.FINISHED),
        SessionEvent.TICK: (State.DRAFTING, State.VERIFYING, State.STREAMING, State.FINISHED),
        SessionEvent.SET_ARM: (State.DRAFTING, State.FINISHED),
        SessionEvent.PROCEED: (State.ALONE, State.FINISHED),
        SessionEvent.SET_OBEYS: (State.ALONE,),
    },
    State.FINISHED: {},
}


def allowed(before: State, event: SessionEvent) -> tuple[State, ...]:
    """Return the states that `event` may lead to from `before`."""
    end = (State.FINISHED,) if event in (SessionEvent.CANCEL, SessionEvent.STOP) else ()
    return (before, *end, *TRANSITIONS[before].get(event, ()))
