"""When the understudy has read enough to write, and when it reads again."""

import random

import pytest

from edge_runtime.session.handover import FEW_TOKENS, Handover
from edge_runtime.session.policy import Policy
from edge_runtime.session.solo import CONFIDENCE_WINDOW
from edge_runtime.session.states import Writer
from tests.edge_runtime.world import World

READ = list(range(20))


def warm() -> Handover:
    """One that has read READ, its last ten tokens written alone."""
    handover = Handover(True, Policy(understudy="warm"))
    handover.read(READ, 10)
    assert handover.has_read(READ, alone=True)
    return handover


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (READ, True),
        ([*READ, *[99] * FEW_TOKENS], True),
        ([*READ, *[99] * (FEW_TOKENS + 1)], False),
        ([*READ[:11], *[99] * FEW_TOKENS], True),
        ([*READ[:11], *[99] * (FEW_TOKENS + 1)], False),  # as long as what was read, and another text
    ],
)
def test_the_first_token_alone_is_the_understudys_where_little_is_unread(text: list[int], begins: bool) -> None:
    handover = warm()
    handover.begin(text)
    assert handover.next_writer is (Writer.UNDERSTUDY if begins else Writer.DRAFTER)
    assert bool(handover.read_along(text)) != begins, "the target may be back before anything was written"


def test_a_reading_of_what_the_target_replaced_is_begun_anew() -> None:
    handover = warm()
    handover.read([*READ, 20], 20)
    assert not handover.has_read([*READ, 21], alone=False)
    assert handover.read_along([*READ, 21]) and not handover.read_along([*READ, 21])


def test_a_drafter_in_doubt_writes_on_while_the_understudy_reads() -> None:
    policy = Policy(understudy="warm", offline="pause", min_confidence=0.5)
    world = World(random.Random(1), max_new=200, understudy=True, policy=policy)
    world.do(world.session.start(0.0))
    world.connect()
    while len(world.shown) < 18:
        world.deliver()
        world.run_job()
        world.run_reading()
    while world.jobs:
        world.run_job()
    world.cut()
    for token in range(CONFIDENCE_WINDOW + 2):
        world.do(world.session.token_written(1 + token % 3, 0.1, world.jobs.pop().version, world.now))
    assert "Pause" not in world.trace and world.session.handover.coming
    for _ in range(4):
        world.run_reading()
        world.run_job()
    assert world.session.text.writers[-1] is Writer.UNDERSTUDY and "Pause" not in world.trace
