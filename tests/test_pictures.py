"""The pictures that README and docs show are there, small, and said in words; the tool that makes them keeps time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[1]
SCREENS = ROOT / "browser_runtime" / "tools" / "screens.py"
IMAGE = re.compile(r"<img\b[^>]*>")
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
SOURCE = re.compile(r'srcset="([^"]+)"')
STILL_BYTES, MOVING_BYTES = 150_000, 1_000_000


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def pictures(document: Path) -> list[Path]:
    text = document.read_text(encoding="utf-8")
    shown = [dict(ATTRIBUTE.findall(image))["src"] for image in IMAGE.findall(text)]
    return [document.parent / name for name in shown + SOURCE.findall(text) if "://" not in name]


def test_every_picture_is_shown_small_and_said_in_words() -> None:
    shown = set[Path]()
    for document in documents():
        shown.update(pictures(document))
        for image in IMAGE.findall(document.read_text(encoding="utf-8")):
            assert len(dict(ATTRIBUTE.findall(image)).get("alt", "")) > 20, f"{document.name}: {image}"
    assert len(shown) > 6
    for picture in shown:
        assert picture.stat().st_size < (MOVING_BYTES if picture.suffix == ".webp" else STILL_BYTES), picture
    drawn = {path for kind in ("png", "svg", "webp") for path in (ROOT / "docs").glob(f"*.{kind}")}
    assert drawn == shown, "a picture that no document shows"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readmes_picture_moves(scheme: str) -> None:
    path = ROOT / "docs" / f"cut-{scheme}.webp"
    assert path in pictures(ROOT / "README.md")
    with Image.open(path) as picture:
        assert getattr(picture, "n_frames", 1) > 30
        paper = picture.convert("L").getpixel((5, picture.height // 2))
    assert isinstance(paper, int) and (paper > 200) == (scheme == "light")


def test_a_moving_picture_keeps_its_time(tmp_path: Path) -> None:
    for place, milliseconds in enumerate([0, 250, 1000]):
        screen = Image.new("RGB", (64, 32), "white")
        ImageDraw.Draw(screen).rectangle((0, 0, 10 + 10 * place, 31), fill="black")
        screen.save(tmp_path / f"{milliseconds}.png")
    output = tmp_path / "moving.webp"
    subprocess.run([sys.executable, SCREENS, "moving", tmp_path, output], check=True, capture_output=True)
    times, blacks = [], []
    with Image.open(output) as picture:
        for place in range(picture.n_frames):  # type: ignore[attr-defined]
            picture.seek(place)
            blacks.append(picture.convert("1").tobytes().count(0))
            times.append(picture.info["duration"])
    assert times == [250, 750, 5000]
    assert blacks == sorted(blacks) and len(set(blacks)) == 3
