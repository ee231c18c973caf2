"""Interfaces of links to a verifier, and of their makers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edge_runtime.link.events import EngineFailed, LinkEvent, LinkRefused, Traffic
from outrider_core.protocol.wire import ClientMessage, Hello, Welcome


class VerifierLink(Protocol):
    """Carries messages to one verifier and back: `edge_runtime.link.websocket.Link`, `outrider.local.LocalLink`.

    It reports LinkUp, LinkDown, Arrived, LinkRefused and EngineFailed in the event loop's thread, in order.
    """

    url: str  # address of the verifier, for people
    traffic: Traffic
    welcome: Welcome | None  # while there is a connection
    refused: LinkRefused | EngineFailed | None  # why no connection will ever be made again; None if that may change

    async def run(self) -> None:
        """Connect, and reconnect when needed; ends only by cancellation or a refusal."""

    def send(self, message: ClientMessage) -> None:
        """Send `message`, or drop it without a connection: the session repeats it after the next LinkUp.

        Never blocks.
        """

    async def flush(self) -> None:
        """Wait until everything sent is on its way, or cannot be."""

    def stay(self, seconds: float) -> None:
        """Dial, and stay connected for `seconds`; infinity: until the next call; 0: hang up and stop dialling."""

    def network_changed(self) -> None:
        """Tell the link that the device has another network: it dials over it at once, if a connection is needed."""

    def pin(self, arithmetic: str) -> None:
        """Accept only verifiers with this arithmetic, or with an unknown one, from now on; "": any.

        Raises ValueError if there is only one verifier, with another arithmetic.
        """

    def renew(self) -> None:
        """Replace a silent, perhaps dead connection by a new one, unless it speaks first."""


class LinkMaker(Protocol):
    """Creates links instead of an address: `outrider.local.LocalVerifier`.

    reliable: it always answers or fails, so the device never writes offline while it waits for a verdict.
    """

    reliable: bool

    def link(self, hello: Hello, report: Callable[[LinkEvent], None]) -> VerifierLink:
        """Return a link for one runtime, which runs it."""
