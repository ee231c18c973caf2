"""Where an answer stands, why it pauses and why it ends."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where an answer stands. `TRANSITIONS` says how it gets from one state to the next."""

    DRAFTING = "drafting"  #: no request is under way; the drafter is growing a tree, or waits for the first link
    VERIFYING = "verifying"  #: the verdict on a tree is awaited
    STREAMING = "streaming"  #: the target writes; its next token is awaited
    ALONE = "writing alone"  #: the target is silent, and the drafter writes
    WAITING = "waiting for the link"  #: the target is silent, and nothing is written
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  #: its own end, or a stop string
    LENGTH = "length"  #: it is as long as it may be
    UNVERIFIED = "unverified"  #: the link never came back
    UNREACHABLE = "unreachable"  #: the link never came back, and nothing may be written without it
    CANCELLED = "cancelled"


class PauseReason(StrEnum):
    """Why nothing is written alone."""

    UNSURE = "unsure"  #: the drafter gave its last tokens too little probability
    ASKED = "asked"  #: somebody called `pause`
