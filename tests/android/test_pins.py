"""The lock: well-formed, without addresses, and nothing passes that differs from it."""

from __future__ import annotations

import hashlib
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from android_demo.ci import pins
from android_demo.ci.pins import LOCK, FetchError, Pin, fetch, needed_by, read_pins, unpacked

CONTENT = b"a package"
PIN = Pin("thing", "1.0", "npm", "thing-1.0.tgz", hashlib.sha256(CONTENT).hexdigest(), ("core",))


def serve(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> list[str]:
    """Let the npm client give a file; returns what it was asked for."""
    asked: list[str] = []

    def client(pin: Pin, folder: Path) -> None:
        asked.append(pin.name)
        (folder / name).write_bytes(content)

    monkeypatch.setitem(pins.CLIENTS, "npm", client)
    return asked


def test_lock_is_well_formed_and_names_no_host() -> None:
    rows = read_pins()
    assert {"kotlin-compiler", "junit5", "libandroid-23-java"} <= {pin.name for pin in needed_by("core", rows)}
    assert len({pin.file for pin in rows}) == len(rows)
    for file in LOCK.parent.iterdir():
        if file.is_file():
            assert not re.search(r"https?://", file.read_text(encoding="utf-8")), file
    with pytest.raises(FetchError, match="nothing is pinned"):
        needed_by("nobody", rows)


@pytest.mark.parametrize(
    "text", ["pin = 3", "[[pin]]\nname = 'x'", "[[pin", LOCK.read_text().replace('"npm"', '"web"'),
             LOCK.read_text().replace('file = "', 'file = "../')],
)  # fmt: skip
def test_broken_locks_are_refused(tmp_path: Path, text: str) -> None:
    lock = tmp_path / "pins.toml"
    lock.write_text(text)
    with pytest.raises(FetchError):
        read_pins(lock)


def test_a_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(monkeypatch, PIN.file, CONTENT)
    assert fetch(PIN, tmp_path).read_bytes() == CONTENT
    fetch(PIN, tmp_path)
    assert asked == ["thing"]
    (tmp_path / PIN.file).write_bytes(b"rotten")
    assert fetch(PIN, tmp_path).read_bytes() == CONTENT
    assert asked == ["thing", "thing"]


def test_another_content_or_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, PIN.file, CONTENT + b"!")
    with pytest.raises(FetchError, match="do not use it"):
        fetch(PIN, tmp_path)
    serve(monkeypatch, "other.tgz", CONTENT)
    with pytest.raises(FetchError, match=re.escape("other.tgz instead of thing-1.0.tgz")):
        fetch(PIN, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="npm is not installed"):
        fetch(PIN, tmp_path)


def test_archives_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").write_text("inside")
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as archive:
        archive.add(tmp_path / "inside", "package/inside")
    content = (tmp_path / "made.tgz").read_bytes()
    serve(monkeypatch, PIN.file, content)
    folder = unpacked(replace(PIN, sha256=hashlib.sha256(content).hexdigest()), tmp_path / "cache")
    assert (folder / "package" / "inside").read_text() == "inside"
