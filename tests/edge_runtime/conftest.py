"""Every session of these tests is held to the table of transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from edge_runtime.session.session import Session
from edge_runtime.session.states import SessionEvent, State, allowed


@pytest.fixture(scope="module", autouse=True)
def _transitions() -> Iterator[None]:
    inside = False  # an event that the session gives itself is part of another one

    def held(event: SessionEvent) -> Callable[..., Any]:
        inner = getattr(Session, event)

        @wraps(inner)
        def call(session: Session, *arguments: Any, **named: Any) -> Any:
            nonlocal inside
            if inside:
                return inner(session, *arguments, **named)
            inside, before = True, session.state
            try:
                actions = inner(session, *arguments, **named)
            finally:
                inside = False
            after: State = session.state
            assert after in allowed(before, event), f"{event} leads from {before} to {after}"
            return actions

        return call

    with pytest.MonkeyPatch.context() as patch:
        for event in SessionEvent:
            patch.setattr(Session, event, held(event))
        yield
