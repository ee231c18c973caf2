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
