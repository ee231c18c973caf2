"""Nothing dies silently: whatever breaks in a verifier's process, it answers on or ends with a message and a status."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from export.bundle.verifier_process import free_port
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_GOING_AWAY, ERR_INTERNAL, Error, Generate, Open, Opened, Verdict, pack_ids
from tests.cloud.drive import Client
from tests.cloud.running import ENVIRONMENT, PROMPT, ROOT, TRUTH, Running, running, save_folder
from tests.tiers import first
from tests.waiting import HANG, until

BROKEN = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("endings"))


def expect_answers(server: Running) -> None:
    with server.client() as client:
        client.open(PROMPT)
        assert client.verify(1, 3, TokenTree.chain(TRUTH[:2])).bonus == TRUTH[2]
    assert httpx.get(f"http://{server.address}/healthz").text == "alive\n"
    assert httpx.get(f"http://{server.address}/readyz").text == "ready\n"


def ended(server: Running, seconds: float = HANG) -> int:
    server.process.communicate(timeout=seconds)
    return int(server.process.returncode)


def test_a_full_disk_under_the_log_ends_nothing(folder: Path) -> None:
    with running(folder) as server:
        size = server.log.stat().st_size
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        expect_answers(server)
        assert until(lambda: server.metric("outrider:log_lines_dropped_total") >= 1)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        expect_answers(server)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0
    lines = server.log.read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "ending" and json.loads(lines[-2])["event"] == "session opened"


def test_a_stderr_that_nobody_reads_any_more_ends_nothing(folder: Path) -> None:
    reading, writing = os.pipe()
    with running(folder, stderr=writing) as server:
        os.close(writing)
        os.close(reading)
        expect_answers(server)
        assert until(lambda: server.metric("outrider:log_lines_dropped_total") >= 1)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0


def test_a_stalled_stderr_holds_nobody_up(folder: Path) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with running(folder, stderr=writing) as server:
        os.close(writing)
        clients = [server.client() for _ in range(10)]
        for at in range(1300):  # more lines than wait at most
            clients[at % 10].open(PROMPT)
        expect_answers(server)
        assert server.metric("outrider:log_lines_dropped_total") > 0
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0
    os.close(reading)


def test_closed_standard_streams_are_given_a_place(folder: Path) -> None:
    """With 0 to 2 closed, the next files and sockets would get these numbers, and then what is logged."""
    port = free_port()
    model = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter"), "--port", str(port)]
    command = shlex.join([sys.executable, "-m", "cloud.verifier", *model])
    process = subprocess.Popen(["bash", "-c", f"exec {command} <&- >&- 2>&-"], cwd=ROOT, env=ENVIRONMENT)
    try:
        assert until(lambda: answers(f"http://127.0.0.1:{port}/readyz"))
        assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)} == {os.devnull}
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("fault", ["fail", "die", "hang"])
def test_a_broken_engine_ends_the_process(folder: Path, tmp_path: Path, fault: str) -> None:
    seconds = 3 if fault == "hang" else HANG
    limits = {"cloud.engine.batcher.MAX_STEP_FAILURES": 4, "cloud.engine.batcher.MAX_STEP_SECONDS": seconds}
    with running(folder, constants=limits, fault=tmp_path / "fault") as server:
        expect_answers(server)
        client = server.client()
        (tmp_path / "fault").write_text(fault)
        with contextlib.suppress(ConnectionClosed):
            for _ in range(4):
                fail_a_step(client)
        assert ended(server) == BROKEN
    says = {
        "fail": "4 steps in a row failed",
        "die": "the engine thread ended: Death",
        "hang": "the engine hangs in a step",
    }
    events = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    broken = next(event for event in events if event["event"].startswith("broken"))
    assert broken["why"] == says[fault] and broken["status"] == BROKEN


def test_a_failed_step_is_counted_and_a_good_one_forgets_it(folder: Path, tmp_path: Path) -> None:
    limits = {"cloud.engine.batcher.MAX_STEP_FAILURES": 3}
    with running(folder, constants=limits, fault=tmp_path / "fault") as server:
        for failures in (2, 4, 6):
            (tmp_path / "fault").write_text("fail")
            with server.client() as client:
                fail_a_step(client)
                fail_a_step(client)
            (tmp_path / "fault").write_text("")
            expect_answers(server)
            assert server.metric("outrider:step_failures_total") == failures


@pytest.mark.parametrize("state", first(1, ["draining", "loading", "ready"]))
def test_sighup_ends_no_state(folder: Path, tmp_path: Path, state: str) -> None:
    """systemd takes an end by SIGHUP for a clean one, and starts nothing again."""
    with running(folder, "--shutdown-timeout", "30", step_ms=200, wait=state != "loading") as server:
        process = server.process
        assert until(lambda: handles(process.pid, signal.SIGHUP))
        drawn = list[int]()
        if state == "draining":
            client = server.client()
            client.open(PROMPT)
            client.send(Generate(0, 1, len(PROMPT), 5))
            while not drawn:  # the answer is under way
                if isinstance(message := client.any(), Verdict):
                    drawn.append(message.bonus)
            process.send_signal(signal.SIGTERM)
            assert until(lambda: "ending" in server.log.read_text())
        process.send_signal(signal.SIGHUP)
        if state == "loading":
            assert process.stdout and "verifier ready" in process.stdout.readline()
        if state == "draining":
            while len(drawn) < 5:  # ERROR 9 comes in between
                if isinstance(message := client.any(), Verdict):
                    drawn.append(message.bonus)
            assert drawn == TRUTH[:5]
        else:
            assert until(lambda: "nothing to reload" in server.log.read_text())
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        assert ended(server) == 0


@pytest.mark.parametrize("state", ["loading", "ready", "hanging", "broken", "requests under way"])
def test_sigterm_ends_every_state_in_bounded_time(folder: Path, tmp_path: Path, state: str) -> None:
    """At most the shutdown timeout and eight seconds, whatever hangs."""
    fault = tmp_path / "fault"
    with running(folder, "--shutdown-timeout", "1", fault=fault, wait=state != "loading") as server:
        statuses = {0}
        assert until(lambda: handles(server.process.pid, signal.SIGTERM))
        if state == "requests under way":
            half = socket.create_connection(server.address.split(":"))  # type: ignore[arg-type]
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        if state in ("hanging", "broken"):
            fault.write_text("hang" if state == "hanging" else "die")
            server.client().send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling()))
            time.sleep(0.3)
            statuses.add(BROKEN)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, 1 + 8 + 60) in statuses  # the minute: a busy machine


@pytest.mark.parametrize("called", ["Config.load", "server.asyncio_run"], ids=["taken", "not taken yet"])
def test_sigterm_between_the_ready_line_and_the_first_request(folder: Path, called: str) -> None:
    """Whether uvicorn has taken the signals and configures itself, or is only about to: it ends without a word."""
    code = (
        "import os, signal, sys, uvicorn.server\n"
        "from cloud import verifier\n"
        f"uvicorn.{called} = lambda *_, **options: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(verifier.main(sys.argv[1:]))\n"
    )
    process = by_code(folder, code)
    assert process.returncode == 0 and "verifier ready" in process.stdout, process.stderr
    assert "Warning" not in process.stderr


@pytest.mark.parametrize(
    "called", first(1, ["loading.load_verifier", "uvicorn.Config.load", "uvicorn.server.asyncio_run"])
)
def test_sigterm_whose_exit_is_swallowed(folder: Path, called: str) -> None:
    """Some libraries catch whatever an optional import raises, and Python what is raised in a callback of its own: the
    verifier ends all the same, once it has loaded or is about to serve."""
    code = (
        "import os, signal, sys, time, uvicorn.server\n"
        "from cloud import loading, verifier\n"
        f"original = {called}\n"
        "def swallowing(*arguments, **options):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(10)\n"
        "    except BaseException:\n"
        "        return original(*arguments, **options)\n"
        f"{called} = swallowing\n"
        "sys.exit(verifier.main(sys.argv[1:]))\n"
    )
    process = by_code(folder, code)
    assert process.returncode == 0, process.stderr
    assert ("verifier ready" in process.stdout) == (called != "loading.load_verifier"), process.stderr


@pytest.mark.parametrize("error", ["ImportError", "loading.TargetError"])
def test_sigterm_whose_exit_becomes_an_error(folder: Path, error: str) -> None:
    """As when it comes while a C extension is being imported, which then fails to load."""
    code = (
        "import os, signal, sys, time\n"
        "from cloud import loading, verifier\n"
        "def failing(*arguments, **options):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(10)\n"
        "    except SystemExit as exit:\n"
        f"        raise {error}('initialization failed') from exit\n"
        "loading.load_verifier = failing\n"
        "sys.exit(verifier.main(sys.argv[1:]))\n"
    )
    process = by_code(folder, code)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def by_code(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """The verifier as this program runs it, until it ends."""
    models = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter"), "--port", "0"]
    environment = {**ENVIRONMENT, "OUTRIDER_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", code, *models], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG
    )


def fail_a_step(client: Client) -> None:
    """OPEN a session of its own, which fails."""
    client.send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling()))
    while not isinstance(message := client.any(), Error):
        assert isinstance(message, Opened)
    assert message.code in (ERR_INTERNAL, ERR_GOING_AWAY)


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200
    return False
