"""The traces that ports of the session replay: up to date, replayable from the file alone, and complete."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_runtime.session.states import TRANSITIONS, SessionEvent, State, allowed
from tests.edge_runtime.make_traces import FILE, replay, traces


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    stored: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return stored


def test_the_file_is_up_to_date(recorded: list[dict[str, Any]]) -> None:
    assert recorded == json.loads(json.dumps(traces())), "run: python -m tests.edge_runtime.make_traces"


def test_every_trace_replays_from_the_file(recorded: list[dict[str, Any]]) -> None:
    assert len(recorded) >= 200
    for trace in recorded:
        replay(trace)


def test_a_session_that_acts_otherwise_is_noticed(recorded: list[dict[str, Any]]) -> None:
    trace = json.loads(json.dumps(next(trace for trace in recorded if len(trace["steps"]) > 5)))
    step = next(step for step in trace["steps"] if step[2])
    step[2].pop()
    with pytest.raises(AssertionError, match="gives"):
        replay(trace)


def test_every_event_and_every_arrow_is_there_and_none_besides_the_table(recorded: list[dict[str, Any]]) -> None:
    calls, arrows = set[SessionEvent](), set[tuple[State, State]]()
    for trace in recorded:
        state = State.DRAFTING
        for call, _, _, after in trace["steps"]:
            assert after in allowed(state, SessionEvent(call)), f"{trace['name']}: {call} leads from {state} to {after}"
            calls.add(SessionEvent(call))
            arrows.add((state, State(after)))
            state = State(after)
    assert calls == set(SessionEvent)
    ends = {(state, State.FINISHED) for state in State}
    table = {(state, after) for state, events in TRANSITIONS.items() for many in events.values() for after in many}
    assert {(one, other) for one, other in arrows if one is not other} == table | ends - {(State.FINISHED,) * 2}


def test_sessions_that_choose_switch_both_ways_and_compare(recorded: list[dict[str, Any]]) -> None:
    steps = [step for trace in recorded if "tuning" in trace["setup"] for step in trace["steps"]]
    actions = [action for step in steps for action in step[2]]
    assert sum(name == "Compare" for name, _ in actions) >= 5
    assert len({fields["gain"] for name, fields in actions if name == "DraftTree" and "gain" in fields}) > 20
    asked = [action[1]["type"] for action in actions if action[0] == "Send"]
    assert {"Verify", "Generate"} <= set(asked)
