"""How an answer can end: one list for the session, both endpoints, the ports and the command line."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended. Unverified text is marked as such, however the answer ended."""

    STOP = "stop"  #: its own end, or a stop string
    LENGTH = "length"  #: it is as long as it may be, or the device's drafter only repeated itself
    TOOL_CALLS = "tool_calls"  #: its own end, and it calls functions
    CANCELLED = "cancelled"  #: the client gave it up
    REFUSED = "refused"  #: the verifier, or the device alone, refused the request permanently
    UNREACHABLE = "unreachable"  #: the verifier did not return in time, and the text is incomplete
    FAILED = "failed"  #: an engine failed


#: how an answer ends whose text is complete as far as it may be
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)
