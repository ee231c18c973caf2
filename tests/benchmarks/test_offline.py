"""The measurements of `benchmarks.offline`, and its output if it is interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import offline
from benchmarks.outage import Outage, OutageWatch
from edge_runtime.events import (
    AnswerStats,
    Event,
    Finished,
    LinkState,
    LinkStatus,
    Provisional,
    RolledBack,
    Verified,
)
from outrider_core.protocol.ending import FinishReason
from tests.edge_runtime.test_probe import tiny_bundle

PROMPT = [7, 8, 9]
ALONE = LinkState("", "", LinkStatus.ALONE, "")
BACK = LinkState("", "", LinkStatus.VERIFIED, "")


def alone(tokens: Iterable[int], begin: float) -> list[tuple[Event, float]]:
    """Twenty a second from `begin` on."""
    return [(Provisional("", "", token), begin + 0.05 * i) for i, token in enumerate(tokens)]


def watched(own: list[int], withdrawn: int, wrote: int) -> Outage:
    """A late reply before the cut; then a cut of which the deadline is 10.0, in which the drafter writes `withdrawn`
    tokens that the understudy takes back at 12.0; it writes `wrote` of its own."""
    watch = OutageWatch(PROMPT, own)
    first = own[:30]
    early = [
        (ALONE, 1.0),
        (Provisional("", "", 5), 1.5),
        (RolledBack("", "", 1), 1.6),
        (Verified("", "", first, 0), 1.6),
    ]
    for event, now in [*early, (BACK, 1.6)]:
        watch.see(event, now)
    watch.cut = True
    for event, now in [(ALONE, 10.0), *alone(range(withdrawn), 10.03)]:
        watch.see(event, now)
    if withdrawn:
        watch.see(RolledBack("", "", withdrawn), 12.0)
    for event, now in alone(own[30 : 30 + wrote], 12.0):
        watch.see(event, now)
    watch.back = True
    watch.see(Verified("", "", own[30:60], wrote), 20.0)
    stats = AnswerStats(stall_seconds=[0.5, 0.03 if withdrawn else 2.0])
    return watch.end(Finished("", "", FinishReason.LENGTH, own[:60], stats))


@pytest.mark.parametrize("withdrawn", [0, 1, 24])
def test_times_are_from_the_deadline_to_what_stood_there_in_the_end(withdrawn: int) -> None:
    own = list(range(100, 160))
    found = watched(own, withdrawn, 25)
    assert found.first == pytest.approx(0.03 if withdrawn else 2.0)
    assert found.twentieth == pytest.approx(2.0 + 19 * 0.05)
    assert (found.before, found.written, found.own) == (PROMPT + own[:30], own[30:55], own[30:55])
    assert found.same
    assert watched(own, withdrawn, 19).twentieth is None


@pytest.mark.parametrize("done", [0, 2])
def test_an_interrupted_run_shows_what_was_done(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Verifier:
        """Where the interrupt finds it: at work."""

        stopped = False

        def __init__(self, *arguments: Any) -> None: ...
        def start(self) -> None: ...
        def wait_ready(self) -> None: ...
        def stop(self) -> None:
            Verifier.stopped = True

    async def measure(*arguments: Any) -> None:
        *_, found = arguments
        found += [("warm", 2.0, watched(list(range(100, 160)), 0, 25))] * done
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "VerifierProcess", Verifier)
    monkeypatch.setattr(offline, "measure", measure)
    bundle = tiny_bundle(tmp_path / "bundle", max_context=192)
    questions, figures = tmp_path / "questions.jsonl", tmp_path / "figures.json"
    questions.write_text(json.dumps({"prompt": "Why?"}) + "\n")
    command = ["--bundle", str(bundle), "--drafter", str(tmp_path), "--prompts", str(questions), "--json", str(figures)]
    status = offline.main([*command, "--max-new-tokens", "60"])
    assert Verifier.stopped
    if not done:
        assert status == 130 and not figures.exists()
        return
    (row,) = json.loads(figures.read_text())["rows"]
    assert (row["writer"], row["answers"], row["twentieth_ms"], row["perplexity"]) == ("warm", 2, 2950, None)
    assert "interrupted" in capsys.readouterr().out
