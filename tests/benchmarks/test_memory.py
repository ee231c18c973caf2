"""A verifier's memory is read from a real process, and that of the default target stays within its bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import memory

BUNDLE = Path(__file__).parents[2] / "build/bundle"
#: MiB of a verifier on the CPU with the default target and a session of 1,024 tokens
BOUND = 350

pytestmark = pytest.mark.skipif(
    not (BUNDLE / "manifest.json").is_file(), reason="no build/bundle; run the tests with: make test"
)


@pytest.mark.slow
def test_the_default_target_stays_within_its_bound(tmp_path: Path) -> None:
    asked = ["--bundle", str(BUNDLE), "--json", str(tmp_path / "memory.json")]
    for _ in range(2):  # where the first start made the target's 8-bit copy, which takes memory of its own
        assert memory.main(asked) == 0
    figures = json.loads((tmp_path / "memory.json").read_text())
    assert figures["tokens"] > 992
    assert figures["resident_mib_ready"] > 200 and figures["resident_mib_with_session"] <= BOUND, figures


def test_a_session_has_room_for_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.main(["--tokens", "8"])
    assert "--tokens must be more than 32" in capsys.readouterr().err
