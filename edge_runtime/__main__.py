"""`python -m edge_runtime generate` and `chat`: the runtime in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from edge_runtime.bundle import BundleError
from edge_runtime.drafter import TreeShape
from edge_runtime.engines import RUNTIMES
from edge_runtime.link import LinkRefused
from edge_runtime.runtime import EdgeRuntime, Event, Finished, LinkState

EPILOG = """\
Verified text is plain; text the device wrote alone is yellow and underlined until the verifier has seen it.

examples:
  python -m edge_runtime generate --bundle build/bundle --server 127.0.0.1:8765 "Why is the sky blue?"
  python -m edge_runtime chat --bundle build/bundle --server 127.0.0.1:8765
  python -m edge_runtime generate --bundle build/bundle "Works offline too, less cleverly."
"""
TOKEN_HELP = "for a verifier that asks for one; default: $OUTRIDER_TOKEN, which others on this machine do not see"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m edge_runtime", description="Draft on this device, verify in the cloud, never stop.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("generate", "answer one prompt"), ("chat", "talk, turn by turn")):
        command = commands.add_parser(
            name, help=text, description=text.capitalize() + ".", formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.add_argument("--bundle", type=Path, default=Path("build/bundle"), help="folder that export wrote")
        command.add_argument("--server", default=None, help="host:port, ws://... or wss://...; without it: offline")
        command.add_argument("--token", default=None, help=TOKEN_HELP)
        command.add_argument("--ca-file", type=Path, default=None, help="PEM certificates to trust beside the system's")
        command.add_argument("--max-new-tokens", type=int, default=256)
        command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
        command.add_argument("--top-k", type=int, default=0, help="0 keeps every token")
        command.add_argument("--top-p", type=float, default=1.0)
        command.add_argument("--min-p", type=float, default=0.0)
        command.add_argument("--seed", type=int, default=None, help="same seed, same text; default: random")
        command.add_argument("--nodes", type=int, default=TreeShape.nodes, help="nodes of a draft tree")
        command.add_argument("--depth", type=int, default=TreeShape.depth, help="levels of a draft tree")
        command.add_argument("--engine", choices=list(RUNTIMES), default=None, help="default: what is there")
        command.add_argument("--threads", type=int, default=0, help="threads of the engine, 0 = all cores")
        if name == "generate":
            command.add_argument("--json", action="store_true", help="print text, token ids and figures as JSON")
            command.add_argument("prompt", help="the question, or - to read it from standard input")
    return parser


def render(event: Event) -> Text:
    text = Text(event.verified)
    text.append(event.provisional, style="yellow underline")
    return text


async def answer(
    runtime: EdgeRuntime, messages: list[dict[str, str]], options: argparse.Namespace, console: Console
) -> Finished:
    """Show one answer as it grows; returns its last event."""
    state = "connecting"
    last: Finished | None = None
    with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as live:
        async for event in runtime.generate(
            messages, max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_k=options.top_k,
            top_p=options.top_p, min_p=options.min_p, seed=options.seed,
        ):  # fmt: skip
            if isinstance(event, LinkState):
                state = event.state
            if isinstance(event, Finished):
                last = event
            badge = {"verified": "[cloud-verified]", "alone": "[on its own]"}.get(state, "[connecting]")
            live.update(render(event) if last else Text.assemble(render(event), (f"  {badge}", "dim")))
    if not console.is_terminal:
        console.print()
    assert last is not None, "generate() always ends with Finished"
    return last


def summary(event: Finished) -> str:
    stats = event.stats
    parts = [f"{stats.tokens} verified tokens", f"{stats.tokens_per_second:.1f}/s"]
    if stats.rounds:
        parts.append(f"{stats.rounds} rounds, {stats.tau:.2f} tokens a round")
    if stats.provisional:
        parts.append(f"{stats.provisional} written alone ({stats.kept} kept, {stats.rolled_back} rolled back)")
    return ", ".join(parts) + f"; ended by {event.reason}"


def open_runtime(options: argparse.Namespace) -> EdgeRuntime:
    shape = TreeShape(nodes=options.nodes, depth=options.depth)
    token = options.token or os.environ.get("OUTRIDER_TOKEN")
    return EdgeRuntime.from_bundle(
        options.bundle, options.server, threads=options.threads, shape=shape, engine=options.engine, token=token,
        ca_file=options.ca_file,
    )  # fmt: skip


async def generate(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    console = Console(stderr=options.json)
    async with open_runtime(options) as runtime:
        if not options.server:
            console.print("no --server: everything below is the drafter's own, unverified text", style="dim")
        event = await answer(runtime, [{"role": "user", "content": prompt}], options, console)
        if options.json:
            text = {"text": event.verified + event.provisional, "verified_text": event.verified}
            print(json.dumps({**text, "reason": event.reason, "token_ids": event.token_ids, **event.stats.as_dict()}))
        else:
            console.print(summary(event), style="dim", highlight=False)
    return 0


async def chat(options: argparse.Namespace) -> int:
    console = Console()
    messages: list[dict[str, str]] = []
    async with open_runtime(options) as runtime:
        console.print("Ctrl-D or an empty line ends the chat.", style="dim")
        while True:
            try:
                question = await asyncio.to_thread(input, "\nyou> ")
            except EOFError:
                return 0
            if not question.strip():
                return 0
            messages.append({"role": "user", "content": question})
            event = await answer(runtime, messages, options, console)
            messages.append({"role": "assistant", "content": event.verified + event.provisional})
            console.print(summary(event), style="dim", highlight=False)


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        return asyncio.run((generate if options.command == "generate" else chat)(options))
    except (BundleError, LinkRefused, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
