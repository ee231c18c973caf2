"""Documents: every link leads somewhere, and pages stay short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: lines of a page at most; design.md says what stands and leaves the reasons to decisions/
LONGEST = {"README.md": 110, "docs/design.md": 250, "CHANGELOG.md": 60}
WIDTH = 120


def documents() -> list[Path]:
    folders = ("docs", "docs/decisions", "lab", "corpora", "benchmarks", "android_demo", "browser_runtime")
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).glob("*.md"))]
    return sorted([*found, *ROOT.glob("drafters/*/*.md")])


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return FENCED.sub("", document.read_text(encoding="utf-8"))


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, place = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if place and target.suffix == ".md":
            assert place in map(anchor, re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)), link


@pytest.mark.parametrize("name", LONGEST)
def test_pages_stay_short(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST[name]


def test_lines_of_the_design_fit_a_screen() -> None:
    assert max(map(len, (ROOT / "docs/design.md").read_text(encoding="utf-8").splitlines())) <= WIDTH
