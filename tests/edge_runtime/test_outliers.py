"""What a single event may do to what the device measured: a suspended app, an outage, a queue that was told, a lie."""

from __future__ import annotations

import pytest
from msgspec import structs

from edge_runtime.speed.arms import TreeArm
from edge_runtime.speed.controller import Controller
from outrider_core.protocol.tree import TokenTree
from tests.edge_runtime.known_drafts import GPU, welcome


def test_what_took_far_longer_than_usual_says_little_of_the_next_round() -> None:
    """A suspended device, or a long text to read: trees would stay dear for as long as a stream writes."""
    tree, controller = TokenTree.chain([1]), Controller(tree=TreeArm(step=0.002))
    controller.linked(welcome(GPU), 0.02)
    usual = controller.costs.exposed
    controller.tree.drafted(60.0, 4)
    assert controller.tree.step is not None and controller.tree.step < 0.003
    controller.waited(60.0)
    controller.foreseen(tree, [], [0], 60.0)
    assert controller.costs.exposed < 3 * usual


def test_what_always_takes_longer_counts_whole_in_the_end() -> None:
    """Each round alone is bounded, what is usual is not."""
    controller = Controller(tree=TreeArm(step=0.001))
    controller.linked(welcome(GPU), 0.02)
    for _ in range(60):
        controller.waited(0.2)
    assert controller.costs.exposed == pytest.approx(0.2, rel=0.01)
    for _ in range(600):
        controller.streamed(0.5, 0.01)  # many other devices are served in turn
    assert controller.stream.rest == pytest.approx(0.49, rel=0.05)


def test_a_first_round_that_took_long_is_bounded_where_a_queue_was_told() -> None:
    controller = Controller()
    controller.linked(structs.replace(welcome(GPU), queue_us=1_000), 0.02)
    controller.verified(TokenTree.chain([1]), [], [0], 0.8 + GPU.at(2), GPU.at(2))
    assert controller.costs.between < 0.07


def test_a_clock_that_measures_nothing_at_first_does_not_count_for_ever() -> None:
    """A browser's clock is coarse."""
    trees = TreeArm()
    for seconds in (0.0, *(40 * [0.004])):
        trees.drafted(seconds, 2)
    assert trees.step == pytest.approx(0.002, rel=0.01)


def test_a_queue_that_was_told_is_a_guess() -> None:
    """A burst at the handshake, or a verifier that lies, must not keep trees away for good."""
    controller = Controller()
    controller.linked(structs.replace(welcome(GPU), queue_us=2**31), 0.02)
    controller.verified(TokenTree.chain([1]), [], [0], 0.02 + GPU.at(2), GPU.at(2))
    assert (controller.costs.rtt, controller.costs.queue) == (pytest.approx(0.02), 0.0)
    controller.costs.waited(0.01)
    assert 0.01 < controller.costs.between < 0.02


def test_an_outage_does_not_make_a_stream_slow() -> None:
    """Half a second of silence, then what it held back at once."""
    controller = Controller()
    for _ in range(50):
        controller.streamed(0.03, 0.025)
    for seconds in (0.5, *16 * [0.0]):
        controller.streamed(seconds, 0.025)
        assert 1 / 0.0315 < controller.stream.rate(controller.costs) <= 1 / 0.025
    for _ in range(100):
        controller.streamed(0.06, 0.025)
    rate = controller.stream.rate(controller.costs)
    assert rate and 1 / rate == pytest.approx(0.048, abs=0.001), "one token tells little, as a burst may follow"
