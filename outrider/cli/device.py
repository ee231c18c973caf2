"""`outrider generate`, `chat`, `serve` and `doctor`: the runtime in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from edge_runtime.events import Event
from edge_runtime.link import LinkRefused
from edge_runtime.policy import Policy
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.transport import LinkMaker
from edge_runtime.tuning import LARGEST
from edge_runtime.worker import DrafterFailed
from outrider.cli.terminal import Journal, show_answer, summary
from outrider_core.drafting.bundle import Bundle, BundleError, open_bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.engines import RUNTIMES

EPILOG = """\
Verified text is plain; text the device wrote alone is yellow and underlined until the verifier has seen it.

examples:
  outrider generate --bundle build/bundle --server 127.0.0.1:8765 "Why is the sky blue?"
  outrider chat --bundle build/bundle --server 127.0.0.1:8765
  outrider chat --bundle build/bundle --local
  outrider serve --server 127.0.0.1:8765          then ask http://127.0.0.1:8766/v1
  outrider doctor --server 127.0.0.1:8765
  outrider generate --bundle build/bundle "Works offline too, less cleverly."
"""
TOKEN_HELP = "for a verifier that asks for one; default: $OUTRIDER_TOKEN, which others on this machine do not see"
LOCAL_HELP = "run the full model in this process too: no network; needs outrider[cloud] and takes the model's memory"
THREADS_HELP = (
    "threads of the drafter's engine, and with --local of the target as well: they take turns; "
    "0 = all cores, for the target all but one"
)
POLICIES = ["prefer-cloud", "prefer-device", "cloud-only", "device-only"]
POLICY_HELP = (
    "prefer-cloud: the device writes where the verifier is silent; prefer-device: it writes at once and is corrected; "
    "cloud-only: never; device-only: nobody is asked"
)
RETURN_HELP = "when the link is back: put right what the device wrote alone, or keep it as it is"
OFFLINE_HELP = "without a link: write to the end, or pause where the drafter becomes unsure"
KEY_HELP = "Bearer token that requests must carry; default: $OUTRIDER_KEY, or none"
UNVERIFIED_HELP = (
    "text that no verifier has seen: becomes content at the end of an answer that has to end without one, or never; "
    "until then it travels beside the content, in the field `outrider`"
)
#: flags that say what --local loads
LOCAL_FLAGS = ("target", "drafter", "dtype")


class LocalError(RuntimeError):
    """The full model cannot run in this process. One line that says what to do."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Draft on this device, verify in the cloud, never stop.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("generate", "answer one prompt"),
        ("chat", "talk, turn by turn"),
        ("serve", "give other programs an OpenAI-style endpoint on this device"),
    ):
        command = commands.add_parser(
            name, help=text, description=text.capitalize() + ".", formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.add_argument("--bundle", type=Path, default=Path("build/bundle"), help="folder that export wrote")
        add_verifier_options(command)
        add_device_options(command)
        if name == "serve":
            add_endpoint_options(command)
        else:
            add_answer_options(command)
        command.add_argument("--nodes", type=int, default=LARGEST.nodes, help="nodes of the largest draft trees")
        command.add_argument("--depth", type=int, default=LARGEST.depth, help="levels of the deepest draft trees")
        command.add_argument("--policy", choices=POLICIES, default="prefer-cloud", help=POLICY_HELP)
        command.add_argument("--on-return", choices=["repair", "keep"], default="repair", help=RETURN_HELP)
        command.add_argument("--offline", choices=["continue", "pause"], default="continue", help=OFFLINE_HELP)
        command.add_argument("--mode", choices=["tree", "stream"], default=None,
                             help="send trees, or let the target stream; default: whichever is faster")  # fmt: skip
        if name == "chat":
            command.add_argument("--journal", type=Path, default=None, metavar="FILE",
                                 help="keep the chat there, and go on with it, even in mid-answer")  # fmt: skip
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


def add_answer_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-new-tokens", type=int, default=256)
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--top-k", type=int, default=0, help="0 keeps every token")
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--seed", type=int, default=None, help="same seed, same text; default: random")
    command.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="text that ends an answer")


def add_endpoint_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="beyond loopback: with --key alone")
    command.add_argument("--port", type=int, default=8766)
    command.add_argument("--key", default=None, help=KEY_HELP)
    command.add_argument("--allow-origin", nargs="+", default=[], metavar="URL", help="pages that may ask")
    command.add_argument("--unverified", choices=["end", "never"], default="end", help=UNVERIFIED_HELP)


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


def open_server(options: argparse.Namespace, bundle: Bundle) -> AbstractContextManager[str | LinkMaker | None]:
    """What --server or --local names; entered, it answers. Raises LocalError."""
    if not options.local:
        return nullcontext(options.server)
    try:
        from outrider.local import LocalVerifier, log_errors_only
        from outrider_core.models.moa import DrafterError
        from outrider_core.models.target import TargetError
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


def open_runtime(options: argparse.Namespace, bundle: Bundle, server: str | LinkMaker | None) -> EdgeRuntime:
    policy = Policy(options.policy, options.on_return, options.offline)
    shape = TreeShape(nodes=options.nodes, depth=options.depth)
    return EdgeRuntime(
        bundle, server, policy=policy, threads=options.threads, shape=shape,
        engine=options.engine, mode=options.mode, token=options.token or os.environ.get("OUTRIDER_TOKEN"),
        ca_file=options.ca_file,
    )  # fmt: skip


def ask(
    runtime: EdgeRuntime, messages: list[dict[str, str]], options: argparse.Namespace
) -> AsyncGenerator[Event, None]:
    return runtime.generate(
        messages, max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_k=options.top_k,
        top_p=options.top_p, min_p=options.min_p, seed=options.seed, stop=options.stop,
    )  # fmt: skip


async def generate(options: argparse.Namespace, bundle: Bundle, server: str | LinkMaker | None) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    console = Console(stderr=options.json)
    messages = [{"role": "user", "content": prompt}]
    async with open_runtime(options, bundle, server) as runtime:
        if not server:
            console.print(
                "no --server, no --local: everything below is the drafter's own, unverified text", style="dim"
            )
        event = await show_answer(
            runtime, ask(runtime, messages, options), console, local=options.local, messages=messages,
            journal=Journal(None),
        )  # fmt: skip
        if event is None:
            return 130
        if options.json:
            text = {"text": event.verified + event.provisional, "verified_text": event.verified}
            print(json.dumps({**text, "reason": event.reason, "token_ids": event.token_ids, **event.stats.as_dict()}))
        else:
            console.print(summary(event), style="dim", highlight=False)
    return 0


async def chat(options: argparse.Namespace, bundle: Bundle, server: str | LinkMaker | None) -> int:
    console, journal = Console(), Journal(options.journal)
    messages, unfinished = journal.load()
    async with open_runtime(options, bundle, server) as runtime:
        console.print("Ctrl-C stops an answer, Ctrl-D or an empty line ends the chat.", style="dim")
        for message in messages:
            console.print(f"[dim]{message['role']}>[/] ", end="")
            console.print(message["content"], markup=False, highlight=False)
        while True:
            if unfinished:
                console.print("going on with the answer that was cut off", style="dim")
                events = runtime.resume(unfinished)
            else:
                try:
                    question = await asyncio.to_thread(input, "\nyou> ")
                except EOFError:
                    return 0
                if not question.strip():
                    return 0
                messages.append({"role": "user", "content": question})
                events = ask(runtime, messages, options)
            unfinished = None
            event = await show_answer(runtime, events, console, local=options.local, messages=messages, journal=journal)
            if event is None:
                console.print("stopped", style="dim")
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": event.verified + event.provisional})
                console.print(summary(event), style="dim", highlight=False)
            journal.save(messages, None)


async def serve(options: argparse.Namespace, bundle: Bundle, server: str | LinkMaker | None) -> int:
    try:
        from outrider.cli.serve import LOOPBACK, Endpoint, run
    except ImportError as error:
        raise LocalError(f"serve needs {error.name or error}; run: pip install 'outrider[serve]'") from None
    key = options.key or os.environ.get("OUTRIDER_KEY", "")
    if options.host not in LOOPBACK and not key:
        raise LocalError(f"{options.host} is open to other machines; give --key too, or serve on 127.0.0.1")
    endpoint = Endpoint(
        open_runtime(options, bundle, server), unverified=options.unverified, origins=options.allow_origin, key=key
    )
    print(f"{endpoint.model} on http://{options.host}:{options.port}/v1", file=sys.stderr, flush=True)
    await run(endpoint, options.host, options.port)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """The doctor's command."""
    from outrider.cli.doctor import examine, show

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
    run = {"generate": generate, "chat": chat, "serve": serve}[options.command]
    try:
        bundle = open_bundle(options.bundle)
        with open_server(options, bundle) as server:
            return asyncio.run(run(options, bundle, server))
    except (BundleError, DrafterFailed, LinkRefused, LocalError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
