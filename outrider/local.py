"""The verifier inside the device's own process: the same sessions, frames and acceptance, without a socket.

    bundle = open_bundle("build/bundle")
    with LocalVerifier.load(bundle) as server:
        async with EdgeRuntime(bundle, server) as runtime:
            ...

This is the single-device setting of the MoA paper (arXiv 2410.03804): target and drafter take turns. Nothing is printed
and nothing is logged unless the program configures logging (see `cloud.telemetry.log`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import structlog
from pydantic import ValidationError

from cloud.engine.tree_budget import StepCosts
from cloud.loading import load_verifier
from cloud.server.connection import Connection
from cloud.server.limits import UNLIMITED, Account
from cloud.server.service import Verifier
from cloud.settings import Settings, describe_errors
from cloud.telemetry.progress import BuildProgress
from edge_runtime.link.events import (
    Arrived,
    EngineFailed,
    LinkDown,
    LinkEvent,
    LinkRefused,
    LinkUp,
    Traffic,
    frame_bytes,
)
from outrider_core import durable
from outrider_core.cache import cache_dir
from outrider_core.drafting.bundle import Bundle
from outrider_core.machine import describe_machine
from outrider_core.models.drafter_arrays import find_drafter
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
from outrider_core.targets.source import TargetError

#: seconds between a link's checks that the engine thread is alive
POLL_SECONDS = 0.5


class LocalVerifier:
    """A `Verifier` in this process; pass it to `EdgeRuntime` as the server.

    Use it as a context manager: entering starts the engine thread, leaving stops it. Create and close runtimes
    inside the block.
    """

    #: it answers or fails, so the device never writes offline while it waits (see `LinkMaker`)
    reliable = True

    def __init__(self, verifier: Verifier, step_costs: Path | None = None) -> None:
        """step_costs: file that keeps step costs, so that the next start need not measure them."""
        self.verifier, self._step_costs = verifier, step_costs

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        target: str | None = None,
        drafter: Path | None = None,
        *,
        dtype: str = "auto",
        threads: int = 0,
        progress: BuildProgress | None = None,
        **settings: Any,
    ) -> LocalVerifier:
        """Load the target that `bundle` was made for, with a KV pool for one conversation.

        target: alias, Hugging Face id or folder; None: the manifest's. drafter: folder with the server half; None: the
        one under drafters/ that has the bundle's hash, if the bundle has a drafter. dtype: "auto" lets
        `cloud.engine.choice` choose the engine; a number format such as "float32" selects torch. threads: CPU threads
        of the target; 0: all cores but one, of two both for the 8-bit copy. progress: reports while an 8-bit copy of
        the target is built, once; None: in the log. settings: further fields of `cloud.settings.Settings`; its
        VERIFIER_* environment variables apply here too.

        Raises TargetError or DrafterError with a message of one line.
        """
        manifest = bundle.manifest
        values = {
            "model": target or manifest.target,
            "drafter": drafter or (find_drafter(manifest.drafter_hash) if manifest.has_drafter else None),
            "dtype": dtype,
            "threads": threads,
            "max_model_len": manifest.max_context,
            "kv_tokens": manifest.max_context + MAX_NODES,
            "prefix_cache": "on",  # one process, one user
            # nothing is served, whatever the environment has for servers
            "host": "127.0.0.1",
            "port": 0,
            "auth_file": None,
            "ssl_certfile": None,
            "ssl_keyfile": None,
            **settings,
        }
        try:
            chosen = Settings(**values)
        except ValidationError as error:
            raise TargetError(describe_errors(error)) from None
        verifier = load_verifier(chosen, progress, lambda verifier: _read_costs(_costs_file(verifier, threads)))
        return cls(verifier, _costs_file(verifier, threads))

    def __enter__(self) -> LocalVerifier:
        self.verifier.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.verifier.stop()
        costs = self.verifier.scheduler.budget.costs
        if costs is not None and self._step_costs is not None:
            with suppress(OSError):  # the next start times steps anew
                self._step_costs.parent.mkdir(parents=True, exist_ok=True)
                durable.write(self._step_costs, msgspec.json.encode(costs))

    def link(self, hello: Hello, report: Callable[[LinkEvent], None]) -> LocalLink:
        """Return a new connection to the verifier. Raises EngineFailed if the engine thread does not run."""
        if not self.verifier.alive:
            raise EngineFailed("the engine thread is not running; enter the LocalVerifier with `with` before use")
        return LocalLink(self.verifier, hello, report)


class LocalLink:
    """A `VerifierLink` without a socket: frames are encoded, checked and counted as `Link` does it.

    A failed step ends the answer with EngineFailed; so does an engine thread that has ended or hangs.
    """

    url = "this process"

    def __init__(self, verifier: Verifier, hello: Hello, report: Callable[[LinkEvent], None]) -> None:
        self.report = report
        self.traffic = Traffic()
        self.welcome: Welcome | None = None  # while there is a connection
        self.refused: LinkRefused | EngineFailed | None = None
        self._verifier, self._hello = verifier, hello
        self._connection: Connection | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Shake hands, then deliver the engine's replies. Ends only by cancellation or a refusal."""
        loop = asyncio.get_running_loop()

        def post(function: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and nothing waits for the reply
                loop.call_soon_threadsafe(function)

        while self.refused is None:
            connection = Connection(self._verifier, Account("local", UNLIMITED), {}, post, self._changed.set)
            self._connection = connection
            connection.receive(encode(self._hello))
            try:
                await self._deliver(connection)
            finally:
                self._connection = self.welcome = None
                connection.lost()
                self.report(LinkDown("closed"))

    def send(self, message: ClientMessage) -> None:
        """Pass `message` to the verifier, or drop it if there is no connection."""
        if self._connection is not None:
            frame = encode(message)
            self.traffic.up += frame_bytes(len(frame), masked=True)
            self.traffic.last[type(message).__name__] = frame_bytes(len(frame), masked=True)
            self._connection.receive(frame)

    async def flush(self) -> None:
        """Do nothing: no message waits here."""

    def stay(self, seconds: float) -> None:
        """Do nothing: there is no connection to keep."""

    def network_changed(self) -> None:
        """Do nothing: no network is used."""

    def pin(self, arithmetic: str) -> None:
        """Raise ValueError if the verifier has another arithmetic, as there is no other verifier here."""
        if arithmetic not in ("", self._verifier.arithmetic):
            raise ValueError(
                f"the answer was begun in {arithmetic} arithmetic, and the target in this process computes in "
                f"{self._verifier.arithmetic}; continue it where it was begun, or ask the question again"
            )

    def renew(self) -> None:
        """Drop the connection with its pending replies, and shake hands again."""
        self._connection = None
        self._changed.set()

    async def _deliver(self, connection: Connection) -> None:
        """Report replies until the connection is dropped or refused."""
        while self._connection is connection and self.refused is None:
            self._changed.clear()
            while self._connection is connection and (frame := connection.outbox.next()) is not None:
                self._arrived(decode_server(frame), frame_bytes(len(frame), masked=False))
                await asyncio.sleep(0)  # a verdict may overtake the remaining feature rows
            if not self._verifier.alive:
                self._refuse(EngineFailed('the engine thread has ended or hangs; see the messages of logger "cloud"'))
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()

    def _arrived(self, message: ServerMessage, size: int) -> None:
        match message:
            case Welcome():
                self.welcome = message
                self.report(LinkUp(message))
            case Error(code=code, text=text) if code == ERR_MISMATCH:
                self._refuse(LinkRefused(text))
            case Error(code=code) if code == ERR_INTERNAL:
                self.report(EngineFailed('the engine failed on this answer; logger "cloud" has the traceback'))
            case _:
                self.traffic.down += size
                self.traffic.last[type(message).__name__] = size
                self.report(Arrived(message))

    def _refuse(self, error: LinkRefused | EngineFailed) -> None:
        self.refused = error
        self._changed.set()
        self.report(error)


def _costs_file(verifier: Verifier, threads: int) -> Path:
    """Return the file of this verifier's step costs on this machine, kept between starts."""
    known_by = [verifier.arithmetic, verifier.target_hash, verifier.max_context, threads, describe_machine()]
    return cache_dir() / "step-costs" / f"{hashlib.sha256(repr(known_by).encode()).hexdigest()[:16]}.json"


def _read_costs(file: Path) -> StepCosts | None:
    try:
        costs = msgspec.json.decode(file.read_bytes(), type=StepCosts)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    return costs if costs.plausible else None


def log_errors_only() -> None:
    """Configure structlog to print errors only, on stderr: for commands whose output is the answer."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
