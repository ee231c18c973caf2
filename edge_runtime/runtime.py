"""The public API: `EdgeRuntime` drives session, drafter and link, and streams typed events."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from edge_runtime.bundle import Bundle, open_bundle
from edge_runtime.drafter import Drafter, TreeShape
from edge_runtime.engines import Engine, open_engine
from edge_runtime.link import Arrived, Link, LinkDown, LinkEvent, LinkRefused, LinkUp, Traffic
from edge_runtime.session import (
    Action,
    AddRows,
    Commit,
    Done,
    DraftTree,
    Patience,
    Provide,
    Reconnect,
    Resume,
    RollBack,
    RoundTimer,
    Send,
    Session,
    Stall,
    WriteToken,
)
from protocol.sampling import Sampling
from protocol.tree import TokenTree
from protocol.wire import PROTOCOL_VERSION, STREAMS, ClientMessage, Close, Hello, Welcome


class Transport(Protocol):
    """What carries messages to one verifier and back: `edge_runtime.link.Link`, `cloud.local.LocalLink`.

    It reports LinkUp, LinkDown, Arrived and LinkRefused in the event loop's thread, in order.
    """

    url: str  # where the verifier is, for people
    traffic: Traffic
    welcome: Welcome | None  # while there is a connection
    refused: LinkRefused | None  # why there will never be one again

    async def run(self) -> None:
        """Connect, and again whenever it must; ends only by cancellation or a refusal."""

    async def send(self, message: ClientMessage) -> None:
        """Send, or drop `message` where there is no connection: the session repeats it after the next LinkUp."""

    def drop(self) -> None:
        """Give the connection up and make a new one."""


class Server(Protocol):
    """What makes links, where an address does not: `cloud.local.LocalVerifier`.

    steady: it always answers or fails, so that the device never writes alone while it waits for a verdict.
    """

    steady: bool

    def link(self, hello: Hello, report: Callable[[LinkEvent], None]) -> Transport:
        """A link for one runtime; the runtime runs it."""


#: for a steady server: no verdict is ever overdue
UNHURRIED = Patience(open=math.inf, connect=math.inf, silence=math.inf)


@dataclass(frozen=True)
class Event:
    """What a user sees after this event: `verified` is the target's, `provisional` the drafter's own."""

    verified: str
    provisional: str


@dataclass(frozen=True)
class Verified(Event):
    """`tokens` joined the verified text; `confirmed` of them stood there as provisional before."""

    tokens: list[int]
    confirmed: int


@dataclass(frozen=True)
class Provisional(Event):
    """The drafter wrote `token` alone; a later event verifies it or takes it back."""

    token: int


@dataclass(frozen=True)
class RolledBack(Event):
    """The last `count` provisional tokens were withdrawn: the target writes something else."""

    count: int


@dataclass(frozen=True)
class LinkState(Event):
    """state: "connecting", "verified" (the target answers) or "alone" (the device writes on)."""

    state: str
    detail: str


@dataclass(frozen=True)
class Finished(Event):
    """The answer's end. reason: "stop", "length", "unverified" or "cancelled"; stats: see `AnswerStats`."""

    reason: str
    token_ids: list[int]
    stats: AnswerStats


@dataclass
class AnswerStats:
    """Figures of one answer. Seconds and bytes as measured; bytes count WebSocket frames of this answer."""

    tokens: int = 0  # verified
    rounds: int = 0
    tau: float = 0.0  # accepted + bonus tokens per tree round
    nodes: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    first_token_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    draft_seconds: float = 0.0
    wait_seconds: float = 0.0  # between VERIFY and its verdict, tree rounds only
    engine_seconds: float = 0.0  # of that, the verifier's engine
    provisional: int = 0
    kept: int = 0
    rolled_back: int = 0
    stalls: int = 0
    opens: int = 0
    #: per stall: seconds from the moment the verdict was due to the first provisional token
    stall_seconds: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class EdgeRuntime:
    """A bundle, its engine and one link; answers one prompt at a time.

    server: `host:port`, `ws://...` or `wss://...` of a `python -m cloud.verifier`; a `Server`, such as an entered
    `cloud.local.LocalVerifier`; None: write alone.
    engine: "onnx", "executorch", an engine object, or None: the first that is in the bundle and installed.
    token: for an address that asks for one. ca_file: certificates to trust beside the system's.
    """

    def __init__(
        self, bundle: Bundle, server: str | Server | None, *, threads: int = 0, shape: TreeShape | None = None,
        patience: Patience | None = None, lookup: bool = True, engine: str | Engine | None = None,
        token: str | None = None, ca_file: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.bundle = bundle
        self.shape = shape or TreeShape()
        self._steady = server is not None and not isinstance(server, str) and server.steady
        self.patience = patience or (UNHURRIED if self._steady else Patience())
        if not server:
            self.patience = Patience(connect=0.0, offline=0.0)
        manifest = bundle.manifest
        self.drafter = Drafter(
            open_engine(bundle, engine, threads) if engine is None or isinstance(engine, str) else engine,
            bundle.draft_ids, bundle.row_shape, manifest.sa_kv_heads, manifest.max_context, lookup, bundle.null_row,
        )  # fmt: skip
        hello = Hello(PROTOCOL_VERSION, manifest.target_hash, manifest.drafter_hash, "outrider-python")
        #: what happens: link events and finished drafter jobs
        self._inbox: asyncio.Queue[LinkEvent | _Drafted] = asyncio.Queue()
        self.link: Transport | None = None
        if isinstance(server, str) and server:
            self.link = Link(server, hello, self._inbox.put_nowait, token, ca_file)
        elif server:
            self.link = server.link(hello, self._inbox.put_nowait)
        self._link_task: asyncio.Task[None] | None = None
        # one thread owns the drafter, so that its jobs run in the order they were asked for
        self._worker = ThreadPoolExecutor(1, "drafter")
        self._session_id = secrets.token_bytes(16)
        self._text: list[int] = []  # committed tokens of the last answer and its conversation
        self._rows_seen = bytearray()  # per position of `_text`, 1 if the drafter holds its row
        self._stream = 0

    @classmethod
    def from_bundle(cls, folder: str | Path, server: str | Server | None = None, **options: Any) -> EdgeRuntime:
        """Open and check the bundle `folder`. Raises BundleError with one clear line.

        options: threads (engine threads, 0 = all cores), shape (TreeShape), patience (Patience), lookup (False:
        draft without prompt lookup), engine, token, ca_file.
        """
        return cls(open_bundle(folder), server, **options)

    async def __aenter__(self) -> EdgeRuntime:
        if self.link and self._link_task is None:
            self._link_task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Tell the verifier to forget the conversation, hang up and stop the drafter's thread."""
        if self.link and self._link_task:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.link.send(Close(self._stream)), 1.0)
            self._link_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._link_task
            self._link_task = None
        self._worker.shutdown(wait=True)

    def encode_prompt(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """Token ids of a question (a string) or a conversation (chat messages)."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.bundle.render_chat(messages)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; bytes of a character that is not complete yet are held back."""
        text: str = self.bundle.tokenizer.decode(ids, skip_special_tokens=True)
        return text.rstrip("\ufffd")

    async def generate(
        self, prompt: str | list[dict[str, str]] | list[int], *, max_new_tokens: int = 256,
        temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int | None = None,
    ) -> AsyncIterator[Event]:  # fmt: skip
        """Answer `prompt`: text, chat messages or token ids. Yields events, the last one `Finished`.

        temperature 0 is greedy. seed: the same seed gives the same text; None picks one. Closing the
        iterator cancels. Raises ValueError on a prompt that leaves no room, LinkRefused if the verifier
        serves another target or drafter, or (`cloud.local.EngineFailed`) fails in this process.
        """
        if not prompt:
            raise ValueError("the prompt is empty")
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            ids: list[int] = [int(token) for token in prompt]  # type: ignore[arg-type]
        else:
            ids = self.encode_prompt(prompt)  # type: ignore[arg-type]
        manifest = self.bundle.manifest
        if not ids or len(ids) >= manifest.max_context:
            raise ValueError(f"the prompt has {len(ids)} tokens; 1 to {manifest.max_context - 1} fit this bundle")
        sampling = Sampling(
            temperature, top_k, top_p, min_p, secrets.randbits(62) if seed is None else seed
        )  # fmt: skip
        answer = _Answer(self, self._begin(ids, sampling, max_new_tokens))
        try:
            async for event in answer.run():
                yield event
        finally:
            await answer.close()

    def _begin(self, ids: list[int], sampling: Sampling, max_new: int) -> Session:
        """A session for `ids`. What it shares with the text before keeps its rows, here and on the verifier."""
        same = 0
        while same < min(len(ids), len(self._text)) and ids[same] == self._text[same]:
            same += 1
        self._worker.submit(self.drafter.keep_rows, same)
        self._stream = (self._stream + 1) % STREAMS
        return Session(
            prompt=ids, sampling=sampling, eos_ids=frozenset(self.bundle.manifest.eos_ids), max_new=max_new,
            max_context=self.bundle.manifest.max_context, row_shape=self.bundle.row_shape,
            session_id=self._session_id, stream=self._stream, rows_seen=self._rows_seen[:same],
            patience=self.patience, timer=RoundTimer(math.inf, math.inf, math.inf) if self._steady else RoundTimer(),
        )  # fmt: skip


@dataclass(frozen=True)
class _Drafted:
    """A drafter job is done: a tree, or one token written alone."""

    session: Session
    result: TokenTree | int
    version: int


class _Answer:
    """Drives one session to its end."""

    def __init__(self, runtime: EdgeRuntime, session: Session) -> None:
        self.runtime, self.session = runtime, session
        self.link, self.loop = runtime.link, asyncio.get_running_loop()
        self.stats = AnswerStats()
        self.pending: list[Event] = []
        self.verified = self.provisional = ""
        self.stalled_at: float | None = None
        self.sent_at = 0.0
        self.tree_round = False
        self.state = ""
        self.began = time.monotonic()

    async def run(self) -> AsyncIterator[Event]:
        session, link = self.session, self.link
        up, down = (link.traffic.up, link.traffic.down) if link else (0, 0)
        self._state("connecting", link.url if link else "no server given")
        while not self.runtime._inbox.empty():  # what happened between two answers shows in the link's state
            self.runtime._inbox.get_nowait()
        if link and link.refused:
            raise link.refused
        await self._do(session.start(self._now()))
        if link and link.welcome:
            await self._do(session.link_up(link.welcome, self._now()))
        while True:
            for event in self.pending:
                if isinstance(event, Finished):
                    self._finish_stats(event, up, down)
                yield event
            self.pending.clear()
            if session.finished:
                return
            await self._next_event()

    async def close(self) -> None:
        if not self.session.finished:
            await self._do(self.session.cancel(self._now()))
        self.runtime._text, self.runtime._rows_seen = self.session.committed, self.session.rows_seen

    def _now(self) -> float:
        return time.monotonic()

    async def _next_event(self) -> None:
        """Wait for the link, the drafter or the clock, whichever is first, and feed the session."""
        wake = self.session.wake_at()
        timeout = None if wake is None or math.isinf(wake) else max(0.0, wake - self._now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._feed(await self.runtime._inbox.get())
        await self._do(self.session.tick(self._now()))

    async def _feed(self, event: object) -> None:
        session, now = self.session, self._now()
        match event:
            case _Drafted(session=owner) if owner is not session:
                pass  # asked for by an answer that was cancelled
            case _Drafted(result=TokenTree() as tree, version=version):
                await self._do(session.tree_ready(tree, version, now))
            case _Drafted(result=int(token), version=version):
                await self._do(session.token_written(token, version, now))
            case LinkUp(welcome=welcome):
                await self._do(session.link_up(welcome, now))
            case LinkDown(reason=reason):
                self._state("connecting" if session.connect_by else self.state, reason)
                await self._do(session.link_down(now))
            case Arrived(message=message):
                if getattr(message, "stream", session.stream) in (session.stream, -1):
                    self._measure(message, now)
                    await self._do(session.message(message, now))
            case LinkRefused() as refused:
                raise refused

    def _measure(self, message: object, now: float) -> None:
        flight = self.session.flight
        seq = getattr(message, "seq", None)
        if flight and self.tree_round and seq == flight.seq:
            self.stats.wait_seconds += now - flight.sent
            self.stats.engine_seconds += getattr(message, "engine_us", 0) / 1e6

    async def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self.tree_round = not self.session.provisional
                    if self.link:
                        await self.link.send(message)
                case DraftTree() | WriteToken():
                    self._draft(action)
                case AddRows(positions=positions, rows=rows):
                    self.runtime._worker.submit(self.runtime.drafter.add_rows, positions, rows)
                case Commit(tokens=tokens, confirmed=confirmed):
                    if not self.stats.first_token_seconds:
                        self.stats.first_token_seconds = self._now() - self.began
                    self.pending.append(Verified(*self._text(), tokens, confirmed))
                    self._state("verified", "")
                case Provide(token=token):
                    if self.stalled_at is not None:
                        self.stats.stall_seconds.append(self._now() - self.stalled_at)
                        self.stalled_at = None
                    self.pending.append(Provisional(*self._text(), token))
                case RollBack(tokens=tokens):
                    self.pending.append(RolledBack(*self._text(), len(tokens)))
                case Stall(deadline=deadline):
                    self.stalled_at = deadline
                    self._state("alone", "the verifier is silent")
                case Resume():
                    self.stalled_at = None
                    self._state("verified", "")
                case Reconnect():
                    if self.link:
                        self.link.drop()
                case Done(reason=reason):
                    ids = self.session.text_ids
                    self.pending.append(Finished(*self._text(), reason, ids, self.stats))

    def _state(self, state: str, detail: str) -> None:
        if state != self.state:
            self.state = state
            self.pending.append(LinkState(self.verified, self.provisional, state, detail))

    def _text(self) -> tuple[str, str]:
        """(verified, provisional) text; decoded together, so that characters across the border come out."""
        session = self.session
        answer = session.committed[len(session.prompt) :]
        self.verified = self.runtime.decode(answer)
        whole = self.runtime.decode(answer + session.provisional) if session.provisional else self.verified
        self.provisional = whole[len(self.verified) :]
        return self.verified, self.provisional

    def _draft(self, action: DraftTree | WriteToken) -> None:
        runtime, session = self.runtime, self.session

        def work() -> None:
            began = time.monotonic()
            result: TokenTree | int
            if isinstance(action, WriteToken):
                result = runtime.drafter.write(action.prefix, session.sampling)
            elif action.depth < 1:
                result = TokenTree()
            else:
                shape = replace(
                    runtime.shape, nodes=min(runtime.shape.nodes, action.nodes),
                    depth=min(runtime.shape.depth, action.depth),
                )  # fmt: skip
                result = runtime.drafter.grow(
                    action.prefix, session.sampling, shape, lambda: session.version != action.version
                )
            self.stats.draft_seconds += time.monotonic() - began
            drafted = _Drafted(session, result, action.version)
            self.loop.call_soon_threadsafe(runtime._inbox.put_nowait, drafted)

        runtime._worker.submit(work)

    def _finish_stats(self, event: Finished, up: int, down: int) -> None:
        session, stats = self.session, self.stats
        stats.tokens = len(session.committed) - len(session.prompt)
        stats.rounds, stats.nodes = session.stats.rounds, session.stats.nodes
        stats.tau = (session.stats.accepted + stats.rounds) / stats.rounds if stats.rounds else 0.0
        stats.seconds = self._now() - self.began
        stats.tokens_per_second = stats.tokens / stats.seconds
        if self.link:
            stats.bytes_up = self.link.traffic.up - up
            stats.bytes_down = self.link.traffic.down - down
        stats.provisional, stats.kept = session.stats.provisional, session.stats.kept
        stats.rolled_back, stats.stalls = session.stats.rolled_back, session.stats.stalls
        stats.opens = session.stats.opens
