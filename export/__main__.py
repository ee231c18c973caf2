"""`python -m export`: train, ngrams, import, bundle, check, bench and target."""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from export.bundle.bundle_options import BenchOptions, BundleOptions, CheckOptions
from export.options import OptionsError, add_options, read_options
from export.target.target_options import TargetOptions
from export.train.train_command import add_train_options, describe_presets, next_command, read_train_options
from export.train.train_options import ImportOptions, NgramsOptions
from outrider_core.cache import why_inaccessible
from outrider_core.targets.source import TargetError

EPILOG = """\
examples:
  python -m export bundle --output-dir build/bundle                  the default drafter, for the default target
  python -m export train --prompts prompts.jsonl --output-dir drafters/mine
  python -m export import --source moa-llama3/ --target llama3/ --output-dir drafters/llama3
  python -m export bundle --drafter drafters/mine --output-dir build/bundle --dry-run
  python -m export bundle --drafter drafters/mine --output-dir build/bundle --format onnx,executorch --quant int4
  python -m export check build/bundle
  python -m export bench build/bundle
  python -m export target smollm2-135m-instruct --output-dir build/target
"""
TARGET_USAGE = """\
python -m export target smollm2-135m-instruct --output-dir build/target
       python -m export target models/qwen3-0.6b --output-dir build/qwen3 --bits 4 --prompts prompts.jsonl"""
TRAIN_USAGE = """\
python -m export train --prompts prompts.jsonl --output-dir drafters/mine
       python -m export train --self-prompts --output-dir drafters/mine --preset quick     no data set at all
       python -m export train --config train.toml --output-dir drafters/mine"""


@dataclass(frozen=True)
class ExportCommand:
    """A command of `export`. run: returns its exit status, None for 0."""

    options: type
    run: Callable[[Any], int | None]
    help: str
    description: str
    usage: str | None = None


def build_parser(prog: str = "python -m export") -> argparse.ArgumentParser:
    """Build the parser. prog: how the command was called."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train a drafter and write the bundle an app ships.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a MoA drafter on the target's own answers",
        usage=TRAIN_USAGE,
        description="Prompts are read, or written by the target itself (1); the target answers them (2); then a\n"
        "Mixture-of-Attentions drafter learns to predict those answers (3). All stages resume: after Ctrl-C\n"
        "or a kill, run the same command again.",
        epilog=describe_presets(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_train_options(train)
    train.set_defaults(refuse=train.error)
    for name, command in COMMANDS.items():
        add_options(
            commands.add_parser(name, help=command.help, description=command.description, usage=command.usage),
            command.options,
        )
    return parser


def run_bundle(options: BundleOptions) -> None:
    from export.quiet import quiet

    with quiet():
        from export.bundle.bundle import write_bundle
    write_bundle(options)


def run_check(options: CheckOptions) -> int:
    from export.quiet import quiet

    with quiet():
        from export.bundle.check import check_bundle
    broken = check_bundle(options)
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    if not broken:
        print("all bounds hold")
    return 1 if broken else 0


def run_import(options: ImportOptions) -> None:
    from export.train.reference_import import import_checkpoint
    from outrider_core.models.drafter_files import load_drafter

    ids = load_drafter(options.draft_vocab_from)[1]["draft_ids"] if options.draft_vocab_from else None
    config = import_checkpoint(
        options.source, options.target, options.output_dir, draft_vocab_ids=ids, max_context=options.max_context
    )
    print(
        f"wrote {options.output_dir}: width {config.hidden_size}, {config.draft_vocab_size} of {config.vocab_size} "
        f"tokens drafted, {len(config.target_layers)} target layers read; next: python -m export bundle"
    )


def run_target(options: TargetOptions) -> None:
    from export.target.target import write_target

    write_target(options)


def keep_freed_memory() -> None:
    """Tell glibc to reuse large freed blocks: training re-maps the same 50 MB tensors hundreds of times a
    second otherwise, and the page faults cost up to a third of the time."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    mallopt(-2, 1 << 28)  # M_TOP_PAD


def guarded(run: Callable[[], int | None]) -> int:
    """Run a command; return its exit status, 1 with one line for an expected error, 130 for Ctrl-C."""
    from safetensors import SafetensorError

    from outrider_core.drafting.bundle import BundleError
    from outrider_core.models.moa_config import DrafterError

    try:
        return run() or 0
    except OSError as error:
        print(f"error: {why_inaccessible(error)}", file=sys.stderr)
        return 1
    except (TargetError, DrafterError, BundleError, SafetensorError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def run_train(arguments: argparse.Namespace) -> None:
    try:
        options = read_train_options(arguments)
    except OptionsError as error:
        return arguments.refuse(str(error))
    from export.train.train import train

    keep_freed_memory()
    notes = train(options)
    if notes:
        print(f"held-out agreement by lag 1..6: {notes['held_out_agreement_by_lag']}")
        print(f"wrote {options.output_dir}; next: {next_command(options)}")


def run_bench(options: BenchOptions) -> None:
    from rich.console import Console

    from export.bundle.bench import bench

    bench(options, Console())


def run_ngrams(options: NgramsOptions) -> None:
    from export.train.ngrams import write_ngrams

    path, runs, answered = write_ngrams(options.answers, options.drafter)
    print(f"wrote {path}: {runs:,} runs of {answered:,} answer tokens; verifiers read it at their next start")


#: beside `train`, whose options depend on its preset
COMMANDS = {
    "ngrams": ExportCommand(
        NgramsOptions,
        run_ngrams,
        "count n-grams in a target's answers, to draft from",
        "Count the tokens that follow one or two tokens in a target's own answers, and put the table beside a drafter. "
        "The verifier's streams use it to predict text that does not repeat. `train` does this by itself; run it for "
        "an imported drafter, or with more answers. No torch.",
    ),
    "import": ExportCommand(
        ImportOptions,
        run_import,
        "turn a published Mixture-of-Attentions checkpoint into a drafter folder",
        "Read a checkpoint in the layout of the MoA authors' code (safetensors) and write a drafter folder "
        "that `bundle` and the verifier take.",
    ),
    "bundle": ExportCommand(
        BundleOptions,
        run_bundle,
        "write the folder an app ships",
        "Export the drafter's device half for ONNX Runtime and ExecuTorch, compare it with the eager model "
        "and put tokenizer, chat template and manifest beside it. After Ctrl-C the same command continues.",
    ),
    "check": ExportCommand(
        CheckOptions,
        run_check,
        "repeat a bundle's accuracy checks",
        "Verify hashes and metadata, compare every engine with the eager drafter on a fixed prompt set "
        "and measure acceptance length through a real verifier. Exits 1 if a bound of the manifest is broken.",
    ),
    "bench": ExportCommand(
        BenchOptions,
        run_bench,
        "measure a bundle's engines on this machine",
        "Load time, peak memory and step times by width and context, beside the time that memory bandwidth "
        "alone would take. Figures go into the bundle's report.json and report.md.",
    ),
    "target": ExportCommand(
        TargetOptions,
        run_target,
        "make the copy of a target that a CPU serves",
        "Convert a target (docs/models.md lists the families) to one exact ONNX graph: a folder that "
        "`python -m cloud.verifier --model` and `export bundle --understudy` take, on this machine or another, with a "
        "report on its size, speed and quality. No torch. After Ctrl-C the same command continues.",
        TARGET_USAGE,
    ),
}


def main(argv: list[str] | None = None, prog: str = "python -m export") -> int:
    arguments = build_parser(prog).parse_args(argv)
    if arguments.command == "train":
        return guarded(lambda: run_train(arguments))
    command = COMMANDS[arguments.command]
    return guarded(lambda: command.run(read_options(command.options, arguments)))


if __name__ == "__main__":
    sys.exit(main())
