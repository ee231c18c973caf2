"""Train a decision model for a drafter of the lab: is another level worth drafting? (arXiv 2409.10644)

    python -m lab.decision --prompts train.jsonl --drafter drafters/smollm2-135m-instruct-moa \\
        --output build/decision.safetensors
    python -m lab.drafters --prompts specbench.jsonl --mcsd --decision build/decision.safetensors

The drafter answers training prompts at temperature 1 with drawn trees. Every drafted token is an example: the drafter's
state at the draw (`--kind`) and the probability clamp(p / q, 0, 1) of accepting it. The published hard model learns
instead whether the most likely tokens agree; here a threshold means the same for both kinds.

Never use evaluation prompts. The file names its prompts, and `lab.drafters` refuses to run on one of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, track
from torch import nn

from benchmarks.command import common_arguments
from benchmarks.questions import Question, read_questions
from lab.baselines.choice import Chooser
from lab.baselines.decision import DecisionConfig, DecisionModel, Examples, Trained, save, soft_labels, train
from lab.baselines.trees import LevelTree
from lab.contenders import Contender, SampledContender
from lab.drafters import open_contenders, open_lab
from lab.lab import Lab, fast_dtype
from lab.multi_candidate import SampledDrafter
from outrider_core.arguments import positive_ints
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.models.moa_config import DrafterError
from outrider_core.models.target import open_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetError, TargetSource

#: one prompt in this many is kept for validation
VALIDATION = 8


class Recorder(SampledDrafter):
    """Adds one `Examples` to `examples` for every tree that is judged, one row for each of its tokens."""

    def __init__(
        self,
        inner: Drafter,
        profile: Sequence[int],
        chooser: Chooser,
        head: nn.Module | None,
        kind: str,
        examples: list[Examples],
    ) -> None:
        super().__init__(inner, profile, chooser, head=head)
        self._kind, self._examples = kind, examples

    def accept(self, logits: NDArray[np.float32]) -> tuple[list[int], int]:
        p, q = self.distributions(logits)
        siblings = [self.drafted.tree.siblings(row - 1).tokens for row in range(len(q))]
        labels = []
        for row, tokens in enumerate(siblings):
            copies = (len(tokens), 1)
            labels.append(soft_labels(np.tile(p[row], copies), np.tile(q[row], copies), tokens))
        features = np.concatenate([level.features(self._kind) for level in self.levels])
        self._examples.append(
            Examples(features.repeat([len(tokens) for tokens in siblings], 0), np.concatenate(labels))
        )
        return super().accept(logits)


class RecordingContender(SampledContender):
    """MCSD on a drafter, noting `examples` for a decision model of one kind ("soft" or "hard")."""

    def __init__(self, base: Contender, profile: Sequence[int], seed: int, kind: str) -> None:
        super().__init__(base.name, base, profile, 0, seed)
        self._kind = kind
        self.examples: list[Examples] = []

    def fresh(self) -> Recorder:
        return Recorder(self._base.fresh(), self._profile, self._chooser, self.head, self._kind, self.examples)


def collect(
    lab: Lab,
    contender: RecordingContender,
    questions: list[Question],
    shape: TreeShape,
    new: int,
    seed: int,
    console: Console,
) -> tuple[Examples, Examples]:
    """Return (training, validation) examples from one answer of at most `new` tokens to each question."""
    parts: tuple[list[Examples], list[Examples]] = ([], [])
    for number, question in enumerate(track(questions, "collecting", console=console)):
        contender.examples.clear()
        lab.answer(question.prompt, contender, Sampling(temperature=1.0, seed=seed + number), new, shape)
        parts[number % VALIDATION == VALIDATION - 1].extend(contender.examples)
    training, validation = map(joined, parts)
    return training, validation


def joined(examples: list[Examples]) -> Examples:
    """Join all of them. Raises ValueError if there are none."""
    if not examples:
        raise ValueError(f"too little to learn from: at least {VALIDATION} prompts are needed")
    return Examples(np.concatenate([e.features for e in examples]), np.concatenate([e.labels for e in examples]))


def constant_loss(training: Examples, validation: Examples) -> float:
    """Return the validation loss of always predicting the mean training label, nats."""
    guess, mean = np.float64(training.labels.mean()), np.float64(validation.labels.mean())
    return float(-mean * np.log(guess) - (1 - mean) * np.log(1 - guess))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.decision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(
        parser, "prompts", "target", "device", "threads", "seed", count=96, max_new_tokens=64, dtype=fast_dtype()
    )
    parser.add_argument("--drafter", required=True, metavar="FOLDER", help="the drafter that is to stop early")
    parser.add_argument("--output", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument(
        "--kind",
        default="hard",
        choices=["soft", "hard"],
        help="soft: its last hidden state; hard: entropy and ten largest probabilities",
    )
    parser.add_argument(
        "--profile", type=positive_ints, default=[4, 2, 2, 1, 1], metavar="N,N", help="children per level"
    )
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(argv)
    try:
        run(options, Console())
    except (DrafterError, TargetError, OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(options: argparse.Namespace, console: Console) -> None:
    options.nodes = LevelTree(options.profile).ends[-1]
    shape = TreeShape(options.nodes, len(options.profile))
    lab = open_lab(options, [Path(options.drafter)])
    [base] = open_contenders(options.drafter, open_target(TargetSource.resolve(options.target)).tables())
    contender = RecordingContender(base, options.profile, options.seed, options.kind)
    longest = lab.verifier.max_context - options.max_new_tokens - options.nodes
    questions, _ = read_questions(options.prompts, options.count, lab.encode, longest)
    new, seed = options.max_new_tokens, options.seed
    training, validation = collect(lab, contender, questions, shape, new, seed, console)

    torch.manual_seed(seed)
    features = training.features.shape[1]
    model = DecisionModel(DecisionConfig.soft(features) if options.kind == "soft" else DecisionConfig.hard())
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=options.epochs)

        def report(loss: float) -> None:
            progress.update(task, advance=1, description=f"training, validation loss {loss:.4f}")

        losses = train(model, training, validation, epochs=options.epochs, seed=seed, report=report)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save(Trained(model, base.hash, frozenset(question.fingerprint for question in questions)), options.output)
    console.print(
        f"validation loss {min(losses):.4f}, of a constant {constant_loss(training, validation):.4f}; acceptance "
        f"{validation.labels.mean():.3f}; {len(training.labels)} + {len(validation.labels)} examples: {options.output}"
    )


if __name__ == "__main__":
    sys.exit(main())
