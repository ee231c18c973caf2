"""What WELCOME says of rounds that ran lately. What it says of streams: test_stream_lookup.py."""

from __future__ import annotations

import pytest

from outrider_core.protocol.tree import TokenTree
from tests.cloud.by_hand import ByHand
from tests.cloud.drive import make_verifier
from tests.tiny import tiny_model


def test_devices_are_told_how_long_rounds_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was long ago, and of waiting for a prompt of its own, they are not."""
    now, session, prompt = 100.0, bytes(16), list(range(4, 14))
    monkeypatch.setattr("cloud.engine.recent_rounds.time.perf_counter", lambda: now)
    hand = ByHand(make_verifier(tiny_model(), ()))
    rounds = 0

    def verify(waited: float) -> int:
        nonlocal rounds
        asked = hand.verify(session, rounds + 1, len(prompt) + rounds, TokenTree())
        asked.request.waiting_since = now - waited
        hand.finish()
        assert asked.drawn
        rounds += 1
        return hand.verifier.welcome().queue_us

    hand.open(session, prompt)
    assert verify(3.0) == 0, "its prompt ran in the same step"
    told = [verify(0.02) for _ in range(40)]
    assert 0 < told[0] < told[-1] <= 20_000 and told[-1] == pytest.approx(20_000, rel=0.05)
    now += 4.0
    assert hand.verifier.welcome().queue_us == told[-1]
    now += 2.0
    assert hand.verifier.welcome().queue_us == 0, "nothing has run for a while"
    assert 0 < verify(0.01) <= 10_000, "what was before counts no more"
    assert verify(1e6) == 2**31 - 1


def test_a_streams_own_steps_hide_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later steps wait for no message, however long it runs; the rounds of others still wait for them."""
    now, prompt, streaming, verifying = 100.0, list(range(4, 14)), bytes(16), b"v" * 16
    monkeypatch.setattr("cloud.engine.recent_rounds.time.perf_counter", lambda: now)
    hand = ByHand(make_verifier(tiny_model(), ()))
    hand.open(streaming, prompt)
    hand.open(verifying, prompt)
    hand.generate(streaming, 1, len(prompt), 100)
    hand.step()
    for number in range(40):
        asked = hand.verify(verifying, number + 1, len(prompt) + number, TokenTree())
        asked.request.waiting_since = now - 0.02
        hand.step()
        assert asked.drawn
    assert hand.verifier.welcome().queue_us >= 19_000
    now += 6.0  # the stream goes on, alone
    hand.step()
    assert hand.verifier.welcome().queue_us == 0, "no round has come for a while"


def test_a_round_that_waits_for_its_own_prompt_or_mask_is_no_queue() -> None:
    """Also if another session of the account runs the prompt, so that the round's step has none."""
    hand = ByHand(make_verifier(tiny_model(), (), prefix_cache="on"))
    prompt = [4 + i % 40 for i in range(80)]
    for session in (b"a" * 16, b"b" * 16):
        hand.open(session, prompt)
        asked = hand.verify(session, 1, len(prompt), TokenTree())
        asked.request.waiting_since -= 3.0
    hand.finish()
    assert hand.metric("prefix_reuses") == 1
    assert hand.verifier.welcome().queue_us == 0

    held = hand.verify(b"a" * 16, 2, len(prompt) + 1, TokenTree())
    held.request.waiting_since -= 3.0
    waiting = hand.verifier.batcher.requests.waiting()
    assert not hand.verifier.scheduler.schedule(waiting, set(waiting)), "its mask is awaited"
    hand.finish()
    assert held.drawn
    assert hand.verifier.welcome().queue_us == 0
