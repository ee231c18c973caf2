"""The command line of `outrider generate`, `chat`, `serve` and `doctor`: flags in, typed options out."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_runtime.arguments import checked_sampling
from edge_runtime.session.policy import Policy
from edge_runtime.speed.tuning import LARGEST
from outrider import __version__
from outrider.cli.options import (
    AnswerOptions,
    CallOptions,
    ChatOptions,
    DeviceOptions,
    DoctorOptions,
    GenerateOptions,
    LocalOptions,
    Options,
    ServeOptions,
)
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.engines import RUNTIMES

#: command -> (one line of help, examples without the program's name)
COMMANDS = {
    "generate": (
        "answer one prompt",
        [
            'generate --bundle build/bundle --server 127.0.0.1:8765 "Why is the sky blue?"',
            'generate --bundle build/bundle "Works offline too, less cleverly."',
        ],
    ),
    "chat": (
        "talk, turn by turn",
        ["chat --bundle build/bundle --server 127.0.0.1:8765", "chat --bundle build/bundle --local"],
    ),
    "serve": (
        "give other programs an OpenAI-style endpoint on this device",
        ["serve --bundle build/bundle --server 127.0.0.1:8765     then ask http://127.0.0.1:8766/v1"],
    ),
    "doctor": (
        "check bundle, engine, server, round trip, clock and versions, and say what to do",
        ["doctor --bundle build/bundle --server 127.0.0.1:8765"],
    ),
}
LEGEND = "Verified text is plain; text the device wrote alone is yellow and underlined until the verifier has seen it."
EXIT_STATUS = (
    "exit status: 0 answered, 1 an error, 2 a wrong command line, 3 the server verified nothing, 130 stopped by Ctrl-C"
)
TOKEN_HELP = "for a verifier that asks for one; default: $OUTRIDER_TOKEN, which others on this machine do not see"
LOCAL_HELP = "run the full model in this process too: no network; needs outrider[local] and takes the model's memory"
THREADS_HELP = (
    "threads of the drafter's engine, and with --local of the target as well: they take turns; "
    "0 = all cores, for the target all but one (in 8 bits both of two)"
)
POLICIES = ["prefer-cloud", "prefer-device", "cloud-only", "device-only"]
POLICY_HELP = (
    "prefer-cloud: the device writes where the verifier is silent; prefer-device: it writes at once and is corrected; "
    "cloud-only: never; device-only: nobody is asked"
)
RETURN_HELP = "when the link is back: put right what the device wrote alone, or keep it as it is"
ALONE_HELP = (
    "without a link: let the understudy write to the end, and where there is none the drafter to the end of its "
    "sentence; write to the end, whoever writes; or pause where the writer becomes unsure"
)
UNDERSTUDY_HELP = (
    "the bundle's complete small model: cold: loaded when the verifier falls silent; warm: reads along, so that it can "
    "write at once, and drafts where that is faster; off: the drafter alone writes"
)
KEY_HELP = "Bearer token that requests must carry; default: $OUTRIDER_KEY, or none"
UNVERIFIED_HELP = (
    "text that no verifier has seen: becomes content at the end of an answer that has to end without one, or never; "
    "until then it travels beside the content, in the field `outrider`"
)
#: flags that say what --local loads
LOCAL_FLAGS = ("target", "drafter", "dtype")


class Parser(argparse.ArgumentParser):
    """Help begins with examples."""

    def __init__(self, examples: Sequence[str] = (), **options: object) -> None:
        super().__init__(formatter_class=HelpFormatter, **options)  # type: ignore[arg-type]
        self.examples = examples

    def format_help(self) -> str:
        program = self.prog.rpartition(" ")[0] if self.prog.rpartition(" ")[2] in COMMANDS else self.prog
        lines = "".join(f"  {program} {example}\n" for example in self.examples)
        return (f"example{'s' if len(self.examples) > 1 else ''}:\n{lines}\n" if lines else "") + super().format_help()


class HelpFormatter(argparse.HelpFormatter):
    """Names defaults, where there is one to name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS) or action.help is None or "default:" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def parse(argv: Sequence[str] | None, prog: str) -> Options:
    """Options of the command that `argv` names; prints help and exits as argparse does. prog: how it was called."""
    parser, commands = build_parsers(prog)
    flags = parser.parse_args(argv)
    command = commands[flags.command]
    if flags.command == "doctor":
        return DoctorOptions(_device(flags), flags.json)
    if not flags.local and (given := [flag for flag in LOCAL_FLAGS if getattr(flags, flag) is not None]):
        command.error(f"--{given[0]} says what --local loads; give --local too")
    try:
        runtime = _runtime(flags)
    except ValueError as error:
        command.error(str(error))
    if flags.command == "serve":
        key = flags.key or os.environ.get("OUTRIDER_KEY", "")
        return ServeOptions(runtime, flags.host, flags.port, key, flags.allow_origin, flags.unverified)
    try:
        checked_sampling(flags.temperature, flags.top_k, flags.top_p, flags.min_p, flags.seed)
    except ValueError as error:
        command.error(str(error))
    answer = AnswerOptions(
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        min_p=flags.min_p,
        seed=flags.seed,
        stop=flags.stop,
    )
    if flags.command == "chat":
        return ChatOptions(runtime, answer, flags.journal, flags.give_up)
    return GenerateOptions(runtime, answer, flags.prompt, flags.json, flags.give_up)


def build_parsers(prog: str) -> tuple[Parser, dict[str, Parser]]:
    """The parser of all commands, and each command's own."""
    parser = Parser(
        examples=[example for _, examples in COMMANDS.values() for example in examples],
        prog=prog,
        description="Draft on this device, verify in the cloud, never stop.",
        epilog=LEGEND,
    )
    parser.add_argument("-V", "--version", action="version", version=f"outrider {__version__}")
    chosen = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    commands: dict[str, Parser] = {}
    for name, (text, examples) in COMMANDS.items():
        command = chosen.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            examples=examples,
            epilog=EXIT_STATUS if name == "generate" else None,
        )
        commands[name] = command
        command.add_argument("--bundle", type=Path, default=Path("build/bundle"), help="folder that export wrote")
        if name == "doctor":
            command.add_argument("--server", help="host:port, ws://... or wss://...")
            add_device_flags(command)
            command.add_argument("--json", action="store_true", help="print what was found as JSON")
            continue
        add_verifier_flags(command)
        add_device_flags(command)
        if name == "serve":
            add_endpoint_flags(command)
        else:
            add_answer_flags(command)
        add_runtime_flags(command)
        if name == "chat":
            help_text = "keep the chat there, and go on with it, even in mid-answer"
            command.add_argument("--journal", type=file_to_write, default=None, metavar="FILE", help=help_text)
        if name == "generate":
            command.add_argument("--json", action="store_true", help="print text, token ids and figures as JSON")
            command.add_argument("prompt", help="the question, or - to read it from standard input")
    return parser, commands


def add_device_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--token", default=None, help=TOKEN_HELP)
    command.add_argument("--ca-file", type=Path, default=None, help="PEM certificates to trust beside the system's")
    command.add_argument("--engine", choices=list(RUNTIMES), default=None, help="default: what is installed")
    command.add_argument("--threads", type=at_least(0), default=0, metavar="N", help=THREADS_HELP)


def add_verifier_flags(command: argparse.ArgumentParser) -> None:
    """Where the full model is: --server, or --local and what that loads."""
    where = command.add_mutually_exclusive_group()
    where.add_argument("--server", help="host:port, ws://... or wss://...; without it and --local: --offline")
    where.add_argument("--offline", action="store_true", help="nobody is asked: the device writes by itself")
    where.add_argument("--local", action="store_true", help=LOCAL_HELP)
    local = command.add_argument_group("with --local")
    local.add_argument("--target", help="alias, Hugging Face id or folder; default: the name in the bundle")
    local.add_argument("--drafter", type=Path, help="default: the one under drafters/ with the bundle's hash")
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    dtype_help = "run the target in torch, in this number format; default: in 8 bits and without torch on a CPU"
    local.add_argument("--dtype", choices=dtypes, help=dtype_help)


def add_runtime_flags(command: argparse.ArgumentParser) -> None:
    nodes, depth = "nodes of the largest draft trees", "levels of the deepest draft trees"
    command.add_argument("--nodes", type=at_least(1), default=LARGEST.nodes, metavar="N", help=nodes)
    command.add_argument("--depth", type=at_least(1), default=LARGEST.depth, metavar="N", help=depth)
    command.add_argument("--policy", choices=POLICIES, default="prefer-cloud", help=POLICY_HELP)
    command.add_argument("--on-return", choices=["repair", "keep"], default="repair", help=RETURN_HELP)
    command.add_argument("--alone", choices=["sentence", "continue", "pause"], default="sentence", help=ALONE_HELP)
    command.add_argument("--understudy", choices=["cold", "warm", "off"], default="cold", help=UNDERSTUDY_HELP)
    mode = "send trees, or let the target stream; default: whichever is faster"
    command.add_argument("--mode", choices=["tree", "stream"], default=None, help=mode)
    lookup = "draft without looking up this text and earlier conversations"
    command.add_argument("--no-lookup", action="store_true", help=lookup)


def add_answer_flags(command: argparse.ArgumentParser) -> None:
    length = "verified tokens of an answer, at most"
    command.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help=length)
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--top-k", type=int, default=0, help="keep the likeliest K tokens; 0 keeps every token")
    command.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
    command.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest one's")
    command.add_argument("--seed", type=int, default=None, help="same seed, same text; default: random")
    give_up = "end an answer where there was no connection to --server for so long; default: 300"
    command.add_argument("--give-up", type=seconds, default=None, metavar="SECONDS", help=give_up)
    stop = "text that ends an answer and is not part of it; may be given more than once"
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)


def add_endpoint_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="beyond loopback: with --key alone")
    command.add_argument("--port", type=port, default=8766, help="TCP port")
    command.add_argument("--key", default=None, help=KEY_HELP)
    command.add_argument("--allow-origin", nargs="+", default=[], metavar="URL", help="pages that may ask")
    command.add_argument("--unverified", choices=["end", "never"], default="end", help=UNVERIFIED_HELP)


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `least` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}, not {text!r}")
        return number

    return read


def port(text: str) -> int:
    """An argparse type: a TCP port; 0: any that is free."""
    number = at_least(0)(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, at most 65535, not {text!r}")
    return number


def seconds(text: str) -> float:
    """An argparse type: a time above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0, not {text!r}")
    return number


def file_to_write(text: str) -> Path:
    """An argparse type: a file that exists or can be made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it, or name another file")
    return path


def _device(flags: argparse.Namespace) -> DeviceOptions:
    token = flags.token or os.environ.get("OUTRIDER_TOKEN")
    return DeviceOptions(flags.bundle, flags.server, token, flags.ca_file, flags.engine, flags.threads)


def _runtime(flags: argparse.Namespace) -> CallOptions:
    return CallOptions(
        device=_device(flags),
        local=LocalOptions(flags.target, flags.drafter, flags.dtype) if flags.local else None,
        policy=Policy(flags.policy, flags.on_return, flags.alone, understudy=flags.understudy),
        shape=TreeShape(nodes=flags.nodes, depth=flags.depth),
        mode=flags.mode,
        lookup=not flags.no_lookup,
    )
