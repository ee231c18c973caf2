"""The traces that ports of the session replay: up to date, replayable from the file alone, and complete."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.edge_runtime.make_traces import CALLS, FILE, replay, traces

#: arrows of the diagram in docs/design.md
ARROWS = {
    ("drafting", "verifying"), ("verifying", "drafting"), ("drafting", "streaming"), ("streaming", "drafting"),
    ("verifying", "streaming"), ("drafting", "writing alone"), ("verifying", "writing alone"),
    ("streaming", "writing alone"), ("writing alone", "drafting"), ("writing alone", "verifying"),
    ("writing alone", "waiting for the link"), ("waiting for the link", "writing alone"),
    ("drafting", "waiting for the link"), ("verifying", "waiting for the link"), ("streaming", "waiting for the link"),
    ("waiting for the link", "drafting"), ("waiting for the link", "streaming"), ("writing alone", "streaming"),
    ("drafting", "finished"),
    ("verifying", "finished"), ("streaming", "finished"), ("writing alone", "finished"),
    ("waiting for the link", "finished"),
}  # fmt: skip


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


def test_every_event_and_every_arrow_of_the_diagram_is_there(recorded: list[dict[str, Any]]) -> None:
    calls = Counter(step[0] for trace in recorded for step in trace["steps"])
    assert set(calls) == set(CALLS)
    seen = set()
    for trace in recorded:
        state = "drafting"
        for step in trace["steps"]:
            seen.add((state, step[3]))
            state = step[3]
    arrows = {(one, other) for one, other in seen if one != other}
    assert arrows == ARROWS
