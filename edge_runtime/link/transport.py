"""Protocols of what carries messages to a verifier, and of what makes such links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edge_runtime.link.websocket import EngineFailed, LinkEvent, LinkRefused, Traffic
from outrider_core.protocol.wire import ClientMessage, Hello, Welcome


class VerifierLink(Protocol):
    """Carries messages to one verifier and back: `edge_runtime.link.websocket.Link`, `outrider.local.LocalLink`.

    It reports LinkUp, LinkDown, Arrived, LinkRefused and EngineFailed in the event loop's thread, in order.
    """

    url: str  # where the verifier is, for people
    traffic: Traffic
    welcome: Welcome | None  # while there is a connection
    refused: LinkRefused | EngineFailed | None  # why there will never be one again; None where that may change

    async def run(self) -> None:
        """Connect, and again whenever it must; ends only by cancellation or a refusal."""

    def send(self, message: ClientMessage) -> None:
        """Send, or drop `message` where there is no connection: the session repeats it after the next LinkUp. Never
        waits."""

    async def flush(self) -> None:
        """Wait until all that was sent is on its way, or cannot be."""

    def stay(self, seconds: float) -> None:
        """Dial, and stay connected for `seconds`; infinity: until the next call; 0: hang up, and dial nothing."""

    def network_changed(self) -> None:
        """The device has another network: dial over it at once, if a connection is needed at all."""

    def pin(self, arithmetic: str) -> None:
        """From now on only verifiers that compute in `arithmetic`, or do not say how, are wanted; "": any.

        Raises ValueError where there is but one verifier, and it computes otherwise.
        """

    def renew(self) -> None:
        """The connection is silent, perhaps dead: make a new one unless it speaks first."""


class LinkMaker(Protocol):
    """Creates links in place of an address: `outrider.local.LocalVerifier`.

    reliable: it always answers or fails, so that the device never writes alone while it waits for a verdict.
    """

    reliable: bool

    def link(self, hello: Hello, report: Callable[[LinkEvent], None]) -> VerifierLink:
        """A link for one runtime; the runtime runs it."""
