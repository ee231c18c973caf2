"""Folders of programs: without a home, with another user's cache, a read-only folder, a full disk."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider_core.cache import cache_dir, expanded
from outrider_core.targets.gguf_tokenizer import write_tokenizer
from outrider_core.targets.source import TargetSource
from outrider_core.targets.weights import GgufWeights
from tests.cloud.running import ENVIRONMENT, ROOT, save_folder
from tests.waiting import HANG

NOBODY = 54321
root_alone = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models, readable to everybody."""
    made = save_folder(tmp_path_factory.mktemp("models"))
    for path in (made, *made.parents):
        if path != Path("/") and path.stat().st_uid == os.getuid():
            path.chmod(path.stat().st_mode | 0o055)
    for path in made.rglob("*"):
        path.chmod(path.stat().st_mode | 0o044 | (0o011 if path.is_dir() else 0))
    return made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk that is nearly full."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def environment(**values: str) -> dict[str, str]:
    homeless = {name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "XDG_CACHE_HOME", "USER")}
    return {**{name: value for name, value in homeless.items() if name != "OUTRIDER_CACHE"}, **values}


def verifier(folder: Path, variables: dict[str, str], *before: str) -> tuple[bool, str]:
    """(whether it was ready to serve, what it wrote on standard error). before: what runs it."""
    models = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter"), "--port", "0"]
    limits = ["--max-model-len", "128", "--max-nodes", "16", "--kv-tokens", "1024"]
    command = [*before, sys.executable, "-m", "cloud.verifier", *models, *limits]
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    ready = "verifier ready" in process.stdout.readline()
    if ready:
        process.terminate()
    errors = process.communicate(timeout=HANG)[1]
    assert process.returncode == (0 if ready else 2) and "Traceback" not in errors, errors
    return ready, errors


def somebody(*capabilities: str) -> list[str]:
    """Runs a command as a user who is in no list of users, and may at most what `capabilities` say."""
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    sets = ",".join(f"+{each}" for each in capabilities) or "-all"
    user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    return ["setpriv", *user, "--inh-caps", sets, "--ambient-caps", sets]


@root_alone
def test_a_user_without_a_home_has_a_place(folder: Path, tmp_path: Path) -> None:
    """As in a container with a user of its own: neither HOME nor an entry in the list of users."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    reader = somebody("dac_read_search")  # of this test's own interpreter
    ready, _ = verifier(folder, environment(TMPDIR=str(shared)), *reader)
    place = shared / f"outrider-{NOBODY}"
    assert ready and list((place / "target-bundles").iterdir())
    assert place.stat().st_uid == NOBODY and stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(0o777)
    ready, errors = verifier(folder, environment(TMPDIR=str(shared)), *reader)
    assert not ready and "this user has no home, and others can write there" in errors and "OUTRIDER_CACHE" in errors


def test_a_cache_is_named_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == tmp_path / f"outrider-{os.getuid()}" == cache_dir()
    (tmp_path / f"outrider-{os.getuid()}").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"outrider-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="others can write there"):
        cache_dir()
    for value, wanted in (("/var/cache", Path("/var/cache/outrider")), ("", None), ("relative", None)):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        if wanted:
            assert cache_dir() == wanted
        else:
            with pytest.raises(PermissionError):
                cache_dir()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setattr(Path, "expanduser", lambda path: homeless())
    assert expanded("~/models") == Path("~/models")


@root_alone
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_cache_of_another_user_is_named_or_used(folder: Path, tmp_path: Path, mode: int) -> None:
    """Root has filled it. In a folder that others may enter they find everything; elsewhere they hear what to do."""
    outer = tmp_path / "cache"
    for parent in (tmp_path, *tmp_path.parents[:-1]):
        parent.chmod(parent.stat().st_mode | 0o011)
    script = f"""
import os
from cloud.loading import load_verifier
from cloud.settings import Settings
settings = Settings(model={str(folder / "target")!r}, drafter={str(folder / "drafter")!r}, max_model_len=128,
    max_nodes=16, kv_tokens=1024)
load_verifier(settings)
os.chmod({str(outer)!r}, {mode})
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
try:
    print("ready", load_verifier(settings).arithmetic)
except Exception as error:
    print(type(error).__name__, error)
"""
    variables = environment(OUTRIDER_CACHE=str(outer), HOME="/nonexistent")
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=variables, capture_output=True, text=True)
    found = [path for path in outer.rglob("*") if not path.name.endswith(".lock")]
    assert found and all(path.stat().st_mode & 0o444 == 0o444 for path in found), found
    if mode == 0o755:
        assert "ready onnx-8-v" in run.stdout, run.stdout + run.stderr
    else:
        assert "TargetError" in run.stdout and "Permission denied" in run.stdout, run.stdout + run.stderr
        assert "name another folder" in run.stdout and "OUTRIDER_CACHE" in run.stdout


@root_alone
def test_a_folder_that_is_read_only_is_named(folder: Path) -> None:
    ready, errors = verifier(folder, environment(OUTRIDER_CACHE="/proc/outrider"))
    assert not ready and "/proc/outrider" in errors and "OUTRIDER_CACHE" in errors


@root_alone
def test_a_full_disk_is_named(folder: Path, small: Path) -> None:
    ready, errors = verifier(folder, environment(HOME="/", OUTRIDER_CACHE=str(small)))
    assert not ready and "No space left on device; free some space there" in errors
    assert [path.name for path in (small / "target-bundles").iterdir() if not path.name.endswith(".lock")] == []


@root_alone
def test_a_disk_that_is_full_for_a_tokenizer_is_an_error_of_the_system(small: Path) -> None:
    """The tokenizers package raises a bare Exception, which nothing could tell from a fault of ours."""
    source = TargetSource.resolve()
    if not source.path.is_file():
        pytest.skip("the default target's file is not installed")
    with pytest.raises(OSError, match="No space left"):
        write_tokenizer(GgufWeights(source.path).fields, small)
