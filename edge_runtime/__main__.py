"""`python -m edge_runtime generate`, `chat` and `doctor`: the runtime in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from edge_runtime.bundle import Bundle, BundleError, open_bundle
from edge_runtime.drafter import TreeShape
from edge_runtime.engines import RUNTIMES
from edge_runtime.events import Event, Finished, LinkState
from edge_runtime.link import LinkRefused
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.transport import Server

EPILOG = """\
Verified text is plain; text the device wrote alone is yellow and underlined until the verifier has seen it.

examples:
  python -m edge_runtime generate --bundle build/bundle --server 127.0.0.1:8765 "Why is the sky blue?"
  python -m edge_runtime chat --bundle build/bundle --server 127.0.0.1:8765
  python -m edge_runtime chat --bundle build/bundle --local
  python -m edge_runtime doctor --server 127.0.0.1:8765
  python -m edge_runtime generate --bundle build/bundle "Works offline too, less cleverly."
"""
TOKEN_HELP = "for a verifier that asks for one; default: $OUTRIDER_TOKEN, which others on this machine do not see"
LOCAL_HELP = "run the full model in this process too: no network; needs outrider[cloud] and takes the model's memory"
THREADS_HELP = (
    "threads of the drafter's engine, and with --local of the target as well: they take turns; "
    "0 = all cores, for the target all but one"
)
#: flags that say what --local loads
LOCAL_FLAGS = ("target", "drafter", "dtype")


class LocalError(RuntimeError):
    """The full model cannot run in this process. One line that says what to do."""


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
        add_verifier_options(command)
        add_device_options(command)
        command.add_argument("--max-new-tokens", type=int, default=256)
        command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
        command.add_argument("--top-k", type=int, default=0, help="0 keeps every token")
        command.add_argument("--top-p", type=float, default=1.0)
        command.add_argument("--min-p", type=float, default=0.0)
        command.add_argument("--seed", type=int, default=None, help="same seed, same text; default: random")
        command.add_argument("--nodes", type=int, default=TreeShape.nodes, help="nodes of a draft tree")
        command.add_argument("--depth", type=int, default=TreeShape.depth, help="levels of a draft tree")
        if name == "generate":
            command.add_argument("--json", action="store_true", help="print text, token ids and figures as JSON")
            command.add_argument("prompt", help="the question, or - to read it from standard input")
    doctor = commands.add_parser(
        "doctor", help="check bundle, engine, server, round trip, clock and versions, and say what to do",
        description="Look at everything that an answer needs, one thing after the other. Exit status 1 if one fails.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    doctor.add_argument("--bundle", type=Path, default=Path("build/bundle"), help="folder that export wrote")
    doctor.add_argument("--server", help="host:port, ws://... or wss://...")
    add_device_options(doctor)
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    return parser


def add_device_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--token", default=None, help=TOKEN_HELP)
    command.add_argument("--ca-file", type=Path, default=None, help="PEM certificates to trust beside the system's")
    command.add_argument("--engine", choices=list(RUNTIMES), default=None, help="default: what is there")
    command.add_argument("--threads", type=int, default=0, help=THREADS_HELP)


def add_verifier_options(command: argparse.ArgumentParser) -> None:
    """Where the full model is: --server, or --local and what that loads."""
    where = command.add_mutually_exclusive_group()
    where.add_argument("--server", help="host:port, ws://... or wss://...; without it and --local: offline")
    where.add_argument("--local", action="store_true", help=LOCAL_HELP)
    local = command.add_argument_group("with --local")
    local.add_argument("--target", help="alias, Hugging Face id or folder; default: the name in the bundle")
    local.add_argument("--drafter", type=Path, help="default: the one under drafters/ with the bundle's hash")
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    local.add_argument("--dtype", choices=dtypes, help="the target's number format; default: float32")


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
            verified = "[verified]" if options.local else "[cloud-verified]"
            badge = {"verified": verified, "alone": "[on its own]"}.get(state, "[connecting]")
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


def open_server(options: argparse.Namespace, bundle: Bundle) -> AbstractContextManager[str | Server | None]:
    """What --server or --local names; entered, it answers. Raises LocalError."""
    if not options.local:
        return nullcontext(options.server)
    try:
        from cloud.local import LocalVerifier, log_errors_only
        from models.moa import DrafterError
        from models.target import TargetError
    except ImportError as error:
        missing = error.name or error
        raise LocalError(f"--local needs {missing}, which is not here; run: pip install 'outrider[cloud]'") from None
    log_errors_only()
    try:
        with Console(stderr=True).status("loading the target"):
            return LocalVerifier.load(
                bundle, options.target, options.drafter, dtype=options.dtype or "float32", threads=options.threads
            )
    except (TargetError, DrafterError) as error:
        raise LocalError(str(error)) from None


def open_runtime(options: argparse.Namespace, bundle: Bundle, server: str | Server | None) -> EdgeRuntime:
    shape = TreeShape(nodes=options.nodes, depth=options.depth)
    token = options.token or os.environ.get("OUTRIDER_TOKEN")
    return EdgeRuntime(
        bundle, server, threads=options.threads, shape=shape, engine=options.engine, token=token,
        ca_file=options.ca_file,
    )  # fmt: skip


async def generate(options: argparse.Namespace, bundle: Bundle, server: str | Server | None) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    console = Console(stderr=options.json)
    async with open_runtime(options, bundle, server) as runtime:
        if not server:
            console.print(
                "no --server, no --local: everything below is the drafter's own, unverified text", style="dim"
            )
        event = await answer(runtime, [{"role": "user", "content": prompt}], options, console)
        if options.json:
            text = {"text": event.verified + event.provisional, "verified_text": event.verified}
            print(json.dumps({**text, "reason": event.reason, "token_ids": event.token_ids, **event.stats.as_dict()}))
        else:
            console.print(summary(event), style="dim", highlight=False)
    return 0


async def chat(options: argparse.Namespace, bundle: Bundle, server: str | Server | None) -> int:
    console = Console()
    messages: list[dict[str, str]] = []
    async with open_runtime(options, bundle, server) as runtime:
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


def doctor(options: argparse.Namespace) -> int:
    """The doctor's command."""
    from edge_runtime.doctor import examine, show

    console = Console(stderr=options.json)
    token = options.token or os.environ.get("OUTRIDER_TOKEN")
    looks = examine(
        options.bundle, options.server, token=token, ca_file=options.ca_file, engine=options.engine,
        threads=options.threads, tell=lambda finding: None if options.json else show([finding], console),
    )  # fmt: skip
    findings = asyncio.run(looks)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    return int(any(finding.level == "bad" for finding in findings))


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.command == "doctor":
        try:
            return doctor(options)
        except KeyboardInterrupt:
            return 130
    if not options.local and (given := [flag for flag in LOCAL_FLAGS if getattr(options, flag) is not None]):
        parser.error(f"--{given[0]} says what --local loads; give --local too")
    run = generate if options.command == "generate" else chat
    try:
        bundle = open_bundle(options.bundle)
        with open_server(options, bundle) as server:
            return asyncio.run(run(options, bundle, server))
    except (BundleError, LinkRefused, LocalError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
