"""The command `outrider`: one front door to the device, the verifier and the exporter.

Each subcommand reads its own options; nothing heavy is imported before it is chosen.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from outrider import __version__
from outrider.hidden import hidden_package

#: subcommand -> one line of help, in the order they are shown
COMMANDS = {
    "chat": "talk with the model in this terminal, turn by turn",
    "generate": "answer one prompt",
    "serve": "give other programs an OpenAI-style endpoint on this device",
    "verifier": "run the full model for devices (the cloud side)",
    "export": "train a drafter, write the bundle (folder) an app ships, check and measure it",
    "models": "list the models on this machine, and delete them to free disk space",
    "doctor": "check bundle, engine, server, round trip, clock and versions, and say how to fix problems",
}
#: what other tools call them
HABITS = {
    "run": "chat",
    "complete": "generate",
    "server": "verifier",
    "check": "doctor",
    "list": "models",
    "ls": "models",
}
#: commands whose help comes from another package -> an example to begin it with
EXAMPLES = {
    "verifier": "outrider verifier --port 8765 --kv-tokens 32768",
    "export": "outrider export bundle --drafter drafters/mine --output-dir build/bundle",
}
HELP = """\
examples:
  outrider chat                                talk with the default model in this terminal
  outrider generate "Why is the sky blue?"     answer one prompt
  outrider serve                               an OpenAI-style endpoint on http://127.0.0.1:8766/v1
The first start prepares the model in a cache. --server HOST:PORT uses a verifier elsewhere.

usage: outrider COMMAND [OPTIONS]       outrider COMMAND --help shows the options of a command
       outrider --version

commands:
""" + "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if command in ("-V", "--version"):
        print(f"outrider {__version__}")
        return 0
    if command not in COMMANDS:
        near = [HABITS[command]] if command in HABITS else difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean `outrider {near[0]}`?" if near else "`outrider --help` lists them"
        print(f"outrider: there is no command {command!r}; {hint}", file=sys.stderr)
        return 2
    try:
        if command in EXAMPLES and rest[:1] in (["-h"], ["--help"]):
            print(f"example:\n  {EXAMPLES[command]}\n")
        if command in ("verifier", "export") and (reason := hidden_package()):
            print(f"outrider: {reason}", file=sys.stderr)
            return 1
        if command == "verifier":
            from cloud.verifier import main as run_verifier

            return run_verifier(rest, "outrider verifier")
        if command == "export":
            from export.__main__ import main as run_export

            return run_export(rest, "outrider export")
        if command == "models":
            from outrider.cli.models import main as run_models

            return run_models(rest)
        from outrider.cli.device import main as run_device

        return run_device([command, *rest])
    except KeyboardInterrupt:  # while packages are still being imported
        return 130
    except ImportError as error:
        if reason := hidden_package(error):
            print(f"outrider: {reason}", file=sys.stderr)
            return 1
        missing = (error.name or "").partition(".")[0]
        extra = {"verifier": "cloud", "export": "export"}.get(command, "edge")
        text = f"outrider {command} needs the package {missing!r}; run: pip install 'outrider[{extra}]'"
        print(text, file=sys.stderr)
        return 1
