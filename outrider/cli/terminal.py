"""Answers in a terminal: what is verified, provisional and taken back, and how the link is, at a glance."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from edge_runtime.events import Event, Finished, LinkState, RolledBack, Verified
from edge_runtime.runtime import EdgeRuntime

#: state -> (mark, words, style); a mark differs in shape as well as in colour
STATES = {
    "verified": ("●", "cloud-verified", "green"),
    "catching up": ("◐", "catching up", "yellow"),
    "alone": ("◑", "on its own", "yellow"),
    "waiting": ("○", "waiting", "red"),
    "connecting": ("○", "connecting", "dim"),
}
#: seconds that text which was taken back stays on the screen, struck through
GHOST_SECONDS = 1.5
#: seconds between two records of an answer
JOURNAL_SECONDS = 0.3


def render(event: Event) -> Text:
    """Verified text plain, provisional text yellow and underlined."""
    text = Text(event.verified)
    text.append(event.provisional, style="yellow underline")
    return text


class Screen:
    """One answer as it grows."""

    def __init__(self, runtime: EdgeRuntime, local: bool) -> None:
        self.runtime, self.local = runtime, local
        self.state, self.began = "connecting", time.monotonic()
        self.tokens = 0
        self.last = Event("", "")
        self._ghost, self._gone_at = "", 0.0

    def show(self, event: Event) -> None:
        match event:
            case LinkState(state=state):
                self.state = state
            case Verified(tokens=tokens):
                self.tokens += len(tokens)
            case RolledBack():
                before = self.last.verified + self.last.provisional
                after = event.verified + event.provisional
                self._ghost, self._gone_at = before[len(after) :], time.monotonic() + GHOST_SECONDS
        self.last = event

    def __rich__(self) -> Group:
        text = render(self.last)
        if self._ghost and time.monotonic() < self._gone_at:
            text.append(self._ghost, style="red strike")
        return Group(text, self.status())

    def status(self) -> Text:
        """Link, round trip, mode and speed in one line."""
        state = "catching up" if self.state == "verified" and self.last.provisional else self.state
        mark, words, style = STATES[state]
        if self.local and state == "verified":
            words = "verified"
        parts = [words]
        controller = self.runtime.controller
        if self.runtime.link and controller.pace.rtt and not self.local:
            parts.append(f"{1000 * controller.pace.rtt:.0f} ms away")
        if self.tokens:
            parts.append(f"{self.tokens / (time.monotonic() - self.began):.0f} tokens/s")
            parts.append("streaming" if controller.mode == "stream" else f"{controller.pace.tau:.1f} tokens a tree")
        return Text(f"{mark} " + " · ".join(parts), style=style)


def summary(event: Finished) -> str:
    stats = event.stats
    parts = [f"{stats.tokens} verified tokens", f"{stats.tokens_per_second:.1f}/s"]
    if stats.rounds:
        parts.append(f"{stats.rounds} rounds, {stats.tau:.2f} tokens a round")
    if stats.streamed:
        parts.append(f"{stats.streamed} streamed")
    if stats.provisional:
        parts.append(f"{stats.provisional} written alone ({stats.kept} kept, {stats.rolled_back} rolled back)")
    if stats.adopted:
        parts.append(f"{stats.adopted} adopted unverified")
    return ", ".join(parts) + f"; ended by {event.reason}"


class Journal:
    """A conversation and the answer on its way in a file, so that a killed terminal can go on. path None: nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._written = path, 0.0

    def load(self) -> tuple[list[dict[str, str]], dict[str, Any] | None]:
        """(messages, record of an unfinished answer or None). Raises ValueError on a file that is no journal."""
        if self._path is None or not self._path.exists():
            return [], None
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            return list(kept["messages"]), kept["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} is no journal of a chat ({error}); give another file") from None

    @property
    def due(self) -> bool:
        """Whether an answer on its way should be saved again."""
        return self._path is not None and time.monotonic() >= self._written + JOURNAL_SECONDS

    def save(self, messages: list[dict[str, str]], record: dict[str, Any] | None) -> None:
        """Replace the file in one step."""
        if self._path is None:
            return
        self._written = time.monotonic()
        aside = self._path.with_name(f".{self._path.name}.new")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump({"messages": messages, "answer": record}, file)
        aside.replace(self._path)


async def _until(stopped: asyncio.Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The events until there are no more or `stopped` is set, however long the next one takes."""
    stop = asyncio.create_task(stopped.wait())
    try:
        while True:
            step = asyncio.ensure_future(anext(events, None))
            await asyncio.wait({step, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
                return
            event = await step
            if event is None:
                return
            yield event
    finally:
        stop.cancel()


async def show_answer(
    runtime: EdgeRuntime, events: AsyncIterator[Event], console: Console, *, local: bool,
    messages: list[dict[str, str]], journal: Journal,
) -> Finished | None:  # fmt: skip
    """Show one answer; returns its last event, or None where Ctrl-C cancelled it."""
    screen, finished = Screen(runtime, local), None
    stopped = asyncio.Event()
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stopped.set)
    try:
        with Live(screen, console=console, refresh_per_second=12, vertical_overflow="visible") as live:
            async for event in _until(stopped, events):
                screen.show(event)
                if journal.due:
                    journal.save(messages, runtime.record())
                if isinstance(event, Finished):
                    finished = event
            live.update(render(screen.last))
    finally:
        await events.aclose()  # type: ignore[attr-defined]
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    if not console.is_terminal:
        console.print()
    return finished
