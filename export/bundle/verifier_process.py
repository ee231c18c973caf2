"""Start, kill and restart a real `python -m cloud.verifier` process, for `export check` and benchmarks."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from outrider_core.protocol.tree import MAX_NODES

#: verifier flags for measuring acceptance: trees are never pruned, however slow steps are on this machine
UNPRUNED_TREES = ("--max-nodes", str(MAX_NODES), "--tree-budget", str(MAX_NODES))
#: verifier flags for plain decoding, to compare with: a stream takes one step for each token
PLAIN_STREAMS = ("--lookup", "off")


def free_port() -> int:
    """Return a TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class VerifierProcess:
    """A verifier on loopback. `arguments` are added to its command line; its output goes to `log`.

    drafter: its folder; None: the installed one of its target, if there is one. module: the module to run, with a
    verifier's options. trust: knows its certificate; None: it serves without one.
    """

    def __init__(
        self,
        drafter: Path | None,
        log: Path,
        *arguments: str,
        port: int | None = None,
        module: str = "cloud.verifier",
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.port = port or free_port()
        self.trust = trust
        self.log = log
        chosen = ["--drafter", str(drafter)] if drafter else []
        self.command = [sys.executable, "-m", module, *chosen, "--port", str(self.port), *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port of the verifier."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process without waiting for it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)

    def is_ready(self) -> bool:
        """Ask /readyz once. Raises RuntimeError if the process has ended."""
        assert self.process is not None, "start() first"
        if self.process.poll() is not None:
            tail = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the verifier ended with {self.process.returncode}: {' '.join(tail)}; see {self.log}")
        try:
            url = f"{'https' if self.trust else 'http'}://{self.address}/readyz"
            with urllib.request.urlopen(url, timeout=1, context=self.trust) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, seconds: float = 180.0) -> None:
        """Return once /readyz answers 200. Raises RuntimeError after `seconds`, or if the process has ended."""
        end = time.monotonic() + seconds
        while not self.is_ready():
            if time.monotonic() > end:
                raise RuntimeError(f"the verifier was not ready after {seconds:.0f} s; see {self.log}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Send SIGKILL, as when a machine dies."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Send SIGTERM and wait; SIGKILL after ten seconds."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
