"""When the understudy has read enough to write, and when it reads again."""

import random

import pytest

from edge_runtime.session.offline import CONFIDENCE_WINDOW, FEW_TOKENS, WARM_TOKENS, OfflineWriter
from edge_runtime.session.policy import Policy
from edge_runtime.session.states import Writer
from tests.edge_runtime.world import World

READ = list(range(20))


def warm() -> OfflineWriter:
    """Its understudy has read READ, while the target is silent."""
    offline = OfflineWriter(Policy(understudy="warm"), True, frozenset(), True, 300.0)
    offline.start()
    assert offline.read_along(READ) and offline.has_read(0, READ, []) is None
    return offline


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
    offline = warm()
    assert not offline.read_to_write(text, [])
    assert offline.next_writer() is (Writer.UNDERSTUDY if begins else Writer.DRAFTER)
    assert bool(offline.read_along(text)) != begins, "the target may be back before anything was written"


def test_a_reading_of_what_the_target_replaced_is_begun_anew() -> None:
    offline = warm()
    (reading,) = offline.read_along([*READ, *[20] * WARM_TOKENS])
    offline.stop()
    other = [*READ, *[21] * WARM_TOKENS]
    assert offline.still_reads(reading) and offline.has_read(0, other, []) is None
    assert offline.read_along(other) and not offline.read_along(other)


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
    assert "Pause" not in world.trace and world.session.offline.coming
    for _ in range(4):
        world.run_reading()
        world.run_job()
    assert world.session.text.writers[-1] is Writer.UNDERSTUDY and "Pause" not in world.trace
