"""Draw the README's moving picture of a cut from a real run: docs/cut-light.svg and docs/cut-dark.svg.

    python -m benchmarks.picture --bundle build/bundle

A real verifier process is killed in mid-answer and started again; what a user sees is recorded with its times. The
picture plays in real time, but for a pause where text is taken back and shorter waits where nothing changes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console

from cloud.process import VerifierProcess
from edge_runtime.events import Finished, LinkState, RolledBack
from edge_runtime.runtime import EdgeRuntime
from outrider_core.drafting.drafter import TreeShape

QUESTION = "Give me a plan for a weekend in the mountains."
MAX_NEW = 110
CUT_AFTER = 45  # verified tokens
ALONE = 30  # tokens written alone before the verifier is started again
#: seconds: a frame lasts at least, an unchanged picture at most; text that is taken back is struck out for so long
LEAST, MOST, STRUCK = 0.08, 1.5, 1.6
END = 4.0  # seconds that the last frame stays
COLUMNS, LINE, LEFT, TOP = 92, 20, 20, 84
BADGES = {
    "connecting": ("connecting", "dim"),
    "verified": ("\u25cf verified by the full model", "good"),
    "alone": ("\u25b2 link down: the device writes on alone", "warn"),
    "waiting": ("\u25b2 link down: waiting", "warn"),
}
THEMES = {
    "light": {"back": "#ffffff", "edge": "#d0d7de", "text": "#1f2328", "dim": "#656d76", "good": "#1a7f37",
              "warn": "#9a6700", "bad": "#cf222e"},
    "dark": {"back": "#0d1117", "edge": "#30363d", "text": "#e6edf3", "dim": "#8d96a0", "good": "#3fb950",
             "warn": "#d29922", "bad": "#f85149"},
}  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """What stands on the screen at `time` (seconds): verified text, then provisional text, perhaps struck out."""

    time: float
    verified: str
    provisional: str
    state: str
    note: str
    struck: bool = False


async def record(bundle: Path, drafter: Path) -> list[Frame]:
    """Ask a real verifier, kill it in mid-answer, start it again; every change of the screen in order."""
    verifier = VerifierProcess(drafter, Path("build/verifier.log"))
    frames = list[Frame]()
    state, note, last = "connecting", "", ""
    cut = back = False
    began = 0.0
    try:
        verifier.start()
        await asyncio.to_thread(verifier.wait_ready)
        async with EdgeRuntime.from_bundle(bundle, verifier.address, shape=TreeShape(nodes=12), mode="tree") as runtime:
            began = time.monotonic()
            async for event in runtime.generate(QUESTION, max_new_tokens=MAX_NEW):
                now = time.monotonic() - began
                state = event.state if isinstance(event, LinkState) else state
                if isinstance(event, RolledBack):
                    note = "taken back: the model goes on otherwise"
                    frames.append(Frame(now, event.verified, last, "verified", note, True))
                last = event.provisional
                frames.append(Frame(now, event.verified, event.provisional, state, note))
                if not cut and tokens(runtime, event.verified) >= CUT_AFTER:
                    verifier.kill()
                    cut, note = True, "the verifier was killed"
                if cut and not back and tokens(runtime, event.provisional) >= ALONE:
                    verifier.start()
                    back, note = True, "the verifier starts again"
                if back and state == "verified":
                    note = ""
                if isinstance(event, Finished):
                    note = f"{event.stats.tokens} tokens verified, {event.stats.kept} of those written alone kept"
                    frames.append(Frame(now, event.verified, event.provisional, state, note))
    finally:
        verifier.stop()
    return frames


def tokens(runtime: EdgeRuntime, text: str) -> int:
    return len(runtime.bundle.tokenizer.encode(text, add_special_tokens=False).ids)


def timeline(frames: list[Frame]) -> list[tuple[float, Frame]]:
    """(seconds shown, frame): flickers merged, long waits shortened, struck text held."""
    shown = list[tuple[float, Frame]]()
    for index, frame in enumerate(frames):
        following = frames[index + 1].time if index + 1 < len(frames) else frame.time
        seconds = STRUCK if frame.struck else min(MOST, following - frame.time)
        if index + 1 == len(frames):
            seconds = END
        elif seconds < LEAST and not frame.struck:
            continue
        shown.append((seconds, frame))
    return shown


def draw(frames: list[tuple[float, Frame]], theme: str) -> str:
    """An animated SVG; without animation, or where motion is not wanted, its last frame."""
    colours = THEMES[theme]
    total = sum(seconds for seconds, _ in frames)
    lines = max(len(layout(frame)) for _, frame in frames)
    width, height = 2 * LEFT + round(COLUMNS * 8.43), TOP + LINE * lines + 14
    style = [
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}",
        *(f".{name}{{fill:{colour}}}" for name, colour in colours.items() if name not in ("back", "edge")),
        ".p{text-decoration:underline}.s{text-decoration:line-through}.b{font-weight:bold}",
        f".f{{visibility:hidden;animation:{total:.2f}s step-end infinite}}",
    ]
    groups, start = [], 0.0
    for index, (seconds, frame) in enumerate(frames):
        begin, end = 100 * start / total, 100 * (start + seconds) / total
        before = "" if index == 0 else "0%{visibility:hidden}"
        after = "" if index + 1 == len(frames) else f"{end:.3f}%{{visibility:hidden}}"
        style.append(f"@keyframes k{index}{{{before}{begin:.3f}%{{visibility:visible}}{after}}}")
        groups.append(f'<g class="f" style="animation-name:k{index}">{body(frame)}</g>')
        start += seconds
    style.append("@media(prefers-reduced-motion){.f{animation:none!important}.f:last-of-type{visibility:visible}}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="An answer survives the loss of its verifier">\n<style>{"".join(style)}</style>\n'
        f'<rect width="{width - 2}" height="{height - 2}" x="1" y="1" rx="8" fill="{colours["back"]}" '
        f'stroke="{colours["edge"]}"/>\n'
        f'<text x="{LEFT}" y="30" class="text b">you&gt; {escape(QUESTION)}</text>\n' + "\n".join(groups) + "\n</svg>\n"
    )


def body(frame: Frame) -> str:
    badge, colour = BADGES[frame.state]
    note = f'<tspan class="dim">   {escape(frame.note)}</tspan>' if frame.note else ""
    parts = [f'<text x="{LEFT}" y="54" class="{colour}">{escape(badge)}{note}</text>']
    for row, pieces in enumerate(layout(frame)):
        spans = "".join(f'<tspan class="{kind}">{escape(text)}</tspan>' for text, kind in pieces)
        parts.append(f'<text x="{LEFT}" y="{TOP + LINE * row}">{spans}</text>')
    return "".join(parts)


def layout(frame: Frame) -> list[list[tuple[str, str]]]:
    """Rows of (text, class): the text wrapped at COLUMNS, told apart at the border of verified and provisional."""
    border, rows, at = len(frame.verified), [], 0
    text = frame.verified + frame.provisional
    kind = "bad s" if frame.struck else "warn p"
    for line in text.split("\n"):
        for piece in textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""]:
            own = max(0, min(len(piece), border - at))
            rows.append([(part, name) for part, name in ((piece[:own], "text"), (piece[own:], kind)) if part])
            at += len(piece)
        at += 1
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bundle", type=Path, default=Path("build/bundle"))
    parser.add_argument("--drafter", type=Path, default=Path("drafters/smollm2-135m-instruct-moa"))
    parser.add_argument("--output", type=Path, default=Path("docs/cut"), help="OUTPUT-light.svg, OUTPUT-dark.svg")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        with console.status("recording an answer, its cut and its return"):
            frames = timeline(asyncio.run(record(options.bundle, options.drafter)))
    except (RuntimeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for theme in THEMES:
        path = options.output.with_name(f"{options.output.name}-{theme}.svg")
        path.write_text(draw(frames, theme), encoding="utf-8")
        print(f"wrote {path}: {len(frames)} frames, {sum(seconds for seconds, _ in frames):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
