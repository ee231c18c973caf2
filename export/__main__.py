"""`python -m export`: train, ngrams, import, bundle, check, bench and target."""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from export.train.train_command import add_train_options, describe_presets, next_command, read_train_options
from export.train.train_options import OptionsError
from outrider_core.arguments import positive_int, positive_ints
from outrider_core.models.folders import default_drafter
from outrider_core.models.target import DEFAULT_TARGET, TargetError

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


def build_parser(prog: str = "python -m export") -> argparse.ArgumentParser:
    """prog: how the command was called."""
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

    ngrams = commands.add_parser(
        "ngrams",
        help="count what usually follows in a target's answers",
        description="Count what follows one token or two in a target's own answers, and put the table beside a "
        "drafter: the verifier's streams foresee by it what their texts do not repeat. `train` does this by itself; "
        "for an imported drafter, or with more answers, run it. No torch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    ngrams.add_argument(
        "answers", type=Path, nargs="+", help="answers files of `train`, or a corpus (`python -m export.train.corpus`)"
    )
    ngrams.add_argument("--drafter", type=Path, required=True, help="drafter folder of the same target")

    source = commands.add_parser(
        "import",
        help="turn a published MoA checkpoint into a drafter folder",
        description="Read a checkpoint in the layout of the MoA authors' code (safetensors) and write a drafter folder "
        "that `bundle` and the verifier take.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    source.add_argument("--source", required=True, help="folder or Hugging Face id of the checkpoint")
    source.add_argument("--target", required=True, help="alias, Hugging Face id or folder it was trained on")
    source.add_argument("--output-dir", type=Path, required=True, help="drafter folder to write")
    source.add_argument("--max-context", type=int, default=None, help="tokens; default: 2048 or the target's, if less")
    source.add_argument(
        "--draft-vocab-from",
        type=Path,
        default=None,
        metavar="DRAFTER",
        help="take the draft vocabulary of this drafter folder; default: the whole vocabulary, whose "
        "LM head is most of a step's work",
    )

    bundle = commands.add_parser(
        "bundle",
        help="write the folder an app ships",
        description="Export the drafter's device half for ONNX Runtime and ExecuTorch, compare it with the eager model "
        "and put tokenizer, chat template and manifest beside it. After Ctrl-C the same command goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_bundle_options(bundle)

    check = commands.add_parser(
        "check",
        help="prove a bundle again",
        description="Verify hashes and metadata, compare every engine with the eager drafter on a fixed prompt set "
        "and measure acceptance length through a real verifier. Exits 1 if a bound of the manifest is broken.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    check.add_argument("bundle", type=Path, help="folder that `bundle` wrote")
    check.add_argument("--drafter", type=Path, default=None, help="default: the one under drafters/ with its hash")
    check.add_argument("--target", default=None, help="default: the name in the manifest")
    check.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=None,
        metavar="FILE",
        help="measure acceptance on these instead of the fixed set",
    )
    check.add_argument("--no-acceptance", action="store_true", help="hashes, metadata and parity only: no verifier")

    bench = commands.add_parser(
        "bench",
        help="measure a bundle's engines on this machine",
        description="Load time, peak memory and step times by width and context, beside the time that memory bandwidth "
        "alone would take. Figures go into the bundle's report.json and report.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    bench.add_argument("bundle", type=Path, help="folder that `bundle` wrote")
    bench.add_argument("--engines", default=None, help="by commas; default: all in the bundle that run here")
    bench.add_argument("--threads", type=positive_ints, default=None, metavar="N,N", help="default: 1 and all cores")
    bench.add_argument(
        "--widths", type=positive_ints, default=[1, 2, 4, 8, 16, 32, 64], metavar="N,N", help="tokens of one step"
    )
    bench.add_argument(
        "--contexts", type=positive_ints, default=[128, 512, 1024, 2048], metavar="N,N", help="cache and feature rows"
    )
    bench.add_argument("--repeats", type=positive_int, default=30, help="timed steps for each figure")

    target = commands.add_parser(
        "target",
        help="make the copy of a target that a CPU serves",
        usage=TARGET_USAGE,
        description="Lower a target (Llama, Qwen2, Qwen3, Mistral) to one exact ONNX graph: a folder that "
        "`python -m cloud.verifier --model` and `export bundle --understudy` take, on this machine or another, with a "
        "report on its size, speed and quality. No torch. After Ctrl-C the same command goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    target.add_argument("target", help="alias, Hugging Face id, folder or GGUF file")
    target.add_argument(
        "--output-dir", type=Path, required=True, help="folder to write; replaced if it is such a bundle"
    )
    target.add_argument(
        "--bits", type=int, default=8, choices=[4, 8, 32], help="of the weights; 4 and 8 are calibrated, 32 is float32"
    )
    target.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=None,
        metavar="FILE",
        help="what the target answers for the comparison with float32; default: a fixed set",
    )
    target.add_argument("--answer-tokens", type=positive_int, default=96, help="of each such answer")
    target.add_argument("--no-compare", action="store_true", help="spare the float32 copy: report no quality")
    target.add_argument("--dry-run", action="store_true", help="show sizes and memory needed, write nothing")
    return parser


def add_bundle_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bundle`, which `optimum-cli export outrider` shares."""
    parser.add_argument("--target", default=DEFAULT_TARGET, help="alias, Hugging Face id or folder")
    parser.add_argument(
        "--drafter",
        type=Path,
        default=default_drafter(),
        help="folder that `train` or `import` wrote; default: the default target's own",
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write; replaced if it is a bundle")
    parser.add_argument("--format", default="onnx", help="engine files, by commas: onnx, executorch")
    parser.add_argument(
        "--quant",
        default="int8",
        choices=["fp32", "fp16", "int8", "int4", "8da8w", "8da4w", "none"],
        help="weights of linear layers (8da8w, 8da4w: ExecuTorch's names of int8, int4)",
    )
    parser.add_argument(
        "--embedding-bits",
        type=int,
        default=None,
        choices=[4, 8, 16, 32],
        help="embedding and LM head; default: as --quant, 8 with int4",
    )
    parser.add_argument(
        "--understudy",
        metavar="MODEL",
        help="a complete small model with the target's vocabulary (alias, Hugging Face id, folder, GGUF file, or what "
        "`export target` wrote), which writes while there is no link; it lies in a folder of its own, and an app may "
        "fetch it later",
    )
    parser.add_argument(
        "--understudy-bits", type=int, default=8, choices=[4, 8], help="of its weights; 4 is about half the download"
    )
    parser.add_argument("--max-context", type=int, default=None, help="longest conversation, at most the drafter's")
    parser.add_argument(
        "--backend", default="xnnpack", choices=["xnnpack", "coreml", "qualcomm"], help="what ExecuTorch delegates to"
    )
    parser.add_argument("--check", action="store_true", help="also measure acceptance length, as `check` does")
    parser.add_argument("--bench", action="store_true", help="also measure step times, as `bench` does")
    parser.add_argument("--dry-run", action="store_true", help="show sizes and memory needed, write nothing")


def run_bundle(arguments: argparse.Namespace) -> None:
    from export.quiet import quiet

    with quiet():
        from export.bundle.bundle import write_bundle
        from export.bundle.plan import Options

    options = Options(
        arguments.target,
        arguments.drafter,
        arguments.output_dir,
        formats=tuple(name.strip() for name in arguments.format.split(",") if name.strip()),
        quant=arguments.quant,
        embedding_bits=arguments.embedding_bits,
        max_context=arguments.max_context,
        backend=arguments.backend,
        check=arguments.check,
        bench=arguments.bench,
        understudy=arguments.understudy,
        understudy_bits=arguments.understudy_bits,
    )
    write_bundle(options, arguments.dry_run)


def run_check(arguments: argparse.Namespace) -> int:
    from export.quiet import quiet

    with quiet():
        from export.bundle.check import check_bundle
        from export.train.prompts import read_prompts

    prompts = [turns[0] for turns in read_prompts(arguments.prompts)] if arguments.prompts else None
    broken = check_bundle(
        arguments.bundle, arguments.drafter, arguments.target, prompts, acceptance=not arguments.no_acceptance
    )
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    if not broken:
        print("all bounds hold")
    return 1 if broken else 0


def run_import(arguments: argparse.Namespace) -> None:
    from export.train.reference_import import import_checkpoint
    from outrider_core.models.drafter_files import load_drafter

    ids = load_drafter(arguments.draft_vocab_from)[1]["draft_ids"] if arguments.draft_vocab_from else None
    config = import_checkpoint(
        arguments.source, arguments.target, arguments.output_dir, draft_vocab_ids=ids, max_context=arguments.max_context
    )
    print(
        f"wrote {arguments.output_dir}: width {config.hidden_size}, {config.draft_vocab_size} of {config.vocab_size} "
        f"tokens drafted, {len(config.target_layers)} target layers read; next: python -m export bundle"
    )


def run_target(arguments: argparse.Namespace) -> None:
    from export.target.target import write_target
    from export.target.target_plan import Options
    from export.train.prompts import read_prompts

    prompts = tuple(turns[0] for turns in read_prompts(arguments.prompts)) if arguments.prompts else None
    options = Options(
        arguments.target,
        arguments.output_dir,
        arguments.bits,
        prompts=prompts,
        answer_tokens=arguments.answer_tokens,
        compare=not arguments.no_compare,
    )
    write_target(options, arguments.dry_run)


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
    """Run a command: its exit status, 1 with one line for an expected error, 130 for Ctrl-C."""
    from outrider_core.drafting.bundle import BundleError
    from outrider_core.models.moa_config import DrafterError

    try:
        return run() or 0
    except (TargetError, DrafterError, BundleError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from here", file=sys.stderr)
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


def run_bench(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from export.bundle.bench import bench

    bench(
        arguments.bundle,
        Console(),
        engines=arguments.engines.split(",") if arguments.engines else None,
        threads=arguments.threads,
        widths=arguments.widths,
        contexts=arguments.contexts,
        repeats=arguments.repeats,
    )


def run_ngrams(arguments: argparse.Namespace) -> None:
    from export.train.ngrams import write_ngrams

    path, runs, answered = write_ngrams(arguments.answers, arguments.drafter)
    print(f"wrote {path}: {runs:,} runs of {answered:,} answer tokens; verifiers read it at their next start")


COMMANDS = {
    "train": run_train,
    "ngrams": run_ngrams,
    "import": run_import,
    "bundle": run_bundle,
    "check": run_check,
    "bench": run_bench,
    "target": run_target,
}


def main(argv: list[str] | None = None, prog: str = "python -m export") -> int:
    arguments = build_parser(prog).parse_args(argv)
    return guarded(lambda: COMMANDS[arguments.command](arguments))


if __name__ == "__main__":
    sys.exit(main())
