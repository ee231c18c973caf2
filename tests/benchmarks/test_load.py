"""The load generator against real verifiers of a tiny target: its trees, its checks, its figures, its companions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
import torch

from benchmarks import load
from benchmarks.load_device import Answer, Device, Dial, Drafts, Habits, hit_rate, wrong_tokens
from benchmarks.load_report import Memory, Tally, jain, percentiles, resident_bytes, slope
from benchmarks.load_strangers import STRANGERS
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_ORDER, FINISH_EOS, FINISH_NONE, Verdict
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import expected_path, in_chunks, serve
from tests.tiny import plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

LINES = ["w20 w21 w22", "w99 w5", "w7 w8 w9 w10 w11", "w42"]
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("tiny")
    model = tiny_model(seed=5, dtype=torch.float32)
    save_tiny_drafter(root / "drafter", model, save_tiny_target(root / "target", model))
    (root / "prompts.txt").write_text("\n".join(LINES) + "\n")
    return root / "target", root / "drafter"


@pytest.fixture(scope="module")
def address(folders: Folders) -> Iterator[str]:
    settings = Settings(max_model_len=128, max_nodes=24, kv_tokens=2048, max_sessions=32)
    target = load_target(TargetSource.resolve(str(folders[0])), "float64")
    model = torch_model(target, load_drafter(folders[1]), settings)
    with serve(in_chunks(Verifier(model, settings), 32)) as address:
        yield address


def flags(folders: Folders, tmp_path: Path, *more: str) -> list[str]:
    target, drafter = (str(folder) for folder in folders)
    prompts = str(folders[0].parent / "prompts.txt")
    return [
        "--model", target, "--drafter", drafter, "--prompts", prompts, "--json", str(tmp_path / "load.json"),
        "--seconds", "1.5", "--tokens", "24", "--think", "0.05", "--sample", "0.05", *more,
    ]  # fmt: skip


def figures_of(tmp_path: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((tmp_path / "load.json").read_text())
    return figures


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.9, 6.0, 12.0])
def test_the_drawn_depth_has_the_mean_asked_for(mean: float) -> None:
    hit = hit_rate(mean, 12)
    assert sum(hit**level for level in range(1, 13)) == pytest.approx(mean, abs=1e-6)
    drafts = Drafts(12, mean, 199, random.Random(1))
    truth = list(range(20))
    drawn = [len(drafts.tree(truth)[1]) for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, abs=0.15)


def test_trees_hold_the_truth_to_the_drawn_depth_and_nothing_of_it_elsewhere() -> None:
    rng = random.Random(2)
    drafts = Drafts(12, 1.9, 40, random.Random(3))
    shapes = set()
    for _ in range(500):
        truth = [rng.randrange(40) for _ in range(rng.choice([1, 2, 3, 30]))]
        tree, path = drafts.tree(truth)
        assert len(tree) == 12
        assert expected_path(tree, truth + [-1] * 12) == path
        assert len(path) < len(truth)
        shapes.add(tree.parents)
    assert len(shapes) > 100


def test_a_seed_fixes_the_trees() -> None:
    def trees(seed: int) -> list[TokenTree]:
        drafts = Drafts(12, 1.9, 199, random.Random(seed))
        return [drafts.tree(range(20))[0] for _ in range(20)]

    assert trees(7) == trees(7) != trees(8)


def test_a_mean_that_no_tree_has_is_refused() -> None:
    with pytest.raises(ValueError, match="5 accepted tokens a verify do not fit a tree of 4 nodes"):
        Drafts(4, 5, 199, random.Random(0))


def test_every_wrong_verdict_is_found() -> None:
    answer = Answer((5, 6), (10, 11, 12, 3), FINISH_EOS)
    tree, path = TokenTree((10, 50, 11), (-1, -1, 0)), [0, 2]
    right = {"stream": 0, "seq": 1, "base_len": 2, "accepted": bytes(path), "bonus": 12, "finish": 0, "rows": b""}

    def wrong(budget: int = 8, **fields: Any) -> int:
        return wrong_tokens(Verdict(**{**right, **fields}), tree, path, 2, answer, 0, budget)

    assert wrong() == 0
    assert wrong(bonus=13) == 1
    assert wrong(accepted=bytes([1])) == 2  # 50 where 10 is true, then 12 where 11 is
    assert wrong(accepted=bytes([0, 2, 9])) == 2  # a node that the tree has not
    assert wrong(accepted=bytes([0]), bonus=11) == 1  # true, but the tree held it: the walk stopped too early
    assert wrong(accepted=bytes([0]), bonus=11, budget=2) == 0  # unless the tree was pruned
    assert wrong(accepted=bytes([0]), bonus=12, budget=2) == 1
    assert wrong(base_len=3) == 1
    assert wrong(finish=FINISH_EOS) == 1
    end = Verdict(0, 2, 5, b"", 3, FINISH_EOS, b"")
    assert wrong_tokens(end, TokenTree(), [], 5, answer, 3, 8) == 0
    assert wrong_tokens(Verdict(0, 2, 5, b"", 3, FINISH_NONE, b""), TokenTree(), [], 5, answer, 3, 8) == 1


def test_summary_of_known_verdicts() -> None:
    tally = Tally([0, 0])
    verdict = Verdict(0, 1, 5, bytes([0, 1]), 9, 0, b"", queue_us=2000, engine_us=5000)
    tally.verdict(0, verdict, 9.0, first=False)  # before counting
    tally.counting = True
    tally.verdict(0, verdict, 0.5, first=True)
    for seconds in (0.010, 0.020, 0.030):
        tally.verdict(1, verdict, seconds, first=False)
    tally.error("error 6")
    summary = tally.summary(2.0)
    assert (summary["tokens"], summary["tokens_per_second"], summary["rounds"]) == (12, 6.0, 4)
    assert summary["rounds_per_second"] == 2.0 and summary["accepted_per_verify"] == 2.0
    assert summary["verify_ms"] == {"p50": 20.0, "p95": 29.0, "p99": 29.8}
    assert summary["first_verdict_ms"]["p50"] == 500.0
    assert summary["queue_ms"]["p50"] == 2.0 and summary["engine_ms"]["p99"] == 5.0
    assert summary["fairness_max_over_min"] == 3.0 and summary["fairness_jain"] == pytest.approx(0.8)
    assert summary["errors"] == {"error 6": 1}
    assert percentiles([]) is None
    assert jain([1, 1, 1]) == 1 and jain([1, 0]) == 0.5


def test_memory_of_this_process_and_its_slope() -> None:
    before = resident_bytes(os.getpid())
    block = bytearray(os.urandom(1 << 20)) * 64
    assert resident_bytes(os.getpid()) - before > 60 << 20
    del block
    memory = Memory(os.getpid(), 1.0)
    memory.samples = [(100.0 + t, 1_000_000 * (50 + t)) for t in range(10)]
    summary = memory.summary(102.0)
    assert summary is not None
    assert (summary["start_mb"], summary["end_mb"], summary["most_mb"]) == (52, 59, 59)
    assert summary["mb_per_minute"] == summary["mb_per_minute_second_half"] == pytest.approx(60)
    assert slope([(0, 1), (1, 2)]) is None
    with pytest.raises(OSError):
        resident_bytes(2**22 + 1)


def test_a_run_against_a_verifier_that_runs(address: str, folders: Folders, tmp_path: Path) -> None:
    assert load.main(flags(folders, tmp_path, "--address", address, "--devices", "1,3", "--pid", str(os.getpid()))) == 0
    figures = figures_of(tmp_path)
    assert [phase["devices"] for phase in figures["phases"]] == [1, 3]
    for phase in figures["phases"]:
        assert phase["tokens"] == sum(phase["tokens_by_device"]) > 0
        assert phase["errors"] == {} and phase["wrong_tokens"] == 0
        assert phase["tokens"] >= phase["rounds"] * phase["accepted_per_verify"] > 0
        assert phase["verify_ms"]["p50"] <= phase["verify_ms"]["p95"] <= phase["verify_ms"]["p99"]
        assert phase["engine_ms"]["p50"] < phase["verify_ms"]["p50"]
        assert phase["memory"]["end_mb"] > 50 and len(phase["memory"]["samples"]) > 0
    assert min(figures["phases"][1]["tokens_by_device"]) > 0


def test_the_recorded_truth_is_plain_decoding(address: str, folders: Folders) -> None:
    target = load_target(TargetSource.resolve(str(folders[0])), "float64")
    drafter_hash = load_drafter(folders[1])[2]
    dial = Dial(f"ws://{address}/v1/verify", target.model_hash, drafter_hash)
    answer = asyncio.run(load.record(dial, [1, 20, 21], 30))
    assert list(answer.truth) == plain_decode(target.model, [1, 20, 21], Sampling(), 30)


def test_one_wrong_token_makes_the_exit_status_1(
    address: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verifier is right here and the record wrong, in one token of one answer; it looks the same to a device."""
    record = load.record_all

    async def tampered(*arguments: Any) -> list[Answer]:
        answers = await record(*arguments)
        first = answers[0]
        truth = (*first.truth[:5], first.truth[5] ^ 1, *first.truth[6:])
        return [Answer(first.prompt, truth, first.finish), *answers[1:]]

    monkeypatch.setattr(load, "record_all", tampered)
    assert load.main(flags(folders, tmp_path, "--address", address, "--devices", "1")) == 1
    assert figures_of(tmp_path)["wrong_verdicts"] >= 1
    assert "are not the target's own" in capsys.readouterr().out


def test_the_simulated_delay_is_not_part_of_the_latency(address: str, folders: Folders, tmp_path: Path) -> None:
    more = ("--address", address, "--devices", "1", "--rtt", "1000", "--jitter", "10", "--think", "0", "--seconds", "4")
    assert load.main(flags(folders, tmp_path, *more)) == 0
    phase = figures_of(tmp_path)["phases"][0]
    assert phase["rounds_per_second"] <= 1
    assert phase["verify_ms"]["p50"] < 900  # on a busy machine too


@pytest.mark.parametrize(
    "kind", ["flood", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("slow", "big", "half-open"))]
)
def test_beside_a_hostile_companion(kind: str, address: str, folders: Folders, tmp_path: Path) -> None:
    assert load.main(flags(folders, tmp_path, "--address", address, "--devices", "2", "--bad", kind)) == 0
    alone, beside = figures_of(tmp_path)["phases"]
    assert (alone["bad"], alone["ratios"], alone["companion"]) == (None, None, {})
    assert beside["bad"] == kind and beside["tokens"] > 0
    ratio = beside["verify_ms"]["p50"] / alone["verify_ms"]["p50"]
    assert beside["ratios"]["p50"] == pytest.approx(ratio, rel=0.01)
    counts = beside["companion"]
    at_least = {
        "flood": {"sent Verify": 20, "sent PING": 2, "got Verdict": 1},
        "slow": {"sent Open": 2, "got Opened": 1},
        "big": {"sent Verify": 1, "got Verdict": 1},
        "half-open": {"sent Open": 2},
    }[kind]
    assert all(counts.get(name, 0) >= count for name, count in at_least.items()), counts
    if kind == "half-open":
        assert not any(name.startswith("got") for name in counts)
    allowed = {f"got error {ERR_ORDER}"} if kind == "flood" else set()  # a VERIFY that came after its time
    assert not any(name.startswith("got error") for name in counts.keys() - allowed), counts


@pytest.mark.slow  # so are those of test_hostile.py, which hold more
@pytest.mark.parametrize("kind", STRANGERS)
def test_beside_a_companion_that_holds_things_open(kind: str, address: str, folders: Folders, tmp_path: Path) -> None:
    for seconds in ("3", "12", "48"):  # until a busy machine has come to it
        more = ("--address", address, "--devices", "1", "--bad", kind, "--seconds", seconds)
        if load.main(flags(folders, tmp_path, *more)):
            continue  # a phase ended without a verdict
        _, beside = figures_of(tmp_path)["phases"]
        counts = beside["companion"]
        if beside["tokens"] > 0 and counts["connected"] >= 4 and ("status 400" in counts or kind != "long-prompts"):
            break
    assert beside["bad"] == kind and beside["tokens"] > 0
    assert counts["connected"] >= 4, counts
    assert kind != "long-prompts" or counts["status 400"] >= 1, counts


@contextmanager
def front(upstream: str, tls: ssl.SSLContext, heads: list[bytes]) -> Iterator[int]:
    """Ends TLS before a verifier, as a proxy would; keeps the head of every HTTP request. Yields its port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head)
        up_reader, up_writer = await asyncio.open_connection(*upstream.split(":"))
        up_writer.write(head)
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer), return_exceptions=True)

    async def listen() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        ports.put(server.sockets[0].getsockname()[1])
        await end.wait()
        server.close()

    ports: Queue[int] = Queue()
    end, loop = asyncio.Event(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), daemon=True)
    thread.start()
    try:
        yield ports.get(timeout=HANG)
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(HANG)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_token_and_tls(address: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    heads: list[bytes] = []
    with front(address, tls, heads) as port:
        arguments = flags(folders, tmp_path, "--devices", "1", "--token", "abc")
        trusted = ["--address", f"127.0.0.1:{port}", "--tls-ca", str(certificate)]
        assert load.main([*arguments, *trusted]) == 0
        assert len(heads) > 5 and all(b"\r\nAuthorization: Bearer abc\r\n" in head for head in heads)
        assert figures_of(tmp_path)["phases"][0]["tokens"] > 0
        assert load.main([*arguments, "--address", f"wss://127.0.0.1:{port}"]) == 1
        assert "certificate verify failed" in capsys.readouterr().err


@pytest.mark.slow
def test_own_server_idle_sockets_and_flags_passed_through(folders: Folders, tmp_path: Path) -> None:
    limits = ("--max-model-len", "128", "--max-nodes", "16", "--kv-tokens", "1024", "--threads", "1")
    assert load.main(flags(folders, tmp_path, "--devices", "2", "--idle", "60", "--", *limits)) == 0
    figures = figures_of(tmp_path)
    assert figures["idle"]["sockets"] == 60
    assert 1 << 10 < figures["idle"]["bytes_per_socket"] < 1 << 20
    phase = figures["phases"][0]
    assert phase["wrong_tokens"] == 0 and phase["tokens"] > 0
    assert phase["memory"]["start_mb"] > 50 and phase["memory"]["mb_per_minute"] is not None
    assert figures["verifier_flags"] == list(limits)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def answers(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    return False


@pytest.mark.slow
def test_a_signal_ends_the_verifier_too(folders: Folders, tmp_path: Path) -> None:
    """SIGTERM goes the way of Ctrl-C."""
    more = (
        "--devices",
        "1",
        "--seconds",
        "100",
        "--",
        "--threads",
        "1",
        "--max-model-len",
        "128",
        "--kv-tokens",
        "1024",
    )
    command = [sys.executable, "-m", "benchmarks.load", *flags(folders, tmp_path, *more)]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + HANG
        words = list[str]()
        while "--port" not in words and time.monotonic() < deadline:  # before its exec a child has its parent's words
            time.sleep(0.1)
            verifier = children(process.pid)
            words = Path(f"/proc/{verifier[0]}/cmdline").read_text().split("\0") if verifier else []
        while not answers(int(words[words.index("--port") + 1])) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3)  # the phase is under way
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HANG)
        assert len(verifier) == 1 and not Path(f"/proc/{verifier[0]}").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and b"Traceback" not in errors


def test_lost_connections_are_counted_and_dialled_again(address: str, folders: Folders) -> None:
    """A server that hangs up at once, five times over: the device counts that and goes on."""

    async def run() -> Tally:
        tally = Tally([0])
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]  # nobody listens there
            answer = Answer((5,), (6, 7), FINISH_NONE)
            device = Device(Dial(f"ws://127.0.0.1:{port}/v1/verify", "", ""), [answer], Habits(think=0), tally, 0, "")
            task = asyncio.create_task(device.run())
            while tally.errors["ConnectionRefusedError"] < 3:
                await asyncio.sleep(0.01)
            device.stop.set()
            await asyncio.wait_for(task, HANG)
        return tally

    tally = asyncio.run(run())
    assert tally.errors["ConnectionRefusedError"] in (3, 4)


def test_help_teaches_and_wrong_flags_are_one_line(
    address: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        load.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.count("python -m benchmarks.load --") >= 5 and "-- --threads 2" in text
    for arguments, said in [
        (["--bad", "rude"], "'rude' is none of flood"),
        (["--devices", "0"], "'0' is not a positive whole number"),
        (["--accepted", "13"], "does not fit trees"),
        (["--address", address, "--idle", "5"], "give its --pid too"),
        (["--address", address, "--", "--threads", "1"], "leave out the flags behind --"),
    ]:
        with pytest.raises(SystemExit):
            load.main(arguments)
        assert said in capsys.readouterr().err
    for more, said in [
        (["--nodes", "25"], "use at most 24"),
        (["--tokens", "500"], "lower --tokens"),
        (["--model", str(folders[1])], "error: "),
        (["--idle", "3", "--pid", str(2**22 + 1)], "No such file"),
    ]:
        assert load.main(flags(folders, tmp_path, "--address", address, *more)) == 1
        assert said in capsys.readouterr().err
