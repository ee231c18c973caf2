"""Both OpenAI-style endpoints over one target, behind real sockets: the verifier's, and a device's that asks it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from outrider.cli.serve import Endpoint, run
from outrider_core.drafting.bundle import Bundle
from outrider_core.serving import bind
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, PATIENCE, make_verifier
from tests.waiting import HANG

Folders = tuple[Path, Path, Path]
MESSAGES = [{"role": "user", "content": "w5 w9 w11"}]
PAGE = "http://app.example"
KINDS = ("verifier", "device")


@dataclass(frozen=True)
class Served:
    """An endpoint. kind: one of KINDS. url: of /v1. model: its name there."""

    kind: str
    url: str
    model: str

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": MESSAGES, "max_tokens": MAX_NEW, "temperature": 0, **more}

    def post(self, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/chat/completions", json=self.body(**more), timeout=HANG)

    def connect(self) -> socket.socket:
        """A raw socket to it."""
        place = urlsplit(self.url)
        assert place.hostname is not None and place.port is not None
        return socket.create_connection((place.hostname, place.port), timeout=HANG)


@contextmanager
def serving(kind: str, folders: Folders, bundle: Bundle, **options: Any) -> Iterator[Served]:
    """An endpoint of this kind, which pages of PAGE may use. options: of the device's Endpoint, or of `serve`."""
    verifier = make_verifier(folders)
    own = options if kind == "verifier" else {}
    with serve(verifier, allow_origin=[PAGE], **own) as address:
        if kind == "verifier":
            yield Served(kind, f"http://{address}/v1", verifier.model_name)
            return
        runtime = EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE, threads=1), Pinned(mode="tree"))
        bound = bind("127.0.0.1", 0)
        loop, endpoint = asyncio.new_event_loop(), Endpoint(runtime, origins=[PAGE], **options)
        task = loop.create_task(run(endpoint, bound, ""))

        def work() -> None:
            with pytest.raises(asyncio.CancelledError):
                loop.run_until_complete(task)
            loop.close()

        thread = threading.Thread(target=work)
        thread.start()
        bound[0].listen()
        try:
            yield Served(kind, f"http://127.0.0.1:{bound[0].getsockname()[1]}/v1", endpoint.model)
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join(20)
            assert not thread.is_alive()
