"""Adds to an answer's events why there is no connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from edge_runtime.events import Event, Finished, LinkState, LinkStatus
from edge_runtime.states import FinishReason

#: how an answer ends that waited for the verifier in vain
UNANSWERED = (FinishReason.UNVERIFIED, FinishReason.UNREACHABLE)


async def with_reasons(events: AsyncIterator[Event], reason: Callable[[], str]) -> AsyncIterator[Event]:
    """The events, with `reason()` in their details: why there is no connection now, "" while there is one.

    A reason that becomes known, or changes, while the link's state stays what it is comes as a LinkState of its own.
    """
    state, shown = LinkStatus.CONNECTING, ""
    async for event in events:
        why = reason()
        match event:
            case LinkState():
                state, shown = event.state, why
                yield (
                    replace(event, detail=f"{event.detail}: {why}") if why and state != LinkStatus.VERIFIED else event
                )
            case Finished():
                yield replace(event, detail=why) if event.reason in UNANSWERED else event
            case _:
                yield event
                if why and why != shown and state != LinkStatus.VERIFIED:
                    shown = why
                    yield LinkState(event.verified, event.provisional, state, why)
