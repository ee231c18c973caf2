"""Commands without --bundle and --server: the default pair, made once in the cache, both ends in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.cli.arguments import parse
from outrider.cli.options import ChatOptions, GenerateOptions
from outrider_core.cache import cache_dir
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]
ASK = ["generate", "--max-tokens", "8", "Why is the sky blue?"]
MADE = "making the default bundle"


def start(cache: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "outrider", *arguments]
    environment = {**os.environ, "OUTRIDER_CACHE": str(cache)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_first_start_makes_what_the_second_one_finds(tmp_path: Path) -> None:
    """Two at once make it once; what the bundle's understudy is lies on the disk once. The target's copy is there."""
    copies = cache_dir() / "target-bundles"
    (tmp_path / "target-bundles").symlink_to(copies)
    both = [start(tmp_path, *ASK) for _ in range(2)]
    told = [process.communicate(timeout=HANG) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    (text, other), notes = [out for out, _ in told], [err for _, err in told]
    assert text == other and len(text.split()) > 3
    assert sum(MADE in each for each in notes) == 1
    [data] = tmp_path.glob("bundles/*/understudy/target.onnx.data")
    targets = [*copies.glob("*/target.onnx.data")]
    assert any(map(data.samefile, targets)) or data.stat().st_dev != targets[0].stat().st_dev
    made = data.stat().st_mtime_ns
    again = start(tmp_path, *ASK)
    out, err = again.communicate(timeout=HANG)
    assert again.returncode == 0 and out == text and MADE not in err and data.stat().st_mtime_ns == made


@pytest.mark.parametrize("place", [".", "bundles", "target-bundles"])
def test_a_cache_that_cannot_be_written_is_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    (cache / place).parent.mkdir(exist_ok=True)
    (cache / place).write_text("a file")
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    assert main(ASK) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "OUTRIDER_CACHE" in line


@pytest.mark.parametrize(
    ("arguments", "in_process"),
    [
        ([], True),
        (["--local", "--bundle", "mine"], True),
        (["--bundle", "mine"], False),
        (["--server", "127.0.0.1:1"], False),
        (["--policy", "device-only"], False),
    ],
)
def test_where_the_full_model_runs(arguments: list[str], in_process: bool) -> None:
    options = parse(["chat", *arguments], "outrider")
    assert isinstance(options, ChatOptions) and options.in_process == in_process


def test_what_the_model_is_may_be_said_without_local() -> None:
    options = parse(["generate", "--dtype", "float32", "hello"], "outrider")
    assert isinstance(options, GenerateOptions) and options.dtype == "float32"


def test_help_begins_with_three_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["outrider", name] for name in ("chat", "generate", "serve")]
