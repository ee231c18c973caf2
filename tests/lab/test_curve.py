"""The picture of how a drafter learnt."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lab.curve import as_svg, main

SHIPPED = Path(__file__).parents[2] / "drafters/smollm2-135m-instruct-moa"


def test_stages_follow_one_another() -> None:
    root = ElementTree.fromstring(as_svg("a <b>", [[(10, 3.0, 0.25), (20, 2.0, 0.5)], [(20, 1.0, 0.75)]]))
    lines = [line.attrib["points"].split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    places = [tuple(map(float, point.split(","))) for line in lines for point in line]
    assert [len(line) for line in lines] == [2, 1]
    assert places == [(195.0, 203.5), (338.0, 147.0), (624.0, 90.5)]


def test_the_shipped_drafter_has_the_curve_that_the_docs_show(tmp_path: Path) -> None:
    assert main([str(SHIPPED), "--output", str(tmp_path / "curve.svg")]) == 0
    shown = SHIPPED.parents[1] / "docs/training.svg"
    assert (tmp_path / "curve.svg").read_text() == shown.read_text()


def test_a_drafter_without_a_curve_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"notes": {}}))
    assert main([str(tmp_path), "--output", str(tmp_path / "curve.svg")]) == 1
    assert capsys.readouterr().err.startswith("error: there is no curve")
