"""The effect of each choice of MoA's training recipe: one change at a time, the same text and the same budget.

    python -m lab.ablations --answers build/train/answers-*.jsonl --prompts specbench.jsonl
    python -m lab.ablations --list

Every recipe is trained from the same first weights on the same batches, then drafts for the same questions. Figures are
written after each one; run the same command again to continue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.command import common_arguments
from benchmarks.engine import describe_device
from benchmarks.questions import Question, read_questions
from cloud.loading import load_verifier
from cloud.settings import Settings
from export.__main__ import keep_freed_memory
from export.progress import Meter
from export.train.features import Sequence
from export.train.on_policy import own_text_rounds
from export.train.precision import training_dtype
from export.train.recipe import TrainSettings
from export.train.trainer import Trainer
from export.train.training_set import TrainingSet, read_sequences
from lab import offline_curve
from lab.contenders import Unfed
from lab.drafters import first_moa, open_contender
from lab.kinds import KINDS
from lab.lab import Lab, fast_dtype
from outrider_core.drafting.drafter import TreeShape
from outrider_core.models.drafter_files import write_drafter
from outrider_core.models.target import load_target, open_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource

#: name -> (drafter, changed TrainSettings, changed TrainingSet or "own_text": texts of the last stage)
RECIPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default recipe": ("moa", {}, {}),
    "no norm before the head (paper)": ("moa", {}, {"final_norm": False}),
    "target's last layer reused (paper's TLI 1)": ("tli1", {}, {}),
    "a second self-attention block": ("moa-second-self", {}, {}),
    "a second cross-attention block": ("moa-second-cross", {}, {}),
    "no long windows, no dropped rows": ("moa", {"long_windows": 0.0}, {}),
    "more long windows": ("moa", {"long_windows": 0.4}, {}),
    "loss weights 0.1 and 1 (paper)": ("moa", {"distribution_weight": 0.1, "feature_weight": 1.0}, {}),
    "token loss alone": ("moa", {"feature_weight": 0.0}, {}),
    "total variation where much is accepted (LK hybrid)": ("moa", {"total_variation": 3.0}, {}),
    "all lags weigh the same": ("moa", {"lag_decay": 1.0}, {}),
    "early lags weigh more": ("moa", {"lag_decay": 0.75}, {}),
    "answers alone are learnt": ("moa", {"prompt_weight": 0.0}, {}),
    "prompts weigh as much as answers": ("moa", {"prompt_weight": 1.0}, {}),
    "own text at last": ("moa", {}, {"own_text": 600}),
    "3 target layers": ("moa", {}, {"layers": 3}),
    "12 target layers": ("moa", {}, {"layers": 12}),
    "8k draft vocabulary": ("moa", {}, {"draft_vocab": 8192}),
    "24k draft vocabulary": ("moa", {}, {"draft_vocab": 24576}),
    "EAGLE-2": ("eagle2", {}, {}),
    "EAGLE-3": ("eagle3", {}, {}),
    "small LM": ("lm", {}, {}),
}
SHAPE = TreeShape(nodes=62, depth=6, breadth=8)
Figures = dict[str, Any]


def train(name: str, sequences: list[Sequence], options: argparse.Namespace) -> Path:
    """Return the drafter folder of one recipe, trained if it is missing."""
    kind, changes, shapes = RECIPES[name]
    shapes = dict(shapes)
    own_text = shapes.pop("own_text", 0)
    slug = "".join(c if c.isalnum() else "-" for c in name)
    place: Path = options.work_dir / "ablations"
    folder = place / f"{slug}-{options.conversations}x{options.epochs}-{options.seed}"
    if (folder / "config.json").is_file():
        return folder
    device = "cpu" if options.device == "auto" else options.device
    target = load_target(TargetSource.resolve(options.target), dtype=training_dtype(device), device=device)
    data = TrainingSet(target, sequences, **shapes)
    student = data.student(KINDS[kind], options.seed)
    settings = KINDS[kind].taught(replace(TrainSettings(epochs=options.epochs, seed=options.seed), **changes))
    place.mkdir(parents=True, exist_ok=True)
    features = data.features("auto", options.work_dir).first(options.conversations)
    trainer = Trainer(student, features, settings, data.checkpoint(student, settings, place))
    _run(name, trainer)
    for last in own_text_rounds(trainer, data, own_text, 1, "auto"):
        _run(f"{name}: last stage", last)
        last.checkpoint.unlink()
    agreement, calibration = trainer.evaluate()
    notes = {"recipe": name, "held_out_agreement_by_lag": agreement}
    config = student.config
    if calibration:
        config = replace(config, confidence_temperature=calibration.temperature)
    write_drafter(folder, kind, asdict(config), student.trained(), notes)
    trainer.checkpoint.unlink(missing_ok=True)
    return folder


def _run(name: str, trainer: Trainer) -> None:
    with Meter(name, trainer.steps) as meter:
        for progress in trainer.run():
            meter.update(progress.step, f"loss {progress.loss:.3f}  agreement {progress.agreement:.3f}")


def judge(lab: Lab, folder: Path, questions: list[Question], options: argparse.Namespace, console: Console) -> Figures:
    """Return held-out agreement; tau with features and without; how long its own text agrees with the target's."""
    stored = json.loads((folder / "config.json").read_text())
    held_out = stored["notes"]["held_out_agreement_by_lag"]
    figures = {f"held_out_{top}": round(statistics.fmean(shares), 4) for top, shares in held_out.items()}
    drafter = open_contender("fed", folder, open_target(TargetSource.resolve(options.target)).tables())
    new, unfed = options.max_new_tokens, Unfed("unfed", drafter)
    taus: dict[str, dict[str, list[float]]] = {"fed": defaultdict(list), "unfed": defaultdict(list)}
    for question in track(questions, "questions", console=console):
        truth = lab.answer(question.prompt, None, Sampling(), new).tokens
        for contender in (drafter, unfed):
            rounds = len(lab.replay(question.prompt, truth, contender, SHAPE).accepted)
            taus[contender.name][question.group].append(len(truth) / rounds)
    groups = {name: {group: statistics.fmean(each) for group, each in by.items()} for name, by in taus.items()}
    asked: list[tuple[list[int], str | None]] = [(question.prompt, None) for question in questions]
    alone = offline_curve.measure(lab, [drafter], asked, new, console, cuts=(0.5,))["fed"]["0.50"]
    return figures | {
        "tau": round(statistics.fmean(groups["fed"].values()), 3),
        "tau_by_group": {group: round(tau, 3) for group, tau in groups["fed"].items()},
        "tau_without_features": round(statistics.fmean(groups["unfed"].values()), 3),
        "agreed_tokens_alone": alone["agreed_tokens"],
        "perplexity_alone": alone["perplexity"],
    }


#: column -> figure and its format
COLUMNS = {
    "held-out top 1": ("held_out_top1", ".3f"), "top 4": ("held_out_top4", ".3f"), "tau": ("tau", ".3f"),
    "without features": ("tau_without_features", ".3f"), "agrees alone until": ("agreed_tokens_alone", ".1f"),
    "perplexity alone": ("perplexity_alone", ".1f"),
}  # fmt: skip


def as_markdown(figures: Figures) -> str:
    """Return a row for each recipe; cells without a measurement stay empty."""
    lines = ["| recipe | " + " | ".join(COLUMNS) + " |", "|---" + "|--:" * len(COLUMNS) + "|"]
    for name, row in figures["recipes"].items():
        cells = [format(row[key], style) if key in row else "" for key, style in COLUMNS.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.ablations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "target", "device", "seed", count=48, max_new_tokens=64, json=Path("build/ablations.json"))
    parser.add_argument("--answers", type=Path, help="answers file of `python -m export train`")
    parser.add_argument("--prompts", type=Path, nargs="+", help="questions: JSONL with `turns`, `prompt` or `question`")
    parser.add_argument("--recipes", nargs="+", default=None, metavar="NAME", help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="name the recipes and exit")
    parser.add_argument(
        "--conversations", type=int, default=3000, help="how many of the answers file, from its beginning"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=Path("build/train"), help="features, checkpoints, drafters")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(RECIPES))
        return 0
    console = Console()
    try:
        return run(options, console)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def run(options: argparse.Namespace, console: Console) -> int:
    if not options.answers or not options.prompts:
        raise ValueError("give --answers to train on and --prompts to judge by")
    names = options.recipes or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        raise ValueError(f"no such recipe: {', '.join(unknown)}; see --list")
    keep_freed_memory()
    sequences = read_sequences(options.answers)
    given = {
        "answer_tokens": sum(sequence.answered for sequence in sequences[: options.conversations]),
        "conversations": min(options.conversations, len(sequences)), "epochs": options.epochs,
        "questions": options.count, "max_new_tokens": options.max_new_tokens, "seed": options.seed,
    }  # fmt: skip
    figures: Figures = {"options": given, "recipes": {}}
    if options.json.is_file():
        earlier = json.loads(options.json.read_text())
        if earlier["options"] != given:
            raise ValueError(f"{options.json} is of other options: {earlier['options']}; give another --json")
        figures = earlier
    folders = {name: train(name, sequences, options) for name in names if name not in figures["recipes"]}
    settings = Settings(
        model=options.target,
        drafter=first_moa(list(folders.values())),
        dtype=fast_dtype(),
        device=options.device,
        threads=torch.get_num_threads(),
        tree_budget=SHAPE.nodes,
        kv_tokens=8192,
        max_sessions=4,
    )
    lab = Lab(load_verifier(settings))
    figures["machine"] = describe_device(lab.device)
    longest = lab.verifier.max_context - options.max_new_tokens - SHAPE.nodes
    questions, _ = read_questions(options.prompts, options.count, lab.encode, longest)
    for name, folder in folders.items():
        console.print(name, style="dim")
        figures["recipes"][name] = judge(lab, folder, questions, options, console)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(as_markdown(figures))
    console.print(f"figures: {options.json}", style="dim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
