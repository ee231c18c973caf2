"""The moving picture says what was recorded."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.picture import COLUMNS, END, STRUCK, THEMES, Frame, draw, layout, timeline

FRAMES = [
    Frame(0.0, "", "", "connecting", ""),
    Frame(1.0, "The sky", "", "verified", ""),
    Frame(1.01, "The sky is", "", "verified", ""),
    Frame(2.0, "The sky is", " <green> & blue", "alone", "the verifier was killed"),
    Frame(9.0, "The sky is blue", " <green> & blue", "verified", "taken back", True),
    Frame(9.0, "The sky is blue", "", "verified", ""),
]


def test_rows_tell_verified_from_provisional() -> None:
    assert layout(FRAMES[3]) == [[("The sky is", "text"), (" <green> & blue", "warn p")]]
    assert layout(FRAMES[4])[0][1] == (" <green> & blue", "bad s")
    long = Frame(0.0, "word " * 30, "tail " * 30, "alone", "")
    rows = layout(long)
    assert all(sum(len(text) for text, _ in row) <= COLUMNS for row in rows)
    assert "".join(text for row in rows for text, _ in row) == long.verified + long.provisional


def test_flickers_are_merged_and_waits_shortened() -> None:
    shown = timeline(FRAMES)
    assert FRAMES[1] in [frame for _, frame in shown] or FRAMES[2] in [frame for _, frame in shown]
    assert [seconds for seconds, frame in shown if frame.struck] == [STRUCK]
    assert shown[-1] == (END, FRAMES[-1])
    assert sum(seconds for seconds, _ in shown) < 10


@pytest.mark.parametrize("theme", list(THEMES))
def test_the_picture_is_well_formed(theme: str) -> None:
    shown = timeline(FRAMES)
    root = ElementTree.fromstring(draw(shown, theme))
    groups = [element for element in root.iter() if element.get("class") == "f"]
    assert len(groups) == len(shown)
    assert "<green> & blue" in "".join(groups[-2].itertext())
