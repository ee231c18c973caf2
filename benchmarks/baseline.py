"""Plain decoding on the same verifier: the target decodes alone and streams (the honest competitor)."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from edge_runtime.bundle import Bundle
from edge_runtime.link import Arrived, Link, LinkEvent, LinkRefused, LinkUp
from protocol.sampling import Sampling
from protocol.wire import (
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


@dataclass(frozen=True)
class PlainAnswer:
    """tokens: the target's answer. seconds: from OPEN to the last token; first_token_seconds: to the first."""

    tokens: list[int]
    seconds: float
    first_token_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


async def plain_decode(
    server: str, bundle: Bundle, prompts: list[list[int]], sampling: Sampling, max_new: int
) -> list[PlainAnswer]:
    """Let the verifier at `server` answer each prompt (token ids) alone, one after the other."""
    manifest = bundle.manifest
    events: asyncio.Queue[LinkEvent] = asyncio.Queue()
    hello = Hello(PROTOCOL_VERSION, manifest.target_hash, manifest.drafter_hash, "outrider-baseline")
    link = Link(server, hello, events.put_nowait)
    task = asyncio.create_task(link.run())
    try:
        while not isinstance(event := await asyncio.wait_for(events.get(), 30), LinkUp):
            if isinstance(event, LinkRefused):
                raise event
        answers = []
        for stream, prompt in enumerate(prompts):
            answers.append(await _one(link, events, stream, prompt, sampling, max_new, set(manifest.eos_ids)))
        return answers
    finally:
        task.cancel()


async def _one(
    link: Link, events: asyncio.Queue[LinkEvent], stream: int, prompt: list[int], sampling: Sampling, max_new: int,
    eos: set[int],
) -> PlainAnswer:  # fmt: skip
    began, first = time.monotonic(), 0.0
    tokens: list[int] = []
    have = len(prompt) - 1  # no feature rows, please
    await link.send(Open(stream, secrets.token_bytes(16), 0, pack_ids(prompt), have, sampling))
    await link.send(Generate(stream, 1, len(prompt), max_new))
    while len(tokens) < max_new:
        event = await asyncio.wait_for(events.get(), 60)
        if not isinstance(event, Arrived) or getattr(event.message, "stream", stream) != stream:
            continue
        if isinstance(event.message, Error):
            raise RuntimeError(f"the verifier answered: {event.message.text}")
        if isinstance(event.message, Verdict):
            first = first or time.monotonic() - began
            tokens.append(event.message.bonus)
            if event.message.bonus in eos or event.message.finish != FINISH_NONE:
                break
    seconds = time.monotonic() - began
    await link.send(Cancel(stream))
    await link.send(Close(stream))
    return PlainAnswer(tokens, seconds, first)
