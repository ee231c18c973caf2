"""Train MoA or a baseline for it, on the same text with the same losses and as many parameters.

    python -m lab.train --drafter eagle2 --prompts prompts.jsonl --output-dir build/eagle2
    python -m lab.train --drafter lm --answers build/train/answers-0123456789ab.jsonl --output-dir build/lm

All other options are those of `python -m export train`; equal options use the same answers and features.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from export.__main__ import guarded, keep_freed_memory
from export.options import OptionsError
from export.train.train import train
from export.train.train_command import add_train_options, describe_presets, read_train_options
from export.train.train_options import TrainOptions
from lab.kinds import KINDS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.train",
        usage="python -m lab.train --drafter {moa-fused,eagle3,lm,...} --output-dir DIR [OPTION ...]",
        description=__doc__,
        epilog=describe_presets(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--drafter",
        choices=list(KINDS),
        required=True,
        help="eagle2: EAGLE-2's feature head; eagle3: features of several layers, trained on its own predictions; "
        "lm: a small LM; moa-fused: MoA that reads the newest row beside its token; moa-fused-hidden: with the last "
        "hidden state of the target in the rows; moa-fused-query: the row is read behind the self-attention; "
        "moa-4-bits, moa-6-bits: MoA with rounded rows",
    )
    add_train_options(parser)
    arguments = parser.parse_args(argv)
    try:
        options = read_train_options(arguments)
        if getattr(arguments, "own_text", 0):
            raise OptionsError("--own-text is for `export train`: here nothing learns from its own text")
        options = replace(options, own_text=0, on_policy=1)
    except OptionsError as error:
        parser.error(str(error))
    return guarded(lambda: _run(options, arguments.drafter))


def _run(options: TrainOptions, kind: str) -> None:
    keep_freed_memory()
    notes = train(options, KINDS[kind])
    if notes:
        print(f"held-out agreement by lag 1..6: {notes['held_out_agreement_by_lag']}")
        print(
            f"wrote {options.output_dir}; next: python -m lab.drafters --drafters {options.output_dir} --prompts FILE"
        )


if __name__ == "__main__":
    sys.exit(main())
