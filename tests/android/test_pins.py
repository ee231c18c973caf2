"""The lock: well-formed, without addresses, true about sizes; nothing else passes, nothing comes unannounced."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from android_demo.ci import clients, core, store
from android_demo.ci.pins import CACHE_VARIABLE, LOCK, FetchError, Pin, cache_folder, needed_by, read_pins
from android_demo.ci.store import fetch, unpacked

CONTENT = b"a package"
PIN = Pin("thing", "1.0", "npm", "thing-1.0.tgz", hashlib.sha256(CONTENT).hexdigest(), ("core",), len(CONTENT), 0)
#: addresses that name a format and that nobody opens
NAMESPACES = ("http://maven.apache.org/POM/4.0.0",)


def serve(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> list[str]:
    """Let the npm client give a file; returns what it was asked for."""
    asked: list[str] = []

    def client(pin: Pin, folder: Path) -> None:
        asked.append(pin.name)
        (folder / name).write_bytes(content)

    monkeypatch.setitem(clients.CLIENTS, "npm", client)
    return asked


def test_lock_is_well_formed_and_names_no_host() -> None:
    rows = read_pins()
    assert {"kotlin-compiler", "junit5", "libandroid-23-java"} <= {pin.name for pin in needed_by("core", rows)}
    assert len({pin.file for pin in rows}) == len(rows)
    for file in LOCK.parent.iterdir():
        if file.is_file():
            found = set(re.findall(r"https?://[^\"'\s]*", file.read_text(encoding="utf-8")))
            assert found <= set(NAMESPACES), file
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
    with pytest.raises(FetchError, match="apt-get is not installed"):
        fetch(replace(PIN, origin="debian"), tmp_path)


def packed(folder: Path, names: dict[str, bytes]) -> tuple[bytes, Pin]:
    """A .tgz of these files, and its pin."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "made.tgz", "w:gz") as archive:
        for name, content in names.items():
            (folder / "file").write_bytes(content)
            archive.add(folder / "file", name)
    content = (folder / "made.tgz").read_bytes()
    return content, replace(PIN, sha256=hashlib.sha256(content).hexdigest(), size=len(content))


def test_archives_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, pin = packed(tmp_path, {"package/inside": b"inside", "package/other": b"other"})
    serve(monkeypatch, PIN.file, content)
    assert (unpacked(pin, tmp_path / "cache") / "package" / "inside").read_text() == "inside"
    some = unpacked(replace(pin, take=("package/in*",)), tmp_path / "cache")
    assert [path.name for path in (some / "package").iterdir()] == ["inside"]
    with pytest.raises(FetchError, match="has none of nothing/\\*"):
        unpacked(replace(pin, take=("nothing/*",)), tmp_path / "cache")


def test_an_archive_inside_is_unpacked_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "x.aar", "w") as archive:
        archive.writestr("classes.jar", "classes")
        archive.writestr("res/x", "x")
    content, pin = packed(tmp_path, {"package/x.aar": (tmp_path / "x.aar").read_bytes(), "package/y": b"y"})
    serve(monkeypatch, PIN.file, content)
    folder = unpacked(replace(pin, inside="package/x.aar", take=("classes.jar",)), tmp_path / "cache")
    assert [path.name for path in folder.iterdir()] == ["classes.jar"]


def test_sizes_are_those_of_the_files(tools: core.Toolchain) -> None:
    """Of all that this machine has; what `core` needs at least."""
    seen = [pin for pin in read_pins() if (cache_folder() / pin.folder).is_dir()]
    assert set(needed_by("core", read_pins())) <= set(seen)
    for pin in seen:
        if (archive := cache_folder() / pin.file).is_file():
            assert archive.stat().st_size == pin.size, pin.name
        assert store.size_of(cache_folder() / pin.folder) == pytest.approx(pin.unpacked, rel=0.25), pin.name


def provide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *pins: Pin) -> Path:
    """Let these be the lock, with a cache of their own."""
    monkeypatch.setattr(store, "read_pins", lambda: list(pins))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_download_is_announced_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, pin = packed(tmp_path, {"package/inside": bytes(3_000_000)})
    cache = provide(monkeypatch, tmp_path, replace(pin, unpacked=3_000_000))
    said: list[str] = []

    def client(pin: Pin, folder: Path) -> None:
        said.append(capsys.readouterr().err)
        (folder / pin.file).write_bytes(content)

    monkeypatch.setitem(clients.CLIENTS, "npm", client)
    assert store.provided("core") == {"thing": cache / pin.folder}
    (first,) = said
    assert "1 package, 0 MB; with what is unpacked of them 3 MB" in first and str(cache) in first
    assert "thing 1.0 (npm): 0.0 MB, unpacked 3.0 MB" in first
    assert "android_demo.ci clean" in first and CACHE_VARIABLE in first
    assert capsys.readouterr().err == f"fetched {pin.file}\n"
    store.provided("core")
    assert capsys.readouterr().err == "" and len(said) == 1
    (cache / pin.file).unlink()  # what is unpacked is enough
    store.provided("core")
    assert len(said) == 1


def test_a_full_disk_is_found_out_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(monkeypatch, PIN.file, CONTENT)
    provide(monkeypatch, tmp_path, replace(PIN, unpacked=10**18))
    with pytest.raises(FetchError, match=f"MB free and .* are wanted; make room .* {CACHE_VARIABLE}"):
        store.provided("core")
    assert asked == []


def test_clean_removes_what_was_fetched_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, pin = packed(tmp_path, {"package/inside": b"inside"})
    serve(monkeypatch, PIN.file, content)
    cache = provide(monkeypatch, tmp_path, pin)
    assert store.clean(cache) == 0
    store.provided("core")
    (cache / "thing-0.9-01234567").mkdir()  # of an older lock
    (cache / "thing-0.9.tgz").write_bytes(bytes(100))
    (cache / ".fetch-left").mkdir()
    (cache / "thing-mine").mkdir()
    assert store.clean(cache) == len(content) + len(b"inside") + 100
    assert [path.name for path in cache.iterdir()] == ["thing-mine"]
    (cache / "thing-mine").rmdir()
    store.clean(cache)
    assert not cache.exists()
