"""`outrider verifier` and `outrider serve` as processes: a name is served on all of its addresses, on one port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

Folders = tuple[Path, Path, Path]
#: runs the command where localhost has both addresses, whatever this machine's files say
PROGRAM = """\
import socket, sys
resolve = socket.getaddrinfo
def both(host, *arguments, **options):
    hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    return [found for each in hosts for found in resolve(each, *arguments, **options)]
socket.getaddrinfo = both
from outrider.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["verifier", "serve"])
def test_localhost_is_served_on_both_of_its_addresses(command: str, folders: Folders) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    target, drafter, bundle = map(str, folders)
    flags = {
        "verifier": ["--model", target, "--drafter", drafter, "--max-model-len", "128", "--max-nodes", "16"],
        "serve": ["--bundle", bundle, "--threads", "1"],
    }[command]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command, *flags, "--host", "localhost", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OUTRIDER_API_KEY": "", "OUTRIDER_CACHE": str(folders[0].parent / "cache")},
    )
    try:
        assert process.stdout is not None
        port = next(
            int(found[1]) for line in process.stdout if (found := re.search(r"(?:ws|http)://[^/]*:(\d+)/v1", line))
        )
        for host in ("127.0.0.1", "[::1]"):
            transport = httpx.HTTPTransport(retries=5)
            with httpx.Client(base_url=f"http://{host}:{port}", transport=transport, timeout=30) as client:
                assert client.get("/healthz").status_code == 200
                assert len(client.get("/v1/models").json()["data"]) == 1
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
        assert process.returncode in (0, 130) and "Traceback" not in said
    finally:
        process.kill()
        process.communicate()
