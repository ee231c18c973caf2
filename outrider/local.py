"""The verifier inside the device's own process: the same session, frames and acceptance, no socket in between.

    bundle = open_bundle("build/bundle")
    with LocalVerifier.load(bundle) as server:
        async with EdgeRuntime(bundle, server) as runtime:
            ...

This is the single-device setting of the MoA paper (arXiv 2410.03804): target and drafter take turns.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog

from cloud.auth import UNLIMITED, Account
from cloud.connection import Connection
from cloud.service import Verifier, load_verifier
from cloud.settings import Settings
from edge_runtime.link import Arrived, LinkDown, LinkEvent, LinkRefused, LinkUp, Traffic, frame_bytes
from outrider_core.drafting.bundle import Bundle
from outrider_core.models.drafter_files import find_drafter
from outrider_core.protocol.tree import MAX_NODES
from outrider_core.protocol.wire import (
    ERR_INTERNAL,
    ERR_MISMATCH,
    ClientMessage,
    Error,
    Hello,
    ServerMessage,
    Welcome,
    decode_server,
    encode,
)

#: seconds between two looks at whether the engine thread still lives
LOOK_SECONDS = 0.5


class EngineFailed(LinkRefused):
    """The target failed in this process; the log says why. What was verified before stays right."""


class LocalVerifier:
    """A `Verifier` of this process, to be given to `EdgeRuntime` as its server. Entering it starts the engine thread,
    leaving it stops the thread for good; runtimes live in between.
    """

    #: it answers or fails, so nobody writes alone while waiting for it (see `edge_runtime.transport.LinkMaker`)
    steady = True

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    @classmethod
    def load(
        cls, bundle: Bundle, target: str | None = None, drafter: Path | None = None, *, dtype: str = "float32",
        threads: int = 0, **settings: Any,
    ) -> LocalVerifier:  # fmt: skip
        """Load the target that `bundle` was made for, with room for one conversation.

        target: alias, Hugging Face id or folder; None: the manifest's. drafter: folder with the server half; None: the
        one under drafters/ with the bundle's hash. threads: of torch, 0 = all cores but one. settings: more of
        `cloud.settings.Settings`, whose environment variables count here too.
        Raises TargetError or DrafterError with one clear line.
        """
        manifest = bundle.manifest
        values = {
            "model": target or manifest.target,
            "drafter": drafter or find_drafter(manifest.drafter_hash),
            "dtype": dtype,
            "threads": threads,
            "max_context": manifest.max_context,
            "kv_tokens": manifest.max_context + MAX_NODES,
            **settings,
        }
        return cls(load_verifier(Settings(**values)))

    def __enter__(self) -> LocalVerifier:
        self.verifier.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.verifier.stop()

    def link(self, hello: Hello, report: Callable[[LinkEvent], None]) -> LocalLink:
        """A connection of its own. Raises EngineFailed where no engine thread runs."""
        if not self.verifier.alive:
            raise EngineFailed("no engine thread runs: enter the LocalVerifier with `with` before making a runtime")
        return LocalLink(self.verifier, hello, report)


class LocalLink:
    """What `edge_runtime.link.Link` is over a socket: frames encoded, checked and counted as there.

    A step that fails ends the answer with EngineFailed; an engine thread that ends or hangs ends the link with it.
    """

    url = "this process"

    def __init__(self, verifier: Verifier, hello: Hello, report: Callable[[LinkEvent], None]) -> None:
        self.report = report
        self.traffic = Traffic()
        self.welcome: Welcome | None = None  # while there is a connection
        self.refused: LinkRefused | None = None
        self._verifier, self._hello = verifier, hello
        self._connection: Connection | None = None
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Shake hands and deliver what the engine answers; ends only by cancellation or a refusal."""
        loop = asyncio.get_running_loop()

        def post(function: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile, and with it whoever asked
                loop.call_soon_threadsafe(function)

        while self.refused is None:
            connection = Connection(self._verifier, Account("local", UNLIMITED), {}, post, self._news.set)
            self._connection = connection
            connection.receive(encode(self._hello))
            try:
                await self._deliver(connection)
            finally:
                self._connection = self.welcome = None
                connection.lost()
                self.report(LinkDown("closed"))

    async def send(self, message: ClientMessage) -> None:
        """Hand `message` to the verifier if there is a connection."""
        if self._connection is not None:
            frame = encode(message)
            self.traffic.up += frame_bytes(len(frame), masked=True)
            self.traffic.last[type(message).__name__] = frame_bytes(len(frame), masked=True)
            self._connection.receive(frame)

    def renew(self) -> None:
        """Forget the connection and what it still had to say, and shake hands anew."""
        self._connection = None
        self._news.set()

    async def _deliver(self, connection: Connection) -> None:
        """Until the connection is dropped or refused."""
        while self._connection is connection and self.refused is None:
            self._news.clear()
            while self._connection is connection and (frame := connection.outbox.next()) is not None:
                self._arrived(decode_server(frame), frame_bytes(len(frame), masked=False))
                await asyncio.sleep(0)  # a verdict may overtake the feature rows that are left
            if not self._verifier.alive:
                self._refuse(EngineFailed("the engine thread of this process has ended or hangs; its log says why"))
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()

    def _arrived(self, message: ServerMessage, size: int) -> None:
        match message:
            case Welcome():
                self.welcome = message
                self.report(LinkUp(message))
            case Error(code=code, text=text) if code == ERR_MISMATCH:
                self._refuse(LinkRefused(text))
            case Error(code=code) if code == ERR_INTERNAL:
                self.report(EngineFailed("the engine failed on this answer; its log says why"))
            case _:
                self.traffic.down += size
                self.traffic.last[type(message).__name__] = size
                self.report(Arrived(message))

    def _refuse(self, error: LinkRefused) -> None:
        self.refused = error
        self._news.set()
        self.report(error)


def log_errors_only() -> None:
    """Let the verifier's log say nothing but errors, on stderr: for programs whose output is the answer."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
