"""How an answer can end: one list for the session, both endpoints, the ports and the command line."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended. Text that nobody verified is marked as such, however the answer ended."""

    STOP = "stop"  #: its own end, or a stop string
    LENGTH = "length"  #: it is as long as it may be, or the device's drafter only repeated itself
    TOOL_CALLS = "tool_calls"  #: its own end, and it calls functions
    CANCELLED = "cancelled"  #: whoever asked gave it up
    REFUSED = "refused"  #: nobody will write it: the verifier, or the device alone, refused the request for good
    UNREACHABLE = "unreachable"  #: the verifier was waited for in vain, and the text is not complete
    FAILED = "failed"  #: an engine failed


#: how an answer ends whose text is complete as far as it may be
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)
