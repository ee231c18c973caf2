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


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_fit_a_screen(document: Path) -> None:
    """All but tables and HTML, and of most pages fenced blocks; the notebook is a diary."""
    if document.name != "notebook.md":
        whole = str(document.relative_to(ROOT)) in LONGEST
        text = document.read_text(encoding="utf-8") if whole else prose(document)
        assert [line for line in text.splitlines() if len(line) > WIDTH and line.lstrip()[:1] not in "|<"] == []


#: turns of phrase that a reader has to decode, and what to write instead
RIDDLES = {
    r"\bforete(ll|lls|lling)\b|\bforetold\b": "predict",
    r"(can|cannot) be had\b|\bto be had\b": "is available, is unavailable",
    r"\bnobody is (asked|told)\b": "offline; silently",
    r"\bgo(es)? on with\b": "continue",
    r"\bfor ever\b": "indefinitely",
    r"\bin vain\b": "name the time-out",
    r"\bholds? nobody up\b": "never blocks",
    r"(?<!there )\b(is|are) no (bundle|model|folder|tokens?|setting|number|page|JSON|UTF-8|Exception)\b": "is not a",
}


def product_files() -> list[Path]:
    """Documents, and the sources of the product in three languages."""
    sources = {
        "py": ("outrider", "outrider_core", "edge_runtime", "cloud", "export", "android_demo"),
        "kt": ("android_demo/core", "android_demo/app", "android_demo/client"),
        "ts": ("browser_runtime/src", "browser_runtime/page"),
    }
    found = [path for path in documents() if path.parts[-2:] != ("lab", "notebook.md")]
    for suffix, folders in sources.items():
        for folder in folders:
            paths = (ROOT / folder).rglob(f"*.{suffix}")
            found += [path for path in paths if not {"node_modules", "test", "build"} & set(path.parts)]
    return found


def riddles(text: str) -> list[str]:
    """Each turn of phrase in `text` that a reader has to decode, with what to write instead."""
    flat = re.sub(r"\s+(?:[#*]|//)?\s*", " ", text)
    return [
        f"{flat[max(0, found.start() - 40) : found.end() + 20]!r}: {instead}"
        for pattern, instead in RIDDLES.items()
        for found in re.finditer(pattern, flat)
    ]


def test_sentences_need_no_decoding() -> None:
    planted = "What the text foretells: the drafter goes on with it, and where it is no model nobody is told."
    assert len(riddles(planted)) == 4
    files = product_files()
    assert len(files) > 400
    assert [f"{path.relative_to(ROOT)}: {each}" for path in files for each in riddles(path.read_text("utf-8"))] == []
