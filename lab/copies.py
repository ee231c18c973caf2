"""How near copies of a target come to it in float32, all read behind the same texts, which float32 writes.

    python -m lab.copies --target model.gguf --prompts questions.jsonl more.jsonl --count 8 --max-new-tokens 32

The copies: the 8 bits that a verifier makes, 4 bits rounded to nearest, and the calibrated 4 bits of an understudy.
At temperature 1 float32's own bits a token are its entropy, and what a copy has more is its KL divergence, but for
chance.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import Figures, common_arguments, conclude
from benchmarks.questions import read_questions
from outrider_core.chat.tokenizer import open_chat_tokenizer
from outrider_core.machine import describe_machine
from outrider_core.protocol.sampling import Sampling, log_probs
from outrider_core.targets.answers import WrittenAnswer, write_answers
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.cached import cached_target
from outrider_core.targets.convert import make_target_bundle
from outrider_core.targets.part import POOL_BLOCK
from outrider_core.targets.quality import answer_logits
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.source import TargetSource

#: most tokens of a prompt
LONGEST = 256


def distributions(copy: TargetBundle, answers: Sequence[WrittenAnswer]) -> Iterator[np.ndarray]:
    """Yield log-probabilities float64 [vocab] for each token of the answers."""
    longest = max(len(answer.ids) for answer in answers)
    runner = OnnxRunner.of(copy, POOL_BLOCK * math.ceil(longest / POOL_BLOCK))
    for answer in answers:
        for logits in answer_logits(runner, answer):
            yield log_probs(logits, Sampling())


def measure(options: argparse.Namespace) -> Figures:
    """Top-1 agreement with float32, and bits a token, of each copy."""
    source = TargetSource.resolve(options.target)
    own = cached_target(source, bits=32)
    tokenizer = open_chat_tokenizer(own.folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode_chat([{"role": "user", "content": text}])

    questions, _ = read_questions(options.prompts, options.count, encode, LONGEST)
    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    written = write_answers(own, [question.text for question in questions], options.max_new_tokens, sampling)
    tokens = np.array([token for answer in written for token in answer.ids[answer.start :]])
    truth = np.stack([row.astype(np.float32) for row in distributions(own, written)])
    with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
        copies = {
            "float32": own,
            "8 bits": cached_target(source, bits=8),
            "4 bits, nearest": make_target_bundle(source, Path(folder) / "nearest", calibrate=False, bits=4),
            "4 bits, calibrated": cached_target(source, bits=4),
        }
        found = {name: nearness(copy, written, tokens, truth) for name, copy in copies.items()}
    return {
        "machine": describe_machine(), "questions": len(questions), "tokens": len(tokens),
        "temperature": options.temperature, "copies": found,
    }  # fmt: skip


def nearness(copy: TargetBundle, answers: Sequence[WrittenAnswer], tokens: np.ndarray, truth: np.ndarray) -> Figures:
    """Compare a copy with float32. truth: float32's log-probabilities [tokens, vocab]."""
    same, bits, divergence = 0, 0.0, 0.0
    for token, p, q in zip(tokens, truth, distributions(copy, answers), strict=True):
        same += int(p.argmax() == q.argmax())
        bits -= q[token] / math.log(2)
        wide = p.astype(np.float64)
        divergence += float((np.exp(wide) * (wide - q)).sum()) / math.log(2)
    count = len(tokens)
    return {
        "megabytes": round(sum(path.stat().st_size for path in copy.folder.iterdir()) / 1e6, 1),
        "top1_agreement": round(same / count, 4),
        "bits_per_token": round(bits / count, 4),
        "divergence_bits": round(divergence / count, 5),
    }


def show(figures: Figures, console: Console) -> None:
    """A line for each copy."""
    title = f"{figures['tokens']} tokens of {figures['questions']} answers, temperature {figures['temperature']}"
    table = Table("copy", "MB", "top-1", "bits a token", "KL, bits a token", title=title)
    for name, row in figures["copies"].items():
        table.add_row(name, *(str(row[each]) for each in row))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.copies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "target", "prompts", "seed", count=8, max_new_tokens=32, json=Path("build/copies.json"))
    parser.add_argument("--temperature", type=float, default=1.0, help="of float32's answers")
    parser.add_argument("--work-dir", type=Path, help="for the copy rounded to nearest; default: a temporary one")
    options, console = parser.parse_args(argv), Console()
    return conclude(lambda: measure(options), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
