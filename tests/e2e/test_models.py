"""`outrider models`: what is listed, what a removal frees, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider_core.cache import try_lock
from tests.waiting import HANG

COPY = "target-bundles/tiny-0123456789abcdef-v7"
PARTIAL = "target-bundles/.tiny-0123456789abcdef-v7.0123456789abcdef.partial"
BUNDLE = "bundles/tiny-fedcba9876543210"
HELD = "import sys; from pathlib import Path; from outrider_core.cache import hold; hold(Path(sys.argv[1]))"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of 3,000 bytes, of which 2,000 are a hard link's; work under way; a file that is not a model's."""
    cache = tmp_path / "cache"
    for folder, size in (
        (COPY, 1000),
        (BUNDLE, 500),
        ("target-bundles/.tiny-0123456789abcdef-v7.0123456789abcdef.partial", 70),
    ):
        (cache / folder).mkdir(parents=True)
        (cache / folder / "own").write_bytes(bytes(size))
    (cache / COPY / "shared").write_bytes(bytes(2000))
    os.link(cache / COPY / "shared", cache / BUNDLE / "shared")
    (cache / "bundles" / "notes").write_text("mine")
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    return cache


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["models", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    return {entry["path"]: entry for entry in shown["models"]} | {"": shown}


def test_sizes_count_a_hard_link_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    copy, bundle = found[str(cache / COPY)], found[str(cache / BUNDLE)]
    assert (copy["kind"], copy["name"], copy["hash"]) == ("8-bit copy", "tiny", "0123456789abcdef")
    assert (copy["bytes"], copy["frees"]) == (3000, 1000)
    assert (bundle["kind"], bundle["bytes"], bundle["frees"]) == ("bundle", 2500, 500)
    assert found[""]["frees"] == 1000 + 500 + 2000 + 70
    assert {entry["kind"] for path, entry in found.items() if path} >= {"target", "drafter", "unfinished"}
    assert not any("notes" in path for path in found)
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert f"{cache / BUNDLE}\n" in shown and "fedcba9876543210" in shown


def test_removing_a_name_frees_all_of_it_and_nothing_else(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "rm", "fedcba98", "--yes"]) == 0
    assert "freed 0.0 MB" in capsys.readouterr().out and not (cache / BUNDLE).exists()
    assert main(["models", "rm", "tiny", "--yes"]) == 0
    left = [path.name for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert left == ["notes"]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("nothing", "there is no 'nothing'"),
        ("012", "there is no '012'"),  # a hash's beginning has four digits at least
        ("notes", "there is no 'notes'"),
        ("smollm2-135m-instruct-moa", "is not in the cache"),
    ],
)
def test_what_is_not_in_the_cache_stays(
    word: str, reason: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "rm", "tiny", word, "--yes"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and reason in line and (cache / COPY).is_dir()


def test_links_to_elsewhere_are_not_followed(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere" / "tiny"
    elsewhere.mkdir(parents=True)
    (elsewhere / "model.safetensors").write_text("precious")
    (cache / "targets").symlink_to(elsewhere.parent)
    (cache / "bundles" / "linked-0123456789abcdef").symlink_to(elsewhere)
    assert not {path for path in listed(capsys) if "targets" in path or "linked" in path}
    assert main(["models", "rm", "tiny", "--yes"]) == 0
    assert (elsewhere / "model.safetensors").read_text() == "precious"


def test_a_removal_asks_first(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "rm", "tiny"]) == 1
    assert "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n" if "0.0 MB? [y/N]" in question else "")
    assert main(["models", "rm", "tiny"]) == 1 and (cache / COPY).is_dir()
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["models", "rm", "tiny"]) == 0 and not (cache / COPY).exists()


@pytest.mark.parametrize("answer", ["Ctrl-D", "removed meanwhile"])
def test_a_removal_without_an_answer_or_a_folder_is_one_line(
    answer: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(question: str) -> str:
        if answer == "Ctrl-D":
            raise EOFError
        shutil.rmtree(cache / COPY)
        return "y"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", reply)
    assert main(["models", "rm", "tiny"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "removed" in line and (cache / BUNDLE).is_dir()


def test_options_may_stand_before_the_names(cache: Path) -> None:
    assert main(["models", "rm", "--yes", "tiny"]) == 0 and not (cache / COPY).exists()


def test_a_removal_that_was_interrupted_twice_can_be_repeated(cache: Path) -> None:
    left = cache / f"{PARTIAL.removesuffix('.partial')}.removed.0123456789abcdef.removed"
    (cache / PARTIAL).rename(left)
    assert main(["models", "rm", "tiny", "--yes"]) == 0 and not left.exists()


def test_a_list_that_a_terminal_cannot_show_or_nobody_reads(cache: Path) -> None:
    (cache / "targets" / "gr\u00f6\u00dfe").mkdir(parents=True)
    command = [sys.executable, "-m", "outrider", "models"]
    shown = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=HANG, check=True
    )
    assert b"gr??e" in shown.stdout and not shown.stderr
    read, write = os.pipe()
    os.close(read)
    unread = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=HANG)
    os.close(write)
    assert unread.returncode == 1 and not unread.stderr


@pytest.mark.parametrize("made", [False, True], ids=["used", "being made"])
def test_what_another_process_uses_or_makes_stays(made: bool, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if made:
        lock = cache / "bundles" / ".tiny-fedcba9876543210.lock"
        lock.touch()
        handle = try_lock(lock)
        assert handle is not None
        assert main(["models", "rm", "tiny", "--yes"]) == 1
        os.close(handle)
    else:
        command = [sys.executable, "-c", f"{HELD}; print(flush=True); input()", str(cache / BUNDLE)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
            assert user.stdout and user.stdout.readline()
            assert main(["models", "rm", "tiny", "--yes"]) == 1
            user.communicate(b"\n", timeout=HANG)
    [line] = capsys.readouterr().err.splitlines()
    assert "another process uses" in line and (cache / COPY / "shared").is_file() and (cache / BUNDLE).is_dir()
    assert main(["models", "rm", "tiny", "--yes"]) == 0 and not (cache / BUNDLE).exists()
