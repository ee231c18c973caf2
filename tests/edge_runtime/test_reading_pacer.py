"""Offline tokens appear at a reader's pace."""

import random

import pytest
from pytest import approx

from edge_runtime.answer.reading_pacer import ReadingPacer, _Reader
from edge_runtime.session.actions import WriteToken
from edge_runtime.session.policy import Policy
from edge_runtime.session.states import Writer
from tests.edge_runtime.world import World


def test_the_first_token_is_there_at_once_and_others_when_the_reader_comes() -> None:
    reader = _Reader(10.0)
    assert reader.due(7, 0) == 0.0
    reader.shown(7, 0, 100.0)
    assert reader.due(7, 1) == approx(100.1)
    reader.shown(7, 1, 100.1)
    assert reader.due(7, 2) == approx(100.2)


def test_a_writer_that_was_slow_makes_up_for_a_second() -> None:
    reader = _Reader(10.0)
    reader.shown(7, 0, 100.0)
    reader.shown(7, 1, 100.6)
    assert reader.due(7, 2) == approx(100.2)
    reader.shown(7, 2, 109.0)
    assert reader.due(7, 3) == approx(108.1) and reader.due(7, 12) == approx(109.0)


def test_what_replaces_withdrawn_tokens_is_there_at_once() -> None:
    reader = _Reader(10.0)
    for written in range(3):
        reader.shown(7, written, 100.0 + written / 10)
    assert reader.due(7, 1) < reader.due(7, 2) == approx(100.2)  # the last two are withdrawn
    for written in (1, 2):
        reader.shown(7, written, 100.21)
    assert reader.due(7, 3) == approx(100.3)  # the reader is no further


def test_behind_what_the_target_verified_reading_begins_anew() -> None:
    reader = _Reader(10.0)
    for written in range(3):
        reader.shown(7, written, 100.0 + written / 10)
    assert reader.due(8, 1) == approx(100.3)
    reader.shown(8, 1, 105.0)
    assert reader.due(8, 1) == approx(105.0) and reader.due(8, 2) == approx(105.1)


@pytest.mark.parametrize("policy", [Policy(writer="prefer-device"), Policy(writer="prefer-cloud")])
def test_only_what_is_written_alone_is_read_at_that_pace(policy: Policy) -> None:
    world = World(random.Random(1), policy=policy)
    session, now = world.session, 100.0
    held = ReadingPacer(policy.offline_rate)

    def write() -> bool:
        action = WriteToken(session.committed + session.provisional, session.job.version, Writer.DRAFTER)
        held.hold(action, len(session.committed), session.offline.may_be_taken_back)
        written = held.release(now, session.job.version) is not None
        session.text.provisional += [1] * written
        return written

    assert all(write() for _ in range(9)), "a lead is not held up"
    session.offline.active = True
    assert write() and not write()
    now += 1 / policy.offline_rate
    assert write() and not write()
