"""Why the verifier does not answer reaches the user: with a state that changes, or as a state of its own."""

from __future__ import annotations

import random

from edge_runtime.answer.display import Display
from edge_runtime.answer.stats import StatsRecorder
from edge_runtime.events import Finished, LinkState, LinkStatus
from edge_runtime.session.actions import Done, Stall
from outrider_core.protocol.ending import FinishReason
from tests.edge_runtime.world import World


def display(why: str = "") -> Display:
    session = World(random.Random(0)).session
    return Display(session, StatsRecorder(None), lambda ids: "", [], why)


def states(of: Display) -> list[tuple[str, str]]:
    events = of.take()
    assert all(isinstance(event, LinkState) for event in events)
    return [(event.state, event.detail) for event in events]  # type: ignore[attr-defined]


def test_a_reason_known_before_the_answer_comes_with_its_first_state() -> None:
    shown = display("Connection refused")
    shown.tell(LinkStatus.CONNECTING, "ws://there")
    assert states(shown) == [("connecting", "ws://there: Connection refused")]


def test_each_new_reason_is_a_link_state_of_its_own_and_told_once() -> None:
    shown = display()
    shown.tell(LinkStatus.CONNECTING, "ws://there")
    for why in ("Connection refused", "Connection refused", "no answer in time"):
        shown.because(why)
    shown.show(Stall(0.0))
    assert states(shown) == [
        ("connecting", "ws://there"),
        ("connecting", "Connection refused"),
        ("connecting", "no answer in time"),
        ("alone", "the verifier is silent: no answer in time"),
    ]


def test_while_the_target_answers_there_is_none() -> None:
    shown = display()
    shown.tell(LinkStatus.VERIFIED, "")
    shown.because("all sessions are busy")
    shown.because("")
    assert states(shown) == [("verified", "")]
    shown.because("lost")
    shown.show(Stall(0.0))
    shown.because("")
    shown.tell(LinkStatus.VERIFIED, "")
    assert states(shown) == [("alone", "the verifier is silent: lost"), ("verified", "")]


def test_an_end_says_why_only_where_the_target_did_not_write_it() -> None:
    for reason in FinishReason:
        detail = "" if reason in ("stop", "length", "tool_calls") else "refused"
        shown = display("refused")
        shown.show(Done(FinishReason(reason)))
        (end,) = shown.take()
        assert isinstance(end, Finished) and end.detail == detail
