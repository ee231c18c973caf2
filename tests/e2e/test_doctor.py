"""The doctor against real verifiers and real faults: each is named, with what to do about it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from rich.console import Console

from outrider.cli import device as command
from outrider.cli.doctor import Finding, examine, show
from tests.cloud.drive import serve
from tests.e2e.stack import make_verifier

Folders = tuple[Path, Path, Path]


def findings(folder: Path, server: str | None, **options: Any) -> dict[str, Finding]:
    told: list[Finding] = []
    found = asyncio.run(examine(folder, server, threads=1, tell=told.append, **options))
    assert told == found and all(bool(finding.advice) == (finding.level != "good") for finding in found)
    return {finding.name: finding for finding in found}


def test_a_sound_set_up(folders: Folders) -> None:
    with serve(make_verifier(folders)) as address:
        found = findings(folders[2], address)
    assert list(found) == ["versions", "bundle", "engine", "address", "clock", "verifier", "round trip", "context"]
    assert [name for name, finding in found.items() if finding.level != "good"] == ["context"]
    assert "holds 120 tokens" in found["context"].text  # the tiny verifier's; its bundle was made for more
    assert found["round trip"].figures["rtt_ms"] >= 0 and found["engine"].figures["step_ms"] > 0


def test_without_a_server_everything_else_is_looked_at(folders: Folders) -> None:
    found = findings(folders[2], None)
    assert found["server"].level == "warning" and found["engine"].level == "good"


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    found = findings(tmp_path, None)
    assert found["bundle"].level == "bad" and "export bundle" in found["bundle"].advice


def test_a_port_where_nobody_listens(folders: Folders) -> None:
    found = findings(folders[2], "127.0.0.1:1")
    assert found["address"].level == "bad" and "outrider verifier" in found["address"].advice
    assert "verifier" not in found  # it would only say the same again


def test_a_name_that_is_none(folders: Folders) -> None:
    assert "no address" in findings(folders[2], "nowhere.invalid:80")["address"].text


def test_a_verifier_of_another_drafter(folders: Folders, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    copy.mkdir()
    for file in folders[2].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["drafter_hash"] = "0" * 16
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with serve(make_verifier(folders)) as address:
        found = findings(copy, address)
    assert found["verifier"].level == "bad" and "bundle made for this verifier" in found["verifier"].advice


class Portal(BaseHTTPRequestHandler):
    """A captive portal: a page in place of whatever was asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>please sign in</html>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def portal() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Portal)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def tls_listener() -> Iterator[str]:
    """A web server behind TLS."""
    server = HTTPServer(("127.0.0.1", 0), Portal)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_web_page_in_place_of_a_verifier(folders: Folders) -> None:
    with portal() as address:
        found = findings(folders[2], address)
    assert found["verifier"].level == "bad" and "sign in" in found["verifier"].advice


def test_a_listener_that_says_nothing(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.doctor.LOOK_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = findings(folders[2], f"127.0.0.1:{listener.getsockname()[1]}")
    assert found["clock"].level == "warning" and found["verifier"].level == "bad"
    assert "sends nothing" in found["verifier"].text


def test_tls_where_plain_text_is_asked(folders: Folders) -> None:
    with tls_listener() as address:
        found = findings(folders[2], f"ws://{address}")
    assert found["address"].level == "good" and found["verifier"].level == "bad"
    assert "speaks TLS" in found["verifier"].text and f"--server wss://{address}" in found["verifier"].advice


def test_plain_text_where_tls_is_expected(folders: Folders) -> None:
    with portal() as address:
        found = findings(folders[2], f"wss://{address}")
    assert found["address"].level == "bad" and "ws://" in found["address"].advice


def test_the_command_prints_findings_and_says_by_its_status_whether_all_is_well(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--bundle", str(folders[2]), "--threads", "1"]
    with serve(make_verifier(folders)) as address:
        assert command.main([*arguments, "--server", address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {finding["name"] for finding in found} >= {"bundle", "verifier", "round trip"}
    assert command.main([*arguments, "--server", "127.0.0.1:1"]) == 1
    assert "fails" in capsys.readouterr().out


def test_what_a_verifier_says_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = "onnx[/] [red]8[/red] \x1b[2J, begun\nelsewhere"
    show([Finding("replicas", "warning", said, said)], Console())
    printed = capsys.readouterr().out
    assert printed.count("onnx[/] [red]8[/red]") == 2 and "\x1b" not in printed


def test_without_a_bundle_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: Folders) -> None:
    """The verifier is looked at all the same: the default pair's hashes are known."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with serve(make_verifier(folders)) as address:
        found = {finding.name: finding for finding in asyncio.run(examine(None, address))}
    assert found["bundle"].level == "warning" and "outrider chat makes it: 235 MB" in found["bundle"].advice
    assert found["address"].level == found["clock"].level == "good"
    assert found["verifier"].level == "bad" and "target" in found["verifier"].text  # the tiny one's is another
    assert [path.name for path in tmp_path.iterdir()] in ([], ["hashes.json"])
    alone = asyncio.run(examine(None, None))
    assert [finding.level for finding in alone] == ["good", "warning", "good"]
