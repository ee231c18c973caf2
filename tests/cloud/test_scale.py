"""`cloud.scale` with real Ray: two replicas behind one address, one of which is killed in mid-session."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from websockets.exceptions import ConnectionClosed

from cloud.scale import build
from cloud.scaling.options import Scale, ScaleError
from export.bundle.verifier_process import free_port
from outrider_core.models.drafter_files import load_drafter
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import MAX_CLIENT_FRAME, SUBPROTOCOL, Hello
from outrider_core.targets.identity import model_identity
from tests.cloud.drive import FOR_VLLM, Client
from tests.cloud.running import save_folder
from tests.targets.plain import tiny_truth
from tests.tiny import EOS, plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'outrider[scale]'"),
]

ROOT = Path(__file__).parents[2]
KILL = """
import sys, ray
ray.init(sys.argv[1], namespace="serve", log_to_driver=False)
ray.kill(ray.get_actor(f"SERVE_REPLICA::verifier#Replica#{sys.argv[2]}"))
"""
PROMPT = [10, 20, 30, 40, 50]
NEW = 60


@dataclass(frozen=True)
class Fleet:
    """A running `python -m cloud.scale --replicas 2`."""

    process: subprocess.Popen[str]
    address: str
    ray_address: str
    hello: Hello

    def connect(self) -> Client:
        return Client(self.address, self.hello)


def verifier_flags(folders: Path) -> list[str]:
    flags = ["--threads", "1", "--max-model-len", "128", "--max-nodes", "16", "--kv-tokens", "512"]
    return ["--model", str(folders / "target"), "--drafter", str(folders / "drafter"), *flags]


def replica(client: Client) -> str:
    """Who serves this socket."""
    response = client.socket.response
    assert response is not None
    return response.headers["x-replica"]


def ray_processes(folder: Path) -> list[str]:
    """Command lines of the processes that Ray has started for this folder and that still run."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RAY_TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                lines.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone meanwhile, or not ours
    return lines


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Ray's files in a folder of their own (its socket paths must be short), its cluster behind a token of its own."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    values = {
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OUTRIDER_CACHE": f"{folder}/cache",  # no 8-bit copy of another day
    }
    yield {**os.environ, **values}
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a tiny target and its drafter."""
    folders = tmp_path_factory.mktemp("tiny")
    model = tiny_model(dtype=torch.float32)
    save_tiny_drafter(folders / "drafter", model, save_tiny_target(folders / "target", model))
    return folders


@pytest.fixture(scope="module")
def hello(folders: Path) -> Hello:
    return Hello(1, model_identity(folders / "target"), load_drafter(folders / "drafter")[2])


@pytest.fixture(scope="module")
def fleet(environment: dict[str, str], folders: Path, hello: Hello) -> Iterator[Fleet]:
    with run_fleet(environment, hello, 2, verifier_flags(folders)) as fleet:
        yield fleet


@contextmanager
def run_fleet(environment: dict[str, str], hello: Hello, replicas: int, flags: list[str]) -> Iterator[Fleet]:
    port = free_port()
    command = [sys.executable, "-m", "cloud.scale", "--replicas", str(replicas), "--cpus-per-replica", "0.5"]
    command += ["--drain-seconds", "1", "--http-port", str(port), "--", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(rf"verifiers ready: ws://(\S+)/v1/verify replicas={replicas} \S+ ray=(\S+)", line)
        assert found, (line, process.communicate(timeout=HANG))
        yield Fleet(process, found[1], found[2], hello)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=HANG)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def test_health_and_handshake_through_the_proxy(fleet: Fleet) -> None:
    for path, text in (("healthz", "alive\n"), ("readyz", "ready\n")):
        answer = httpx.get(f"http://{fleet.address}/{path}")
        assert (answer.status_code, answer.text) == (200, text)
    with fleet.connect() as client:
        assert client.socket.subprotocol == SUBPROTOCOL
        assert client.welcome.target_hash == fleet.hello.target_hash


def test_metrics_are_those_of_all_replicas(fleet: Fleet) -> None:
    """Whichever replica is asked; every sample says whose it is."""
    end = time.monotonic() + HANG
    while True:
        text = httpx.get(f"http://{fleet.address}/metrics").text
        names = set(re.findall(r'^outrider:build_info\{replica="(\w+)"', text, re.MULTILINE))
        if len(names) == 2:
            break
        assert time.monotonic() < end, text[:2000]
        time.sleep(0.5)
    assert text.count("# TYPE outrider:build_info ") == 1
    assert all("replica=" in line for line in text.splitlines() if not line.startswith("#"))


def test_sighup_does_not_end_the_fleet(fleet: Fleet) -> None:
    fleet.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert fleet.process.poll() is None and is_ready(fleet.address)


def test_frames_too_large_are_refused(fleet: Fleet) -> None:
    client = fleet.connect()
    client.socket.send(bytes(MAX_CLIENT_FRAME + 1))
    with pytest.raises(ConnectionClosed) as closed:
        client.socket.recv(timeout=HANG)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_many_connections_use_all_replicas(fleet: Fleet) -> None:
    clients = [fleet.connect() for _ in range(12)]
    names = [replica(client) for client in clients]
    truth = tiny_truth(tiny_model(dtype=torch.float32), PROMPT, Sampling(), 4)
    for client in clients:
        client.open(PROMPT)
        assert client.verify(1, len(PROMPT), TokenTree.chain(truth[:3])).bonus == truth[3]
        client.socket.close()
    assert len(set(names)) == 2 and min(names.count(name) for name in set(names)) >= 2, names


def test_the_replica_of_a_session_dies(fleet: Fleet, environment: dict[str, str]) -> None:
    """The text goes on on the other replica from its token ids, and equals plain decoding."""
    truth = tiny_truth(tiny_model(dtype=torch.float32), PROMPT, Sampling(), NEW, (EOS,))
    session, text, seq = os.urandom(16), list(PROMPT), 0
    client = fleet.connect()
    client.open(text, session=session)
    first, killed, lost = replica(client), False, 0
    while len(text) < len(PROMPT) + len(truth):
        if not killed and len(text) > len(PROMPT) + len(truth) // 2:
            kill = [sys.executable, "-c", KILL, fleet.ray_address, first]
            subprocess.run(kill, env=environment, check=True, capture_output=True, timeout=HANG)
            killed = True
        done = len(text) - len(PROMPT)
        ahead = truth[done : done + 3]
        tree = TokenTree((*ahead, (ahead[0] + 1) % 64), (*range(-1, len(ahead) - 1), -1))
        try:
            verdict = client.verify(seq + 1, len(text), tree)
        except ConnectionClosed:
            lost += 1
            client = fleet.connect()
            client.open(text, session=session, seq=seq)
            continue
        seq += 1
        text += [tree.tokens[node] for node in verdict.accepted]
        if len(text) < len(PROMPT) + len(truth):
            text.append(verdict.bonus)
    assert text == PROMPT + truth
    assert killed and lost == 1 and replica(client) != first
    client.socket.close()
    end = time.monotonic() + HANG  # Serve replaces the dead replica
    names: set[str] = set()
    while len(names) < 2:
        assert time.monotonic() < end, names
        with fleet.connect() as probe:
            names.add(replica(probe))
        time.sleep(0.2)
    assert first not in names


def test_sigterm_stops_all_of_ray(fleet: Fleet, environment: dict[str, str]) -> None:
    """Last in this file: it ends the fleet."""
    folder = Path(environment["RAY_TMPDIR"])
    assert any("ServeReplica" in line or "raylet" in line for line in ray_processes(folder))
    fleet.process.send_signal(signal.SIGTERM)
    out, err = fleet.process.communicate(timeout=HANG)
    assert (fleet.process.returncode, out) == (0, "")
    assert all(line.startswith("scale: ") for line in err.splitlines()), err
    end = time.monotonic() + HANG
    while left := ray_processes(folder):
        assert time.monotonic() < end, left
        time.sleep(0.2)


@pytest.mark.vllm
def test_a_replica_on_vllm(environment: dict[str, str], tmp_path: Path) -> None:
    model, folder = tiny_model(**FOR_VLLM), save_folder(tmp_path, **FOR_VLLM)
    truth = plain_decode(model, PROMPT, Sampling(), 8, eos_ids=())
    hello = Hello(1, (folder / "hash").read_text(), load_drafter(folder / "drafter")[2])
    flags = [*verifier_flags(folder), "--engine", "vllm"]
    with run_fleet(environment, hello, 1, flags) as fleet, fleet.connect() as client:
        assert client.welcome.arithmetic == "vllm-0.32-float32"
        client.open(PROMPT)
        assert client.verify(1, len(PROMPT), TokenTree.chain(truth[:3])).bonus == truth[3]


def test_serve_run_builds_from_a_config_file(
    folders: Path, hello: Hello, environment: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    where = {"model": str(folders / "target"), "drafter": str(folders / "drafter")}
    application = {
        "name": "verifier",
        "route_prefix": "/",
        "import_path": "cloud.scale:build",
        "args": {"replicas": 1, "sessions_per_replica": 8, **where, "max-model-len": 96, "threads": 1},
    }
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (tmp_path / "serve.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(tmp_path / "serve.yaml")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + HANG
        while not is_ready(f"127.0.0.1:{port}"):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.2)
        with Client(f"127.0.0.1:{port}", hello) as client:
            assert client.welcome.max_context == 96
            client.open(PROMPT)
            truth = tiny_truth(tiny_model(dtype=torch.float32), PROMPT, Sampling(), 3)
            assert client.verify(1, len(PROMPT), TokenTree.chain(truth[:2])).bonus == truth[2]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(HANG)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_options_of_the_deployment() -> None:
    fixed = Scale(replicas=3, gpus_per_replica=1).options()
    assert fixed["num_replicas"] == 3 and "autoscaling_config" not in fixed
    assert fixed["ray_actor_options"] == {"num_gpus": 1, "num_cpus": 1}
    growing = Scale.model_validate({"replicas": 2, "max_replicas": "4", "sessions_per_replica": 8}).options()
    wanted = {"min_replicas": 2, "max_replicas": 4, "target_ongoing_requests": 8}
    assert growing["autoscaling_config"].items() >= wanted.items() and "num_replicas" not in growing
    assert growing["max_ongoing_requests"] == 16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"replicas": 0}, "--replicas"),
        ({"max_model_len": "many"}, "--max-model-len"),
        ({"bogus": 1}, "--bogus"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas 2 is less than replicas 3"),
        ({"device": "cuda"}, "gpus_per_replica"),
        ({"device": "cpu", "gpus_per_replica": 1}, "would idle"),
        ({"gpus_per_replica": 1, "tensor_parallel_size": 2}, "tensor_parallel_size 2 needs 2 GPUs"),
    ],
)
def test_build_refuses(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ScaleError, match=text):
        build(arguments)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--http-host", "0.0.0.0"], "--insecure"),
        (["--proxy", "haproxy"], "--insecure"),
        (["--http-port", "0"], "--http-port"),
        (["--cpus-per-replica", "999"], "need 999 CPUs"),
        (["--ray-address", "127.0.0.1:1"], "Ray does not answer at 127.0.0.1:1"),
        (["--", "--port", "1"], "--http-port"),
        (["--", "--kv-tokens", "300"], "--kv-tokens|kv_tokens 300"),
        (["--", "--drafter", "/nowhere"], "/nowhere"),
    ],
)
def test_failures_are_one_line(environment: dict[str, str], flags: list[str], text: str) -> None:
    command = [sys.executable, "-m", "cloud.scale", "--http-port", str(free_port()), *flags]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2 and all(line.startswith("scale: ") for line in lines), result.stderr
    assert re.search(text, lines[-1]), lines
