"""Compare recipes of MoA at a small budget: one change at a time, the same batches, several seeds.

    python -m lab.ablations --answers corpora/smollm2-135m-instruct.corpus
    python -m lab.ablations --answers FILE --recipes MoA EAGLE-3 --seeds 0 --prompts specbench.jsonl
    python -m lab.ablations --list

All recipes of one seed learn from the same batches in the same order. Held-out agreement is measured for every run;
with --prompts also tau, greedily, alone (no lookup). Figures are written after each run; the same command continues.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.command import common_arguments
from benchmarks.engine import describe_device
from benchmarks.questions import read_questions
from cloud.loading import load_verifier
from cloud.settings import Settings
from export.__main__ import keep_freed_memory
from export.train.features import Sequence
from export.train.precision import training_dtype
from export.train.recipe import TrainSettings
from export.train.train import run_trainer
from export.train.trainer import Trainer
from export.train.training_set import TrainingSet, read_sequences
from lab.contenders import Unfed
from lab.drafters import first_moa, open_contender
from lab.kinds import KINDS
from lab.lab import Lab, fast_dtype
from outrider_core.drafting.drafter import TreeShape
from outrider_core.models.drafter_files import write_drafter
from outrider_core.models.target import Target, load_target, open_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource

#: name -> (drafter, changed TrainSettings)
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "MoA": ("moa", {}),
    "fused MoA": ("moa-fused", {}),
    "fused MoA, last hidden state in rows": ("moa-fused-hidden", {}),
    "fused behind the self-attention": ("moa-fused-query", {}),
    "EAGLE-3": ("eagle3", {}),
    "rows at 4 bits": ("moa-4-bits", {}),
    "rows at 6 bits": ("moa-6-bits", {}),
    "total variation where much is accepted (LK hybrid)": ("moa", {"total_variation": 3.0}),
    "all lags weigh the same": ("moa", {"lag_decay": 1.0}),
}
SHAPE = TreeShape(nodes=62, depth=6, breadth=8)
#: of the steps, in which the learning rate rises, if that is less than usual
WARMUP_SHARE = 0.2
Figures = dict[str, Any]


def drawn_from(sequences: list[Sequence], count: int) -> list[Sequence]:
    """Return `count` conversations, drawn at random but always the same; a smaller count is the start of a larger."""
    order = list(sequences)
    random.Random(0).shuffle(order)
    return order[:count]


class RecipeRuns:
    """Trains recipes on the same text; each run leaves a drafter folder, which is not trained again."""

    def __init__(self, target: Target, sequences: list[Sequence], options: argparse.Namespace) -> None:
        self._options, self._work = options, Path(options.work_dir)
        self._data = TrainingSet(target, sequences, draft_vocab=options.draft_vocab)
        self._features = self._data.features("auto", self._work)

    def run(self, recipe: str, seed: int) -> Path:
        """Train one recipe, if its folder is not there, and return the folder."""
        kind, changes = RECIPES[recipe]
        options, data = self._options, self._data
        given = f"{len(data.sequences)}x{options.epochs}-{options.batch_tokens}-{options.draft_vocab}-{seed}"
        slug = "".join(c if c.isalnum() else "-" for c in recipe)
        folder = self._work / "ablations" / f"{slug}-{given}"
        if (folder / "config.json").is_file():
            return folder
        steps = data.tokens * options.epochs / options.batch_tokens
        base = TrainSettings(epochs=options.epochs, batch_tokens=options.batch_tokens, seed=seed)
        warmup = min(base.warmup, int(WARMUP_SHARE * steps))
        settings = KINDS[kind].taught(replace(base, warmup=warmup, **changes))
        student = data.student(KINDS[kind], seed)
        trainer = Trainer(student, self._features, settings, data.checkpoint(student, settings, self._work))
        run_trainer(trainer)
        agreement, calibration = trainer.evaluate()
        config = student.config
        if calibration:
            config = replace(config, confidence_temperature=calibration.temperature)
        notes = {
            "recipe": recipe, "steps": trainer.steps, "held_out": len(trainer.held_out),
            "held_out_agreement_by_lag": agreement, "curve": trainer.curve,
        }  # fmt: skip
        write_drafter(folder, kind, asdict(config), student.trained(), notes)
        trainer.checkpoint.unlink(missing_ok=True)
        return folder


def learnt(folder: Path) -> Figures:
    """Return the held-out agreement in notes of `RecipeRuns`, first choice and first four: the mean, and by lag."""
    notes = json.loads((folder / "config.json").read_text())["notes"]
    by_lag = notes["held_out_agreement_by_lag"]
    means = {top: round(statistics.fmean(shares), 4) for top, shares in by_lag.items()}
    return {**means, "by_lag": by_lag, "steps": notes["steps"], "held_out": notes["held_out"]}


class Judge:
    """Counts how many tokens a verification commits, with features and without, on the way to the target's answers."""

    def __init__(self, folders: list[Path], options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        settings = Settings(
            model=options.target, drafter=first_moa(folders), dtype=fast_dtype(), device=options.device,
            threads=torch.get_num_threads(), tree_budget=SHAPE.nodes, kv_tokens=8192, max_sessions=4,
        )  # fmt: skip
        self._lab = lab = Lab(load_verifier(settings))
        self._tables = open_target(TargetSource.resolve(options.target)).tables()
        longest = lab.verifier.max_context - options.max_new_tokens - SHAPE.nodes
        questions, _ = read_questions(options.prompts, options.count, lab.encode, longest)
        new = options.max_new_tokens
        self._answers = [
            (question, lab.answer(question.prompt, None, Sampling(), new).tokens)
            for question in track(questions, "the target's answers", console=console)
        ]

    def tau(self, folder: Path) -> Figures:
        """Return tau with features (`tau`) and without (`tau_unfed`): the mean over groups of questions."""
        drafter = open_contender("fed", folder, self._tables)
        figures = {}
        for name, contender in (("tau", drafter), ("tau_unfed", Unfed("unfed", drafter))):
            by_group: dict[str, list[float]] = defaultdict(list)
            for question, truth in track(self._answers, name, console=self._console):
                rounds = len(self._lab.replay(question.prompt, truth, contender, SHAPE).accepted)
                by_group[question.group].append(len(truth) / rounds)
            figures[name] = round(statistics.fmean(map(statistics.fmean, by_group.values())), 3)
        return figures


#: column -> figure and its digits
COLUMNS = {"first choice": ("top1", 3), "first four": ("top4", 3), "tau": ("tau", 2), "no features": ("tau_unfed", 2)}


def as_markdown(figures: Figures) -> str:
    """Return a row for each recipe: means over its seeds ± standard deviation, then first choices by lag."""
    lags = [f"lag {lag}" for lag in range(1, 7)]
    head = ["recipe", "seeds", *COLUMNS, *lags]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for name, by_seed in figures["recipes"].items():
        runs = list(by_seed.values())
        cells = [_spread([run[key] for run in runs if key in run], digits) for key, digits in COLUMNS.values()]
        by_lag = zip(*(run["by_lag"]["top1"] for run in runs), strict=True)
        cells += [f"{statistics.fmean(shares):.3f}" for shares in by_lag]
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    """Return "mean ± standard deviation", or "" for no values."""
    if len(values) < 2:
        return format(values[0], f".{digits}f") if values else ""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.ablations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "target", "device", count=36, max_new_tokens=64, json=Path("build/ablations.json"))
    parser.add_argument("--answers", type=Path, help="answers file of `python -m export train`, or a corpus")
    parser.add_argument("--prompts", type=Path, nargs="+", help="questions for tau: JSONL with `turns` or `prompt`")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME", help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="name the recipes and exit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--conversations", type=int, default=1400, help="how many of the answers, drawn at random")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=TrainSettings.batch_tokens)
    parser.add_argument("--draft-vocab", type=int, default=TrainingSet.draft_vocab)
    parser.add_argument("--work-dir", type=Path, default=Path("build/train"), help="features, checkpoints, drafters")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(RECIPES))
        return 0
    try:
        return run(options, Console())
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def run(options: argparse.Namespace, console: Console) -> int:
    if not options.answers:
        raise ValueError("give --answers to train on")
    if unknown := [name for name in options.recipes if name not in RECIPES]:
        raise ValueError(f"no such recipe: {', '.join(unknown)}; see --list")
    keep_freed_memory()
    sequences = drawn_from(read_sequences(options.answers), options.conversations)
    paths = ("json", "prompts", "work_dir", "recipes", "seeds", "list", "answers")
    given = {name: value for name, value in vars(options).items() if name not in paths}
    given |= {"conversations": len(sequences), "answer_tokens": sum(sequence.answered for sequence in sequences)}
    figures: Figures = {"options": given, "recipes": {}}
    if options.json.is_file():
        figures = json.loads(options.json.read_text())
        if figures["options"] != given:
            raise ValueError(f"{options.json} is of other options: {figures['options']}; give another --json")
    wanted = [(name, seed) for seed in options.seeds for name in options.recipes]

    def fill(measured: Iterable[tuple[str, int]], figure: str, measure: Callable[[str, int], Figures]) -> None:
        """Add what `measure` returns to runs that lack `figure`; write all after each."""
        for name, seed in measured:
            row = figures["recipes"].setdefault(name, {}).setdefault(str(seed), {})
            if figure not in row:
                console.print(f"{name}, seed {seed}", style="dim")
                row |= measure(name, seed)
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(figures, indent=2) + "\n")

    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = found if options.device == "auto" else options.device
    source = TargetSource.resolve(options.target)
    runs = RecipeRuns(load_target(source, dtype=training_dtype(device), device=device), sequences, options)
    figures["machine"] = describe_device(torch.device(device))
    fill(wanted, "top1", lambda name, seed: learnt(runs.run(name, seed)))
    if options.prompts:
        judge = Judge([runs.run(*one) for one in wanted], options, console)
        fill(wanted, "tau", lambda name, seed: judge.tau(runs.run(name, seed)))
    print(as_markdown(figures))
    console.print(f"figures: {options.json}", style="dim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
