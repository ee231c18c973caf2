"""Operating a real process: metrics, logs, settings, signals, and an end that loses nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cloud.auth import main as make_token
from cloud.settings import read_settings
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import (
    ERR_GOING_AWAY,
    Error,
    Generate,
    Open,
    Verdict,
    Verify,
    pack_ids,
    pack_tree,
)
from tests.cloud.running import ENVIRONMENT, PROMPT, ROOT, TRUTH, running, save_folder
from tests.waiting import HANG, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("operations"))


def test_metrics_and_logs_count_and_hold_no_text(folder: Path) -> None:
    with running(folder, "--log-level", "debug") as server:
        with server.client() as client:
            client.open(PROMPT)
            assert client.verify(1, 3, TokenTree.chain([*TRUTH[:2], 9])).bonus == TRUTH[2]
            client.send(Verify(0, 7, 3, *pack_tree(TokenTree())))
            assert client.receive(Error).code == 5
            assert server.metric("outrider:connections") == server.metric("outrider:sessions") == 1
        expected = {
            "prompt_tokens_total": 2,
            "generation_tokens_total": 3,
            "spec_decode_num_drafts_total": 1,
            "spec_decode_num_draft_tokens_total": 3,
            "spec_decode_num_accepted_tokens_total": 2,
            "verified_nodes_total": 3,
            'opens_total{found="new"}': 1,
            'errors_total{code="5"}': 1,
            "draining": 0,
        }
        for name, value in expected.items():
            assert server.metric(f"outrider:{name}") == value, name
        assert 0 < server.metric("outrider:kv_cache_usage_perc") < 1
        assert server.metric("outrider:tree_budget") >= 4
        assert server.metric("outrider:received_bytes_total") > 100 < server.metric("outrider:sent_bytes_total")
        text = httpx.get(f"http://{server.address}/metrics").text
        ask = {
            "model": str(folder / "target"),
            "messages": [{"role": "user", "content": "w11 w12 SECRET"}],
            "max_tokens": 4,
        }
        assert httpx.post(f"http://{server.address}/v1/chat/completions", json=ask).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=HANG)
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert {"loaded", "steps timed", "session opened", "ending"} <= {line["event"] for line in lines}
    assert all("timestamp" in line and "level" in line for line in lines)
    said = server.log.read_text() + text
    assert "SECRET" not in said and "w11" not in said and str(TRUTH[:3])[1:-1] not in said


def test_sigterm_lets_answers_end_and_says_so(folder: Path) -> None:
    """Rounds and a chat completion under way end whole; new ones are refused; 1012; exit 0."""
    with running(folder, step_ms=50) as server:  # the answer takes three seconds
        writer, idle = server.client(), server.client()
        writer.open(PROMPT)
        idle.open(PROMPT)
        writer.send(Generate(0, 1, 3, 60))
        got: list[int] = [writer.receive(Verdict).bonus]
        server.process.send_signal(signal.SIGTERM)
        notice = idle.receive(Error)
        assert (notice.code, notice.stream) == (ERR_GOING_AWAY, -1) and notice.retry_after_ms > 0
        idle.send(Open(1, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling()))
        refused = idle.receive(Error)
        assert (refused.code, refused.stream) == (ERR_GOING_AWAY, 1)
        with pytest.raises(InvalidStatus) as late:
            server.client()
        assert late.value.response.status_code == 503
        for path, status in (("readyz", 503), ("healthz", 200)):
            health = httpx.get(f"http://{server.address}/{path}")
            assert (health.status_code, health.text) == (status, "draining\n")
        while len(got) < 60:
            message = writer.any()
            if isinstance(message, Verdict):
                got.append(message.bonus)
            else:
                assert isinstance(message, Error) and message.code == ERR_GOING_AWAY
        assert got == TRUTH
        for client in (writer, idle):
            with pytest.raises(ConnectionClosed) as closed:
                client.socket.recv(timeout=HANG)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        server.process.communicate(timeout=HANG)
        assert server.process.returncode == 0
    assert "Traceback" not in server.log.read_text()


def test_the_shutdown_timeout_is_kept(folder: Path) -> None:
    """An answer without end does not keep the process: it ends within the grace time."""
    with running(folder, "--shutdown-timeout", "0.2", "--max-model-len", "512", "--kv-tokens", "1024") as server:
        client = server.client()
        client.open(PROMPT)
        client.send(Generate(0, 1, 3, 500))
        client.receive(Verdict)
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=HANG)
        assert server.process.returncode == 0
        written = 0
        with pytest.raises(ConnectionClosed):
            while True:
                written += isinstance(client.any(), Verdict)
        assert written < 490


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    with running(folder, "--shutdown-timeout", "600", "--max-model-len", "512") as server:
        client = server.client()
        client.open([5] * 10)
        client.send(Generate(0, 1, 10, 480))
        client.receive(Verdict)
        server.process.send_signal(signal.SIGTERM)
        while not (isinstance(message := client.any(), Error) and message.code == ERR_GOING_AWAY):
            pass
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=HANG)
        assert server.process.returncode == 128 + signal.SIGTERM


def test_sighup_reads_the_tokens_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    make_token([str(file), "one"])
    first = capsys.readouterr().out.strip()
    with running(folder, "--auth-file", str(file)) as server:
        with server.client(first) as client:
            make_token([str(file), "two"])
            second = capsys.readouterr().out.strip()
            with pytest.raises(InvalidStatus):
                server.client(second)
            server.process.send_signal(signal.SIGHUP)

            def known() -> bool:
                with suppress(InvalidStatus):
                    server.client(second).socket.close()
                    return True
                return False

            assert until(known)
            file.write_text("broken\n")
            server.process.send_signal(signal.SIGHUP)
            client.open(PROMPT)  # the old tokens stay
            assert client.verify(1, 3, TokenTree()).bonus == TRUTH[0]
        assert until(lambda: "tokens not read" in server.log.read_text())
        server.client(second).socket.close()


def test_settings_come_from_flags_then_environment_then_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "verifier.toml"
    file.write_text('port = 1\nmax_nodes = 2\nshutdown_timeout = 3.5\nallow_origin = ["https://a"]\n')
    monkeypatch.setenv("VERIFIER_CONFIG", str(file))
    monkeypatch.setenv("VERIFIER_MAX_NODES", "20")
    monkeypatch.setenv("VERIFIER_PORT", "10")
    settings = read_settings(["--port", "100"])
    assert (settings.port, settings.max_nodes, settings.shutdown_timeout) == (100, 20, 3.5)
    assert settings.allow_origin == ["https://a"]
    again = tmp_path / "again.toml"
    again.write_text(settings.as_toml())
    for name in ("VERIFIER_CONFIG", "VERIFIER_MAX_NODES", "VERIFIER_PORT"):
        monkeypatch.delenv(name)
    assert read_settings([f"--config={again}"]).as_toml() == settings.as_toml()


def test_print_config_is_a_config_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cloud.verifier", "--max-nodes", "7", "--print-config"]
    printed = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG, check=True
    )
    (tmp_path / "c.toml").write_text(printed.stdout)
    assert read_settings(["--config", str(tmp_path / "c.toml")]).max_nodes == 7


def test_printed_settings_hold_wherever_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    flags = ["--model", "models/mine", "--drafter", "drafters/mine", "--auth-file", "accounts", "--port", "0"]
    settings = read_settings(flags)
    printed = settings.as_toml()
    assert settings.as_environment()["VERIFIER_DRAFTER"] == str(tmp_path / "drafters/mine")
    for line in ("model = {}/models/mine", "drafter = {}/drafters/mine", "auth_file = {}/accounts"):
        name, _, path = line.format(tmp_path).partition(" = ")
        assert f'{name} = "{path}"\n' in printed
    assert 'model = "smollm2-135m-instruct"\n' in read_settings([]).as_toml()


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2", "\udcff"])
def test_a_file_of_settings_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"^--config: {tmp_path}/c\.toml: "):
        read_settings(["--config", str(tmp_path / "c.toml")])


def test_printed_settings_of_either_engine_can_be_read(tmp_path: Path) -> None:
    for engine in ("torch", "onnx"):
        (tmp_path / "c.toml").write_text(read_settings(["--engine", engine]).as_toml())
        assert read_settings(["--config", str(tmp_path / "c.toml")]).engine == engine


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--ssl-certfile", "/nowhere.pem"], "ssl_keyfile"),
        (["--ssl-certfile", "/nowhere.pem", "--ssl-keyfile", "/nowhere.key"], "/nowhere.pem"),
        (
            ["--ssl-certfile", "README.md", "--ssl-keyfile", "LICENSE"],
            "--ssl-certfile README.md, --ssl-keyfile LICENSE: not a certificate",
        ),
        (["--page", "/nowhere"], "--page: /nowhere holds no index.html"),
        (["--auth-file", "/nowhere"], "/nowhere"),
        (["--host", "0.0.0.0", "--auth-file", "x"], "--ssl-certfile"),
        (["--insecure", "maybe"], "maybe"),
        (["--engine", "onnx", "--device", "cuda", "--dtype", "bfloat16"], "--device, --dtype"),
        (
            ["--engine", "torch", "--tensor-parallel-size", "2"],
            "--engine torch does not support --tensor-parallel-size",
        ),
        (["--engine", "vllm", "--device", "cpu:0"], "--engine vllm does not support --device"),
        (["--upstream", "http://127.0.0.1:1"], "--engine upstream and --upstream http://HOST:PORT go together"),
        (["--engine", "upstream", "--upstream", "http://h", "--dtype", "float32"], "upstream does not support --dtype"),
    ],
)
def test_wrong_settings_are_one_line(flags: list[str], says: str) -> None:
    command = [sys.executable, "-m", "cloud.verifier", "--port", "0", *flags]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2 and len(lines) == 1 and says in lines[0], result.stderr


def test_unknown_variables_are_named_in_the_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "VERIFIER_MAX_NOEDS", "5")
    monkeypatch.setitem(ENVIRONMENT, "VERIFIER_MAX_SESSIONS", "5")
    with running(folder) as server:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert [line["name"] for line in lines if "unknown variable" in line["event"]] == ["VERIFIER_MAX_NOEDS"]


LINKS = {
    "VERIFIER_SERVICE_HOST": "10.0.0.7", "VERIFIER_SERVICE_PORT": "8765", "VERIFIER_PORT": "tcp://10.0.0.7:8765",
    "VERIFIER_PORT_8765_TCP": "tcp://10.0.0.7:8765", "VERIFIER_PORT_8765_TCP_ADDR": "10.0.0.7",
}  # fmt: skip


def test_service_links_of_kubernetes_set_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every container has them beside a Service called "verifier"."""
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    assert read_settings([]).port == 8765 and read_settings(["--port", "9"]).port == 9
    file = tmp_path / "verifier.toml"
    file.write_text("port = 7\n")
    assert read_settings(["--config", str(file)]).port == 7
    monkeypatch.setenv("VERIFIER_PORT", "81")
    assert read_settings([]).port == 81


def test_service_links_are_named_in_the_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    with running(folder) as server:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (link,) = [line for line in lines if "VERIFIER_PORT is ignored" in line["event"]]
    assert link["value"] == LINKS["VERIFIER_PORT"]


def test_a_fault_names_the_variable_that_it_comes_from() -> None:
    command = [sys.executable, "-m", "cloud.verifier", "--port", "0"]
    wrong = {**ENVIRONMENT, "VERIFIER_MAX_NODES": "many"}
    result = subprocess.run(command, cwd=ROOT, env=wrong, capture_output=True, text=True, timeout=HANG)
    (line,) = result.stderr.strip().splitlines()
    assert "--max-nodes" in line and "the environment has VERIFIER_MAX_NODES=many" in line


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@contextmanager
def open_tls(address: str, authority: trustme.CA) -> Iterator[ssl.SSLSocket]:
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=HANG) as raw,
        trusting(authority).wrap_socket(raw, server_hostname="localhost") as peer,
    ):
        yield peer


def peer_name(address: str, authority: trustme.CA) -> str:
    """The common name of the certificate that new connections see."""
    with open_tls(address, authority) as peer:
        subject: Any = peer.getpeercert()["subject"]  # type: ignore[index]
    return str(dict(pair for group in subject for pair in group)["commonName"])


def not_after(address: str, authority: trustme.CA) -> float:
    """When the certificate that new connections see expires."""
    with open_tls(address, authority) as peer:
        return ssl.cert_time_to_seconds(str(peer.getpeercert()["notAfter"]))  # type: ignore[index]


def test_sighup_reads_the_certificate_again(folder: Path, tmp_path: Path) -> None:
    """New connections see a new pair; a broken one changes nothing and is logged. The health check speaks TLS."""
    authority = trustme.CA()
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"

    def issue(name: str) -> None:
        issued = authority.issue_cert("localhost", common_name=name)
        chain.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())

    issue("first")
    tls = ["--ssl-certfile", str(chain), "--ssl-keyfile", str(key)]
    with running(folder, *tls) as server:
        assert peer_name(server.address, authority) == "first"
        server.process.send_signal(signal.SIGHUP)
        assert until(lambda: "certificate unchanged" in server.log.read_text())
        assert "certificate read again" not in server.log.read_text()
        issue("second")
        server.process.send_signal(signal.SIGHUP)
        assert until(lambda: peer_name(server.address, authority) == "second")
        assert until(lambda: "certificate read again" in server.log.read_text())
        good = key.read_bytes()
        issue("third")
        key.write_bytes(good)  # does not belong to the third
        server.process.send_signal(signal.SIGHUP)
        assert until(lambda: "certificate not read" in server.log.read_text())
        assert peer_name(server.address, authority) == "second"
        port = server.address.split(":")[1]
        with socket.create_connection(("localhost", int(port)), timeout=HANG) as untidy:
            untidy.sendall(b"GET / HTTP/1.1\r\n\r\n")  # not TLS
            untidy.recv(1)
        metrics = httpx.get(f"https://localhost:{port}/metrics", verify=trusting(authority)).text
        assert 'outrider:refused_total{reason="tls_handshake"} 1.0' in metrics
        [ends] = re.findall(r"^outrider:certificate_expiry_timestamp_seconds (\S+)$", metrics, re.MULTILINE)
        assert float(ends) == not_after(server.address, authority)
        with open_tls(server.address, authority) as untidy:
            untidy.sendall(b"nonsense\r\n\r\n")
            assert untidy.recv(1000).startswith(b"HTTP/1.1 400")
        assert "Invalid HTTP request" not in server.log.read_text()
        for flags, status in (([*tls, "--port", port], 0), (["--port", port], 1), ([*tls, "--port", "1"], 1)):
            command = [sys.executable, "-m", "cloud.healthcheck", *flags]
            asked = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)
            assert asked.returncode == status, asked.stderr
            assert len(asked.stderr.splitlines()) == status
