"""The command line of `outrider generate`, `chat`, `serve` and `doctor`: flags in, typed options out."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from edge_runtime.arguments import checked_sampling
from outrider import __version__
from outrider.cli.options import (
    ChatOptions,
    DoctorOptions,
    Flag,
    GenerateOptions,
    Options,
    SamplingOptions,
    ServeOptions,
    WritingOptions,
)


class Command(NamedTuple):
    """options: of the command. examples: without the program's name."""

    options: type[Options]
    text: str
    examples: Sequence[str]


COMMANDS = {
    "generate": Command(
        GenerateOptions,
        "answer one prompt",
        [
            'generate "Why is the sky blue?"',
            'generate --bundle build/bundle --server 127.0.0.1:8765 "Why is the sky blue?"',
            'generate --bundle build/bundle "Works offline too, less cleverly."',
        ],
    ),
    "chat": Command(
        ChatOptions,
        "talk with the model in this terminal, turn by turn",
        ["chat", "chat --bundle build/bundle --server 127.0.0.1:8765"],
    ),
    "serve": Command(
        ServeOptions,
        "give other programs an OpenAI-style endpoint on this device",
        [
            "serve     then ask http://127.0.0.1:8766/v1",
            "serve --bundle build/bundle --server 127.0.0.1:8765",
        ],
    ),
    "doctor": Command(
        DoctorOptions,
        "check bundle, engine, server, round trip, clock and versions, and say how to fix problems",
        ["doctor --bundle build/bundle --server 127.0.0.1:8765", "doctor --model Qwen3-0.6B-Q8_0.gguf"],
    ),
}
LEGEND = "Verified text is plain; offline text is yellow and underlined until the verifier has seen it."
EXIT_STATUS = (
    "exit status: 0 answered, 1 an error, 2 a wrong command line, 3 part of the answer is\n"
    "unverified, 4 the server refused the prompt, 130 stopped by Ctrl-C"
)
#: flags that configure the model of --local
LOCAL_FLAGS = ("model", "drafter", "dtype")


class Parser(argparse.ArgumentParser):
    """Help begins with examples."""

    def __init__(self, examples: Sequence[str] = (), **options: object) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)  # type: ignore[arg-type]
        self.examples = examples

    def format_help(self) -> str:
        program = self.prog.rpartition(" ")[0] if self.prog.rpartition(" ")[2] in COMMANDS else self.prog
        lines = "".join(f"  {program} {example}\n" for example in self.examples)
        return (f"example{'s' if len(self.examples) > 1 else ''}:\n{lines}\n" if lines else "") + super().format_help()


class HelpFormatter(argparse.HelpFormatter):
    """Shows defaults, if there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if (
            action.default in (None, False, (), "", argparse.SUPPRESS)
            or action.help is None
            or "default:" in action.help
        ):
            return action.help
        return f"{action.help} (default: %(default)s)"


def parse(argv: Sequence[str] | None, prog: str) -> Options:
    """Parse the command in `argv`; prints help and exits as argparse does. prog: how it was called."""
    parser, commands = build_parsers(prog)
    given = vars(parser.parse_args(argv))
    name = given.pop("command")
    try:
        options = COMMANDS[name].options(**given)
        if isinstance(options, WritingOptions) and not options.in_process:
            for flag in LOCAL_FLAGS:
                if getattr(options, flag) is not None:
                    raise ValueError(f"--{flag} configures --local; give --local too")
        if isinstance(options, SamplingOptions):
            checked_sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
    except ValueError as error:
        commands[name].error(str(error))
    return options


def build_parsers(prog: str) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of all commands, and each command's own."""
    parser = Parser(
        examples=[example for command in COMMANDS.values() for example in command.examples],
        prog=prog,
        description="Draft on this device, verify in the cloud, never stop.",
        epilog=LEGEND,
    )
    parser.add_argument("-V", "--version", action="version", version=f"outrider {__version__}")
    chosen = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    commands: dict[str, Parser] = {}
    for name, (options, text, examples) in COMMANDS.items():
        commands[name] = command = chosen.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            examples=examples,
            epilog=EXIT_STATUS if name == "generate" else None,
        )
        add_flags(command, options)
    return parser, commands


def add_flags(command: argparse.ArgumentParser, options: type[Options]) -> None:
    """Add a flag for each field of `options`, and the prompt if there is one."""
    exclusive = command.add_mutually_exclusive_group()
    for each in fields(options):
        if each.default is MISSING:
            text = "the question; - stands for standard input: cat notes | outrider generate summarise: -"
            command.add_argument(each.name, nargs="+", help=text)
            continue
        flag: Flag = each.metadata["flag"]
        default, text = each.default, flag.text
        if flag.env:
            default, text = os.environ.get(flag.env, default), f"{text}; default: ${flag.env}"
        more: dict[str, Any] = {"metavar": flag.metavar, "type": flag.read, "choices": flag.choices or None}
        if default is False:
            more = {"action": "store_true"}
        elif isinstance(default, tuple):
            more = {"metavar": flag.metavar or "TEXT", "action": _Several}
        place = exclusive if flag.exclusive else command
        place.add_argument(f"--{each.name.replace('_', '-')}", default=default, help=text, **more)


class _Several(argparse.Action):
    """A flag that may be given more than once."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))
