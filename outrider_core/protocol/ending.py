"""The ways an answer can end, shared by the session, both endpoints, the ports and the command line."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Reason for the end of an answer. Unverified text is marked as such, however the answer ended."""

    STOP = "stop"  #: the model ended it, or a stop string
    LENGTH = "length"  #: the limit of tokens was reached, or the device's drafter only repeated itself
    TOOL_CALLS = "tool_calls"  #: the model ended it, and it calls functions
    CANCELLED = "cancelled"  #: the client cancelled it
    REFUSED = "refused"  #: the verifier, or the device alone, refused the request permanently
    UNREACHABLE = "unreachable"  #: the verifier did not return in time, and the text is incomplete
    FAILED = "failed"  #: an engine failed


#: endings of an answer whose text is complete
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)
