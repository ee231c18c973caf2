"""Answers in a terminal: show verified, provisional and rolled-back text, and the state of the link.

If the output is not a terminal, only the answer's text is written, as it is verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from edge_runtime.events import Event, Finished, HandedOver, LinkState, RolledBack, Verified
from edge_runtime.runtime import EdgeRuntime
from outrider.cli.reach import Reach
from outrider_core.protocol.ending import COMPLETE

#: state -> (mark, words, style); a mark differs in shape as well as in colour
STATES = {
    "verified": ("●", "cloud-verified", "green"),
    "catching up": ("◐", "catching up", "yellow"),
    "alone": ("◑", "on its own", "yellow"),
    "waiting": ("○", "waiting", "red"),
    "connecting": ("○", "connecting", "dim"),
}
#: seconds that rolled-back text stays on the screen, struck through
GHOST_SECONDS = 1.5
REFRESH_SECONDS = 1 / 12
#: removes characters that could move the cursor or worse
CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


@dataclass(frozen=True)
class Output:
    """answer: console of the text, None: nowhere; notices: console of figures and everything else."""

    answer: Console | None
    notices: Console

    @classmethod
    def standard(cls, *, json: bool = False) -> Output:
        """Return the answer on stdout, the rest on stderr. json: stdout is kept free; a terminal on stderr shows it."""
        notices = Console(stderr=True)
        if json:
            return cls(notices if notices.is_terminal else None, notices)
        return cls(Console(), notices)

    def note(self, text: str) -> None:
        """Print a figure or a remark between two answers."""
        self.notices.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        """Print a notice. Not through `notices`: while an answer is drawn, rich prints that above it."""
        print(printable(text), file=sys.stderr, flush=True)


class Screen:
    """Shows a growing answer. Full verified lines scroll out of it, so it never outgrows the window."""

    def __init__(self, runtime: EdgeRuntime, local: bool) -> None:
        self.runtime, self.local = runtime, local
        self.state, self.why, self.began = "connecting", "", time.monotonic()
        self.writer = "drafter"  # if the device writes offline
        self.tokens = 0
        self.last = Event("", "")
        self._ghost, self._gone_at = "", 0.0
        self._settled = 0  # characters of the verified text that are printed permanently

    def show(self, event: Event) -> None:
        match event:
            case LinkState(state=state, detail=detail):
                self.state, self.why = state, "" if state == "verified" else detail
                self.writer = "drafter" if state == "verified" else self.writer
            case HandedOver(writer=writer, detail=detail):
                self.writer, self.why = writer, detail or self.why
            case Verified(tokens=tokens):
                self.tokens += len(tokens)
            case RolledBack():
                before = self.last.verified + self.last.provisional
                after = event.verified + event.provisional
                self._ghost, self._gone_at = before[len(after) :], time.monotonic() + GHOST_SECONDS
        self.last = event

    def settle(self, console: Console) -> list[Text]:
        """Return lines of the verified text that can no longer change; each is returned once, to be printed."""
        verified = printable(self.last.verified)
        *full, _ = Text(verified[self._settled :]).wrap(console, console.width)
        for line in full:
            end = self._settled + len(line.plain)
            while verified[end] != "\n" and verified[end].isspace():  # dropped at the line break
                end += 1
            self._settled = end + (verified[end] == "\n")
        return full

    def rest(self) -> Text:
        """Return the text not yet printed permanently: verified plain, provisional yellow and underlined."""
        text = Text(printable(self.last.verified)[self._settled :])
        text.append(printable(self.last.provisional), style="yellow underline")
        return text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.rest()
        if self._ghost and time.monotonic() < self._gone_at:
            text.append(printable(self._ghost), style="red strike")
        window = max(1, console.height - 2)
        yield from text.wrap(console, options.max_width)[-window:]
        yield self.status()

    def status(self) -> Text:
        """Return link, why it is down, round trip, mode and speed in one line."""
        state = "catching up" if self.state == "verified" and self.last.provisional else self.state
        mark, words, style = STATES[state]
        if self.local and state == "verified":
            words = "verified"
        if state == "alone":
            words = f"{words} ({self.writer})"
        parts = [words, printable(self.why)] if self.why else [words]
        controller = self.runtime.controller
        if self.runtime.link and controller.costs.rtt and not self.local:
            parts.append(f"{1000 * controller.costs.rtt:.0f} ms away")
        if self.tokens:
            parts.append(f"{self.tokens / (time.monotonic() - self.began):.0f} tokens/s")
            parts.append("streaming" if controller.arm == "stream" else f"{controller.tree.tau:.1f} tokens a tree")
        return Text(f"{mark} " + " · ".join(parts), style=style, no_wrap=True, overflow="ellipsis")


def printable(text: str) -> str:
    """Make text printable: spaces for tabs, and no control characters but line ends."""
    return text.translate(CONTROL).expandtabs(4)


def summary(event: Finished) -> str:
    stats = event.stats
    parts = [f"{stats.tokens} verified tokens", f"{stats.tokens_per_second:.1f}/s"]
    if stats.rounds:
        parts.append(f"{stats.rounds} rounds, {stats.tau:.2f} tokens a round")
    if stats.streamed:
        parts.append(f"{stats.streamed} streamed")
    if stats.provisional:
        by = f", {stats.understudy} by the understudy" if stats.understudy else ""
        parts.append(f"{stats.provisional} written offline{by} ({stats.kept} kept, {stats.rolled_back} rolled back)")
    if stats.adopted:
        parts.append(f"{stats.adopted} adopted unverified")
    why = f": {event.detail}" if event.detail and event.reason not in COMPLETE else ""
    return ", ".join(parts) + f"; ended by {event.reason}{why}"


async def _until(stopped: asyncio.Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yield events until there are no more or `stopped` is set, however long the next one takes."""
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
    runtime: EdgeRuntime,
    events: AsyncGenerator[Event, None],
    output: Output,
    reach: Reach,
    stopped: asyncio.Event,
    *,
    local: bool = False,
    each: Callable[[Event], None] = lambda event: None,
) -> Finished | None:
    """Show one answer; return its last event, or None if Ctrl-C or `reach` set `stopped`.

    each: called with each event.
    """
    finished = None
    watch = asyncio.create_task(reach.watch(stopped))
    try:
        async with _canvas(runtime, output.answer, local) as show:
            async for event in _until(stopped, events):
                show(event)
                each(event)
                if isinstance(event, Finished):
                    finished = event
    finally:
        watch.cancel()
        await events.aclose()
        stopped.clear()
    return finished


def _canvas(
    runtime: EdgeRuntime, console: Console | None, local: bool
) -> contextlib.AbstractAsyncContextManager[Callable[[Event], None]]:
    """Return a context that draws events."""
    if console is None:
        return contextlib.nullcontext(lambda event: None)
    return _drawn(Screen(runtime, local), console) if console.is_terminal else _written(console)


@contextlib.asynccontextmanager
async def _drawn(screen: Screen, console: Console) -> AsyncIterator[Callable[[Event], None]]:
    """Draw the answer on a terminal as it changes; its full lines scroll up.

    Only the event loop draws: rich's own refresh thread conflicts with a line printed meanwhile.
    """

    def show(event: Event) -> None:
        screen.show(event)
        for line in screen.settle(console):
            console.print(line, highlight=False)

    async def refresh() -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            live.refresh()

    with Live(screen, console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()) as live:
        refreshing = asyncio.create_task(refresh())
        try:
            yield show
        finally:
            refreshing.cancel()
            live.update(screen.rest())


@contextlib.asynccontextmanager
async def _written(console: Console) -> AsyncIterator[Callable[[Event], None]]:
    """Write verified text to a pipe or a file as it comes, and unverified text at the end. Nothing is wrapped."""
    file, last = console.file, Event("", "")

    def show(event: Event) -> None:
        nonlocal last
        file.write(event.verified[len(last.verified) :])
        file.flush()
        last = event

    try:
        yield show
    finally:
        file.write(last.provisional + "\n")
        file.flush()
