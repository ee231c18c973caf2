"""Commands without --bundle and --server: the default pair, made once in the cache, both ends in one process.

Most tests put a tiny pair in the default one's place. Where a fault is the machine's, it is a real one: a disk that is
full, a home that is mounted read-only, a process without a network.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloud.telemetry.progress import Bar
from export.bundle import bundle as bundles
from export.bundle.bundle_options import BundleOptions
from export.bundle.export_target import ExportTarget
from export.bundle.plan import make_plan
from outrider.cli import default_bundle, main
from outrider.cli.arguments import parse
from outrider.cli.options import ChatOptions, GenerateOptions
from outrider_core import cache as caches
from outrider_core.cache import cache_dir
from outrider_core.drafting.bundle import open_bundle
from outrider_core.targets.bundle import open_target_bundle
from outrider_core.targets.source import TargetSource
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]
ASK = ["generate", "--max-tokens", "8", "Why is the sky blue?"]
MADE = "making the default bundle"
FULL = "free some space there, or name another folder with OUTRIDER_CACHE"

#: starts a process in namespaces of its own, which some machines do not permit
ISOLATED = ("unshare", "--map-root-user", "--mount", "--net")
#: a process that runs commands, and Python in between, as lines of JSON ask for; it prints what they gave as JSON
WORKER = """
import io, json, os, subprocess, sys, threading, time, urllib.request
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import export.bundle.plan as plan
from outrider.cli import default_bundle, main

requests, target, drafter = sys.stdin, sys.argv[1], Path(sys.argv[2])
default_bundle.DEFAULT_TARGET, default_bundle.default_drafter = target, lambda: drafter
default_bundle.COPY_BYTES = default_bundle.REST_BYTES = 0
plan.lacking = lambda *sizes: ""  # a disk is to become full while it is written to
for line in requests:
    request = json.loads(line)
    exec(request.get("first", ""), globals())
    os.environ.update(request["environment"])
    sys.stdin = os.fdopen(globals().pop("typed", None) or os.open(os.devnull, os.O_RDONLY))
    status = None
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            status = main(request["arguments"])
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            print(repr(error), file=sys.stderr)
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


class Reply(NamedTuple):
    """What a command gave: exit status, standard output, standard error."""

    status: int | None
    out: str
    err: str

    @property
    def text(self) -> str:
        """The answer, where there was one and nothing failed."""
        assert self.status == 0 and "Traceback" not in self.err, self
        return self.out

    @property
    def fault(self) -> str:
        """The one line that says what failed, behind notes on what was begun."""
        *notes, line = self.err.splitlines()
        assert self.status == 1 and self.out == "" and line.startswith("error: "), self
        assert all(note.startswith("making ") for note in notes), self
        return line


class Worker:
    """A process of its own. isolated: it has mounts and a network of its own too."""

    def __init__(self, folders: tuple[Path, Path, Path]) -> None:
        self.isolated = shutil.which("unshare") is not None and not subprocess.run([*ISOLATED, "true"]).returncode
        prefix = ISOLATED if self.isolated else ()
        command = [*prefix, sys.executable, "-c", WORKER, str(folders[0]), str(folders[1])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)

    def begin(self, arguments: list[str], cache: str | Path, *, first: str = "", **environment: str) -> None:
        """Run a command there; first: Python that runs before it, and may set `typed`, a file for standard input."""
        assert self.process.stdin
        values = {"OUTRIDER_CACHE": str(cache), **environment}
        self.process.stdin.write(json.dumps({"arguments": arguments, "environment": values, "first": first}) + "\n")
        self.process.stdin.flush()

    def end(self) -> Reply:
        """Wait for what was begun."""
        assert self.process.stdout
        return Reply(*json.loads(self.process.stdout.readline()))

    def run(self, arguments: list[str], cache: str | Path, *, first: str = "", **environment: str) -> Reply:
        self.begin(arguments, cache, first=first, **environment)
        return self.end()


@pytest.fixture(scope="module")
def worker(folders: tuple[Path, Path, Path]) -> Iterator[Worker]:
    worker = Worker(folders)
    with worker.process:
        yield worker
        assert worker.process.stdin
        worker.process.stdin.close()


@pytest.fixture
def isolated(worker: Worker) -> Worker:
    if not worker.isolated:
        pytest.skip("user namespaces are not permitted here, or there is no unshare")
    return worker


@pytest.fixture(scope="module")
def ask(folders: tuple[Path, Path, Path]) -> list[str]:
    return ["generate", "--model", str(folders[0]), "--drafter", str(folders[1]), "--max-tokens", "8", "w5 w6"]


@pytest.fixture(scope="module")
def filled(worker: Worker, ask: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache that a first start has filled, and the answer."""
    cache = tmp_path_factory.mktemp("filled")
    return cache, worker.run(ask, cache).text


@pytest.fixture
def start(
    folders: tuple[Path, Path, Path],
    ask: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[], Reply]:
    """Ask the tiny pair in this process, with the cache in `tmp_path`."""
    monkeypatch.setattr(default_bundle, "DEFAULT_TARGET", str(folders[0]))
    monkeypatch.setattr(default_bundle, "default_drafter", lambda: folders[1])
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))

    def start() -> Reply:
        capsys.readouterr()
        status = main(ask)
        while caches._held:  # which the end of the command's process would do
            os.close(caches._held.popitem()[1])
        return Reply(status, *capsys.readouterr())

    return start


def check_whole(cache: Path) -> None:
    """Whatever has its final name is complete."""
    for folder in cache.glob("bundles/[!.]*"):
        open_bundle(folder)
    for folder in cache.glob("target-bundles/[!.]*"):
        open_target_bundle(folder)


def test_two_starts_at_once_make_it_once(
    worker: Worker, start: Callable[[], Reply], ask: list[str], filled: tuple[Path, str], tmp_path: Path
) -> None:
    """What the bundle's understudy is lies on the disk once, and another start makes nothing."""
    cache = tmp_path / "cache"
    shutil.copytree(filled[0] / "target-bundles", cache / "target-bundles")
    worker.begin(ask, cache)
    ours, other = start(), worker.end()
    assert ours.text == other.text == filled[1]
    assert (ours.err + other.err).count(MADE) == 1
    [data], [copy] = cache.glob("bundles/*/understudy/target.onnx.data"), cache.glob("target-bundles/*/*.data")
    assert data.samefile(copy)
    made = data.stat().st_mtime_ns
    again = start()
    assert again.text == ours.text and "making" not in again.err and data.stat().st_mtime_ns == made


@pytest.mark.parametrize("free", [8, 24, 72, 96, 112])
def test_a_disk_that_is_full_while_the_bundle_is_made(
    free: int, isolated: Worker, ask: list[str], filled: tuple[Path, str], tmp_path: Path
) -> None:
    """The copy is there, and so many kilobytes are left for the rest."""
    disk = tmp_path / "disk"
    disk.mkdir()
    fill = f"""
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", {str(disk)!r}], check=True)
subprocess.run(["cp", "-r", {str(filled[0] / "target-bundles")!r}, {str(disk)!r}], check=True)
found = os.statvfs({str(disk)!r})
Path({str(disk / "fill")!r}).write_bytes(bytes(found.f_bavail * found.f_frsize - {1024 * free}))
"""
    fault = isolated.run(ask, disk, first=fill).fault
    assert "No space left on device" in fault and FULL in fault
    left = f"assert not [path for path in Path({str(disk / 'bundles')!r}).iterdir() if path.is_dir()]"
    assert isolated.run(ask, disk, first=f"{left}\nPath({str(disk / 'fill')!r}).unlink()").text == filled[1]


def test_a_disk_that_is_full_while_the_target_is_copied(isolated: Worker, ask: list[str], tmp_path: Path) -> None:
    mount = f'subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", {str(tmp_path)!r}], check=True)'
    fault = isolated.run(ask, tmp_path, first=mount).fault
    assert "No space left on device" in fault and FULL in fault


def test_too_little_space_is_said_before_anything_is_made(
    start: Callable[[], Reply], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_bundle, "COPY_BYTES", shutil.disk_usage(tmp_path).total)
    reply = start()
    assert "making the default bundle needs" in reply.fault and len(reply.err.splitlines()) == 1
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_an_understudy_that_is_a_hard_link_takes_no_disk(
    folders: tuple[Path, Path, Path], filled: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetSource.resolve(str(folders[0]))
    options = BundleOptions(target=target, drafter=folders[1], output_dir=tmp_path / "bundle", compare=False)

    def disk(cache: Path, understudy: TargetSource | None) -> int:
        monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
        return make_plan(replace(options, understudy=understudy), ExportTarget.open(target), folders[1]).disk_bytes

    assert disk(filled[0], target) == disk(filled[0], None) < disk(tmp_path, target)


def test_a_home_that_is_read_only(
    isolated: Worker, ask: list[str], folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Nothing can be made there; with a bundle everything works."""
    mount = f"""
subprocess.run(["mount", "--bind", {str(tmp_path)!r}, {str(tmp_path)!r}], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", {str(tmp_path)!r}], check=True)
"""
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    fault = isolated.run(ask, "", first=mount, **home).fault
    assert "Read-only file system" in fault and "OUTRIDER_CACHE" in fault
    alone = ["--bundle", str(folders[2]), "--max-tokens", "4"]
    for arguments in (["generate", *alone, "w5"], ["chat", *alone], ["models"], ["doctor"]):
        assert isolated.run(arguments, "", first=TYPED, **home).text
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home(
    start: Callable[[], Reply], filled: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Has a cache among the temporary files."""
    for name in ("HOME", "OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = cache_dir()
    assert cache.parent == tmp_path and cache.stat().st_mode & 0o777 == 0o700
    shutil.copytree(filled[0] / "target-bundles", cache / "target-bundles")
    assert MADE in start().err and [*cache.glob("bundles/*/manifest.json")]
    assert "making" not in start().err


#: what a chat of the worker reads
TYPED = "typed = os.memfd_create('typed'); os.write(typed, b'w5\\n/model\\n'); os.lseek(typed, 0, 0)"
#: brings up the loopback interface of a network namespace, which any machine has
LOOPBACK = """
import errno, fcntl, socket, struct
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sH14x", b"lo", 1))
    assert probe.connect_ex(("192.0.2.1", 80)) == errno.ENETUNREACH
"""
#: asks what is served, then ends it as Ctrl-C does
CLIENT = """
def ask_the_server():
    while "/v1" not in err.getvalue() + out.getvalue():
        time.sleep(0.01)
    model, _, address, *_ = (err.getvalue() + out.getvalue()).split()
    body = {"model": model, "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "w5 w6"}]}
    question = urllib.request.Request(address + "/chat/completions", json.dumps(body).encode())
    question.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(question) as answer:
            print(json.load(answer)["choices"][0]["message"]["content"], file=out)
    finally:
        os.kill(os.getpid(), 2)
client = threading.Timer(0.1, ask_the_server)
client.start()
"""


def test_without_a_network_everything_works(isolated: Worker, ask: list[str], filled: tuple[Path, str]) -> None:
    """In a network namespace that has no route to anywhere, with the cache that a first start has filled."""
    cache, answer = filled
    pair = ask[1:7]
    assert isolated.run(ask, cache, first=LOOPBACK).text == answer
    chatted = isolated.run(["chat", *pair], cache, first=TYPED)
    assert chatted.text and "verifier: in this process" in chatted.err
    assert "target-bundles" in isolated.run(["models"], cache).text
    assert "all hashes right" in isolated.run(["doctor"], cache).text.replace("\n", " ")
    served = isolated.run(["serve", "--port", "0", *pair[:4]], cache, first=CLIENT)
    assert answer.strip() in served.text


DAMAGED = {
    "drafter": ("bundles/*/drafter.onnx", b"\0"),
    "manifest": ("bundles/*/manifest.json", b"{"),
    "target": ("target-bundles/*/target.onnx.data", b"\0"),
    "target's manifest": ("target-bundles/*/manifest.json", b"[]"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_cache_is_one_line_that_says_what_to_do(
    what: str, start: Callable[[], Reply], filled: tuple[Path, str], tmp_path: Path
) -> None:
    cache = shutil.copytree(filled[0], tmp_path / "cache")
    [file] = cache.glob(DAMAGED[what][0])
    file.write_bytes(DAMAGED[what][1])
    reply = start()
    assert len(reply.err.splitlines()) == 1 and str(file.parent) in reply.fault
    if "outrider models rm" in reply.fault:
        assert main(["models", "rm", file.parent.name, "--yes"]) == 0
    else:
        assert "delete this folder" in reply.fault
        shutil.rmtree(file.parent)
    assert start().text == filled[1]


def test_what_an_unfinished_start_has_left_does_no_harm(
    start: Callable[[], Reply], filled: tuple[Path, str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for folder in (*filled[0].glob("bundles/[!.]*"), *filled[0].glob("target-bundles/[!.]*")):
        identity = "".join(f".{part}" for part in folder.name.split("-")[1:-1])
        aside = cache / folder.parent.name / f".{folder.name}{identity}.partial"
        (aside / "work").mkdir(parents=True)
        for name in ("manifest.json", "drafter.onnx", "target.onnx.data", "work/key"):
            (aside / name).write_bytes(b"junk")
    (cache / "hashes.json").write_text("junk")
    assert start().text == filled[1]
    check_whole(cache)


#: phase -> where Ctrl-C meets it
PHASES = {
    "copying": (Bar, "step"),
    "writing the bundle": (bundles, "write_onnx"),
    "linking the understudy": (bundles, "write_understudy"),
    "putting the bundle in place": (bundles, "put_in_place"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_leaves_nothing_half_made(
    phase: str, start: Callable[[], Reply], filled: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PHASES[phase]
    cache, done = tmp_path / "cache", getattr(owner, name)
    if phase != "copying":
        shutil.copytree(filled[0] / "target-bundles", cache / "target-bundles")

    def interrupted(*arguments: Any, **options: Any) -> Any:
        done(*arguments, **options)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        reply = start()
    assert reply.status == 130 and reply.out == ""
    *notes, last = reply.err.splitlines()
    assert last == "interrupted; the next start continues from here" and all("making" in note for note in notes)
    check_whole(cache)
    assert start().text == filled[1]


@pytest.mark.slow
def test_the_real_default_pair_is_made_once_and_as_large_as_is_said(tmp_path: Path) -> None:
    """Two starts at once, from an empty cache, and one more; the first is interrupted by Ctrl-C and continues."""

    def begin() -> subprocess.Popen[str]:
        environment, pipe = {**os.environ, "OUTRIDER_CACHE": str(tmp_path)}, subprocess.PIPE
        command = [sys.executable, "-m", "outrider", *ASK]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)

    first = begin()
    assert first.stderr and MADE in first.stderr.readline() and "making an 8-bit copy" in first.stderr.readline()
    first.send_signal(signal.SIGINT)
    assert first.communicate(timeout=HANG)[1].endswith("interrupted; the next start continues from here\n")
    assert first.returncode == 130 and not [*tmp_path.glob("*/[!.]*")]
    both = [begin() for _ in range(2)]
    told = [process.communicate(timeout=10 * HANG) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    (text, other), notes = [out for out, _ in told], [err for _, err in told]
    assert text == other and len(text.split()) > 3 and sum(MADE in each for each in notes) == 1
    again = begin()
    out, err = again.communicate(timeout=HANG)
    assert again.returncode == 0 and out == text and "making" not in err
    claimed = default_bundle.COPY_BYTES + default_bundle.REST_BYTES
    sizes = {(found.st_dev, found.st_ino): found.st_size for path in tmp_path.rglob("*") if (found := path.stat())}
    assert 0.95 * claimed < sum(sizes.values()) < 1.05 * claimed


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
