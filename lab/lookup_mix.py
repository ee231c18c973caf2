"""Measure the probability of lookup's guesses beside the drafter's, as a reference for `Guess.probability`.

    python -m lab.lookup_mix --answers corpora/smollm2-135m-instruct.corpus --count 100
    python -m lab.lookup_mix --prompts specbench.jsonl --count 60

In the drafter's training text, or in the target's greedy answers to questions: at every position with a guess, the
probability that each rule gives to the target's own choice.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import log, log1p
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.command import common_arguments, conclude
from export.train.answers import AnswerLimits, generate_answers, read_answers
from export.train.batches import MASKED, row_mask_of
from export.train.features import OnlineFeatures, Sequence
from export.train.prompts import Conversation, UserTurn, read_prompts
from export.train.training_set import TrainingSet, read_sequences
from lab.kinds import KINDS
from outrider_core.drafting.lookup import FAINTEST, SUREST, Guess, Lookup
from outrider_core.machine import describe_machine
from outrider_core.models.moa import MoA
from outrider_core.models.target import Target, load_target
from outrider_core.targets.source import TargetSource

#: most tokens of a question and of its answer
PROMPT, ANSWER = 900, 128
#: tokens drafted after one root
WINDOW = (3, 9)
#: largest -log p that counts, so that no single token decides a mean
MOST_LOSS = 14.0

#: probability of a guess, from its rate and the drafter's own probability, None for a token that it does not know
RULES: dict[str, Callable[[Guess, float | None], float]] = {
    "drafter alone": lambda _, q: q or 0.0,
    "apart": lambda guess, q: guess.apart(q or 0.0),
    "together": lambda guess, q: guess.rate if q is None else guess.together(q),
    "the mean of both": Guess.probability,
}


@dataclass
class Score:
    """Scores of the target's choices: -log p in all, and how many were among the first 1, 2 and 4."""

    loss: float = 0.0
    first: dict[int, int] = field(default_factory=lambda: dict.fromkeys((1, 2, 4), 0))
    positions: int = 0

    def add(self, log_q: Tensor, token: int, p: float, wanted: int) -> None:
        """Add a position. log_q [vocab]: the drafter's, with the guess `token`; p: the rule's probability of it."""
        p, q = min(SUREST, max(FAINTEST, p)), min(SUREST, float(log_q[token].exp()))
        log_p = log_q + (log1p(-p) - log1p(-q))
        log_p[token] = log(p)
        self.positions += 1
        self.loss -= max(float(log_p[wanted]), -MOST_LOSS)
        rank = int((log_p > log_p[wanted]).sum())
        for most in self.first:
            self.first[most] += rank < most

    def figures(self) -> dict[str, float]:
        """Return means over positions."""
        shares = {f"first_{most}": round(hits / max(1, self.positions), 4) for most, hits in self.first.items()}
        return {"loss": round(self.loss / max(1, self.positions), 4), **shares}


def answered(target: Target, prompts: list[tuple[str, ...]], console: Console) -> list[Sequence]:
    """Return the target's greedy answers."""
    plans = {i: Conversation((UserTurn(turns[0]),)) for i, turns in enumerate(prompts)}
    with tempfile.TemporaryDirectory() as folder, console.status("the target answers"):
        path = Path(folder) / "answers.jsonl"
        limits = AnswerLimits(PROMPT, ANSWER, PROMPT + ANSWER)
        generate_answers(target, plans, path, limits=limits, slots=16, on_end=lambda _: None)
        rows = [row for row in read_answers(path) if row["answers"]]
    return [Sequence(row["ids"], tuple(map(tuple, row["answers"]))) for row in rows]


@torch.inference_mode()
def choices(
    student: MoA, features: OnlineFeatures, index: int, rng: random.Random
) -> Iterator[tuple[int, Tensor, int]]:
    """Yield (position, the drafter's log-probabilities [vocab], the target's greedy token) of one text's answers."""
    text = features.sequences[index]
    kv, hidden = features.batch([index])
    size, window = len(text.ids), rng.randint(*WINDOW)
    mask, _ = row_mask_of(size, window, rng.randrange(window))
    causal = torch.full((1, size, size), MASKED).triu(1)
    state = student.states(torch.tensor([text.ids]), kv.float(), hidden.float(), causal, mask[None])[0]
    ids, temperature = student.device_half.draft_ids.long(), student.config.confidence_temperature
    for begin, end in text.answers:
        at = torch.arange(begin - 1, end - 1)
        known = (student.head(state[at]) / temperature).log_softmax(-1)
        log_q = torch.full((len(at), student.config.vocab_size), -torch.inf)
        log_q[:, ids] = known
        wanted = features.target.model.lm_head(hidden[0, at]).argmax(-1)
        yield from zip(at.tolist(), log_q, wanted.tolist(), strict=True)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if bool(options.answers) == bool(options.prompts):
        raise ValueError("give --answers, or --prompts for the target to answer")
    target = load_target(TargetSource.resolve(options.target), dtype="float32")
    if options.answers:
        sequences = read_sequences(options.answers)
        random.Random(options.seed).shuffle(sequences)
        sequences = sequences[: options.count or None]
    else:
        sequences = answered(target, _spread(read_prompts(options.prompts), options.count), console)
    data = TrainingSet(target, sequences, start_from=[options.drafter])
    student = data.student(KINDS["moa"])
    assert isinstance(student, MoA)
    student.eval()
    features, rng = data.features("online", Path()), random.Random(options.seed)
    scores: dict[str, Score] = defaultdict(Score)
    for index in track(range(len(sequences)), "texts", console=console):
        lookup, text = Lookup(memory=0), sequences[index].ids
        for at, log_q, wanted in choices(student, features, index, rng):
            lookup.follow(text[: at + 1])
            if guess := lookup.guess([]):
                q = float(log_q[guess.token].exp()) if log_q[guess.token] > -torch.inf else None
                for name, rule in RULES.items():
                    scores[name].add(log_q, guess.token, rule(guess, q), wanted)
    return {
        "machine": describe_machine(),
        "texts": len(sequences),
        "positions": scores["apart"].positions,
        "rules": {name: score.figures() for name, score in scores.items()},
    }


def _spread(prompts: list[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    return prompts[:: max(1, len(prompts) // count) if count else 1][: count or None]


def show(figures: dict[str, Any], console: Console) -> None:
    title = f"{figures['positions']:,} positions with a guess, {figures['texts']} texts"
    table = Table(title=title, title_justify="left")
    for column in ("rule", "-log p", "first", "first two", "first four"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name, row in figures["rules"].items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.lookup_mix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "target", "drafter", "seed", json=Path("build/lookup_mix.json"))
    parser.add_argument("--count", type=int, default=60, help="texts or questions, spread over them; 0: all")
    parser.add_argument("--answers", type=Path, help="a corpus, or an answers file of `python -m export train`")
    parser.add_argument("--prompts", type=Path, nargs="+", help="questions: JSONL with `turns` or `prompt`")
    options = parser.parse_args(argv)
    console = Console()
    return conclude(lambda: measure(options, console), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
