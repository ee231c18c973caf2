"""Plain decoding on the same verifier: the target decodes alone and streams (the honest competitor)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.link.events import Arrived, LinkDown, LinkEvent, LinkRefused, LinkUp
from edge_runtime.link.websocket import Link
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import (
    FINISH_NONE,
    PROTOCOL_VERSION,
    Cancel,
    Close,
    Error,
    Generate,
    Hello,
    Open,
    Verdict,
    pack_ids,
)

#: seconds without a message after which the verifier counts as gone
GIVE_UP = 60.0


@dataclass(frozen=True)
class PlainAnswer:
    """tokens: the target's answer. seconds: from OPEN to the last token; first_token_seconds: to the first.

    calls: GENERATEs. bytes_up, bytes_down: of WebSocket frames.
    """

    tokens: list[int]
    seconds: float
    first_token_seconds: float
    calls: int
    bytes_up: int
    bytes_down: int

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


async def plain_decode(
    server: str, bundle: Bundle, prompts: list[list[int]], sampling: Sampling, max_new: int
) -> list[PlainAnswer]:
    """Let the verifier at `server` answer each prompt (token ids) by itself, one after the other.

    Raises TimeoutError if it sends nothing for `GIVE_UP` seconds.
    """
    async with _dialled(server, bundle) as (link, events):
        eos = set(bundle.manifest.eos_ids)
        return [
            await _one(link, events, stream, prompt, sampling, max_new, max_new, eos)
            for stream, prompt in enumerate(prompts)
        ]


async def call_per_token(
    server: str,
    bundle: Bundle,
    prompt: list[int],
    max_new: int,
    silence: float = 10.0,
    token: str | None = None,
    ca_file: Path | None = None,
) -> PlainAnswer:
    """Request every token separately, like a client that neither drafts nor streams. Greedy.

    A link that is lost, or silent for `silence` seconds, is dialled again, and missing tokens are requested. Raises
    TimeoutError if nothing comes for that long and `GIVE_UP` seconds.
    """
    async with _dialled(server, bundle, token, ca_file) as (link, events):
        return await _one(link, events, 0, prompt, Sampling(), max_new, 1, set(bundle.manifest.eos_ids), silence)


@asynccontextmanager
async def _dialled(
    server: str, bundle: Bundle, token: str | None = None, ca_file: Path | None = None
) -> AsyncIterator[tuple[Link, asyncio.Queue[LinkEvent]]]:
    """Yield a link that is up, and its events from then on."""
    manifest = bundle.manifest
    events: asyncio.Queue[LinkEvent] = asyncio.Queue()
    hello = Hello(PROTOCOL_VERSION, manifest.target_hash, manifest.drafter_hash, "outrider-baseline")
    link = Link(server, hello, events.put_nowait, token, ca_file)
    task = asyncio.create_task(link.run())
    try:
        while not isinstance(event := await asyncio.wait_for(events.get(), 30), LinkUp):
            if isinstance(event, LinkDown) and event.refused:
                raise LinkRefused(event.reason)
        yield link, events
    finally:
        task.cancel()


async def _one(
    link: Link,
    events: asyncio.Queue[LinkEvent],
    stream: int,
    prompt: list[int],
    sampling: Sampling,
    max_new: int,
    at_once: int,
    eos: set[int],
    silence: float = GIVE_UP,
) -> PlainAnswer:
    """Request one answer. at_once: tokens requested in one call."""
    began, first, calls = time.monotonic(), 0.0, 0
    up, down = link.traffic.up, link.traffic.down
    tokens: list[int] = []
    session = secrets.token_bytes(16)

    def ask(afresh: bool) -> None:
        nonlocal calls
        text = prompt + tokens
        if afresh:  # `have` claims all feature rows, so that none are sent
            link.send(Open(stream, session, calls, pack_ids(text), len(text) - 1, sampling))
        calls += 1
        link.send(Generate(stream, calls, len(text), min(at_once, max_new - len(tokens))))

    heard = began
    ask(afresh=True)
    while True:
        event = None
        try:
            event = await asyncio.wait_for(events.get(), silence)
        except TimeoutError:
            link.renew()
        if time.monotonic() - heard > max(silence, GIVE_UP):
            raise TimeoutError(f"the verifier at {link.url} has said nothing for {time.monotonic() - heard:.0f} s")
        if isinstance(event, LinkDown) and event.refused:
            raise LinkRefused(event.reason)
        if isinstance(event, LinkUp):
            ask(afresh=True)
        if not isinstance(event, Arrived) or getattr(event.message, "stream", stream) != stream:
            continue
        heard = time.monotonic()
        if isinstance(event.message, Error):
            raise RuntimeError(f"the verifier answered: {event.message.text}")
        if isinstance(event.message, Verdict):
            first = first or heard - began
            tokens.append(event.message.bonus)
            if event.message.bonus in eos or event.message.finish != FINISH_NONE or len(tokens) == max_new:
                break
            if at_once == 1:
                ask(afresh=False)
    seconds = time.monotonic() - began
    link.send(Cancel(stream))
    link.send(Close(stream))
    return PlainAnswer(tokens, seconds, first, calls, link.traffic.up - up, link.traffic.down - down)
