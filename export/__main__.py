"""`python -m export train` and `python -m export bundle`."""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

from models.target import DEFAULT_TARGET, TargetError

EPILOG = """\
examples:
  python -m export train --prompts prompts.jsonl --output-dir drafters/mine
  python -m export bundle --drafter drafters/mine --output-dir build/bundle
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Train a drafter and write the bundle an app ships.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train", help="train a MoA drafter on the target's own answers",
        description="The target answers the prompts (1), then a Mixture-of-Attentions drafter learns to predict "
        "those answers (2). Both stages resume: after Ctrl-C or a kill, run the same command again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    train.add_argument("--target", default=DEFAULT_TARGET, help="alias, Hugging Face id or folder")
    train.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE",
                       help="JSONL with `prompt` or `turns`, or plain text with one prompt a line")  # fmt: skip
    train.add_argument("--output-dir", type=Path, required=True, help="drafter folder to write")
    train.add_argument("--work-dir", type=Path, default=Path("build/train"), help="answers, features, checkpoint")
    train.add_argument("--max-prompts", type=int, default=6000, help="use at most this many, chosen by --seed")
    train.add_argument("--max-prompt-tokens", type=int, default=192, help="longer prompts are skipped")
    train.add_argument("--max-new-tokens", type=int, default=144, help="length of an answer")
    train.add_argument("--slots", type=int, default=192, help="answers decoded at once")
    train.add_argument("--epochs", type=int, default=5)
    train.add_argument("--batch-size", type=int, default=12, help="sequences per step")
    train.add_argument("--learning-rate", type=float, default=2e-3)
    train.add_argument("--layers", type=int, default=6, help="target layers the drafter's server half reads")
    train.add_argument("--draft-vocab", type=int, default=12288, help="most frequent tokens the device can propose")
    train.add_argument("--max-context", type=int, default=2048, help="longest conversation, in tokens")
    train.add_argument("--device", default="auto", help="cpu, cuda or auto")
    train.add_argument("--threads", type=int, default=0, help="CPU threads, 0 = torch's choice")
    train.add_argument("--seed", type=int, default=0)

    bundle = commands.add_parser(
        "bundle", help="write the folder an app ships",
        description="Export the drafter's device half to ONNX, check it against the eager model and put "
        "tokenizer, chat template and manifest beside it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    bundle.add_argument("--target", default=DEFAULT_TARGET, help="alias, Hugging Face id or folder")
    bundle.add_argument("--drafter", type=Path, required=True, help="folder that `train` wrote")
    bundle.add_argument("--output-dir", type=Path, required=True, help="folder to write; replaced if it is a bundle")
    bundle.add_argument("--format", choices=["onnx"], default="onnx", help="engine file to write")
    bundle.add_argument("--quant", choices=["int8", "none"], default="int8", help="weights of the engine file")
    return parser


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


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    from models.moa import DrafterError

    try:
        if arguments.command == "train":
            from export.run import train

            keep_freed_memory()
            train(arguments)
        else:
            from edge_runtime.bundle import BundleError
            from export.bundle import write_bundle

            try:
                write_bundle(arguments.target, arguments.drafter, arguments.output_dir, arguments.quant)
            except BundleError as error:
                raise ValueError(str(error)) from None
    except (TargetError, DrafterError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
