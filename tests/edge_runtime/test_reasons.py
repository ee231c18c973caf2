"""A reason that becomes known while the link's state stays what it is reaches the app all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from edge_runtime.events import AnswerStats, Event, Finished, LinkState, Provisional, Verified
from edge_runtime.reasons import with_reasons

STATS = AnswerStats()


def explained(*steps: tuple[str, Event]) -> list[Event]:
    """What comes of events that each find the link with a reason."""
    now = ""

    async def events() -> AsyncIterator[Event]:
        nonlocal now
        for now, event in steps:  # noqa: B007
            yield event

    async def run() -> list[Event]:
        return [event async for event in with_reasons(events(), lambda: now)]

    return asyncio.run(run())


def test_a_new_reason_is_a_link_state_of_its_own() -> None:
    alone = LinkState("", "", "alone", "the verifier is silent")
    written = Provisional("", "a", 1), Provisional("", "ab", 2), Provisional("", "abc", 3)
    assert explained(("", alone), ("refused", written[0]), ("refused", written[1]), ("no answer", written[2])) == [
        alone,
        written[0],
        LinkState("", "a", "alone", "refused"),
        written[1],
        written[2],
        LinkState("", "abc", "alone", "no answer"),
    ]


def test_details_carry_the_reason_and_a_verified_state_none() -> None:
    silent, verified = LinkState("", "", "waiting", "paused: asked"), LinkState("", "", "verified", "")
    token = Verified("a", "", [1], 0)
    assert explained(("refused", silent), ("", verified), ("lost", token)) == [
        LinkState("", "", "waiting", "paused: asked: refused"),
        verified,
        token,
    ]


def test_an_end_says_why_only_where_it_waited_in_vain() -> None:
    for reason, detail in (("unverified", "refused"), ("unreachable", "refused"), ("stop", ""), ("length", "")):
        assert explained(("refused", Finished("", "", reason, [], STATS))) == [
            Finished("", "", reason, [], STATS, detail=detail)
        ]
