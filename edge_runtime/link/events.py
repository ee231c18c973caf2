"""The events of a link, and its traffic counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_core.protocol.wire import ServerMessage, Welcome


class LinkRefused(RuntimeError):
    """The link was refused: invalid address, other target, drafter or protocol, no valid token."""


class EngineFailed(RuntimeError):
    """The target failed in this process; logger "cloud" has the traceback. Verified text remains valid."""


@dataclass(frozen=True)
class LinkUp:
    """rtt: seconds between HELLO and WELCOME."""

    welcome: Welcome
    rtt: float = 0.0


@dataclass(frozen=True)
class LinkDown:
    """reason: "" if nothing needs the link.

    refused: the verifier that answered does not accept this device; another one at this address may.
    """

    reason: str
    refused: bool = False


@dataclass(frozen=True)
class Arrived:
    message: ServerMessage


LinkEvent = LinkUp | LinkDown | Arrived | LinkRefused | EngineFailed


@dataclass
class Traffic:
    """Bytes of WebSocket frames, headers and masks included, without TCP and TLS."""

    up: int = 0
    down: int = 0
    #: bytes of the last frame sent and received, by message type
    last: dict[str, int] = field(default_factory=dict)


def frame_bytes(payload: int, masked: bool) -> int:
    """Return the size of one WebSocket frame around `payload` bytes (RFC 6455, section 5.2)."""
    header = 2 if payload < 126 else 4 if payload < 65536 else 10
    return header + (4 if masked else 0) + payload
