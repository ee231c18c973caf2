"""Codes with which the verifier closes a WebSocket."""

from __future__ import annotations

from enum import IntEnum


class CloseCode(IntEnum):
    """Close codes: RFC 6455's below 4000, the protocol's own from 4000 on."""

    UNSUPPORTED = 1003  # a text frame
    INVALID = 1007  # a text frame that is not valid UTF-8
    POLICY = 1008
    TOO_LARGE = 1009
    RESTART = 1012
    MISMATCH = 4001  # protocol, target, drafter or arithmetic differ
    REVOKED = 4003  # the token was revoked
