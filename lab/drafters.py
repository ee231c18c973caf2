"""Drafters side by side: one target in this process, the same questions, trees and acceptance for all.

    python -m lab.drafters --prompts specbench.jsonl --count 24                        the shipped drafter
    python -m lab.drafters --prompts specbench.jsonl humaneval.jsonl gsm8k.jsonl \\
        --drafters moa=drafters/smollm2-135m-instruct-moa build/eagle2 build/lm --repeats 3
    python -m lab.drafters --prompts specbench.jsonl --temperature 1 --mcsd --lossy-seeds 3
    python -m lab.drafters --prompts specbench.jsonl --temperature 1 --mcsd --decision build/decision.safetensors
    python -m lab.drafters --prompts gsm8k.jsonl --offline --drafters build/moa build/eagle2 build/lm

Every question is answered by plain decoding and by every drafter in turns, so that a disturbance affects all of them.
tau: tokens committed per verification, accepted drafts and the target's own one. accepted: acceptance rate as in
arXiv 2409.10644, levels accepted of those drafted (the level of target seeds included).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import common_arguments, conclude
from benchmarks.engine import describe_device
from benchmarks.questions import Question, read_questions
from cloud.loading import load_verifier
from cloud.settings import Settings
from lab import offline_curve
from lab.baselines.decision import THRESHOLD, DecisionError, load
from lab.baselines.files import VARIANTS
from lab.contenders import BaselineContender, Contender, MoAContender, SampledContender, Tables, Unfed, VariantContender
from lab.lab import Answer, Lab, fast_dtype
from lab.multi_candidate import EarlyStop
from outrider_core.arguments import positive_ints
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.row_cost import USUAL
from outrider_core.models.drafter_arrays import CONFIG_FILE
from outrider_core.models.folders import default_drafter
from outrider_core.models.moa_config import DrafterError
from outrider_core.models.target import open_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource

Figures = dict[str, Any]


def measure(
    lab: Lab,
    contenders: list[Contender],
    questions: list[Question],
    sampling: Sampling,
    shape: TreeShape,
    new: int,
    repeats: int,
    console: Console,
) -> Figures:
    """Return figures by drafter and group."""
    answers: dict[tuple[str, str], list[list[Answer]]] = defaultdict(list)
    entries: list[Contender | None] = [None, *contenders]
    different = dict.fromkeys((c.name for c in contenders), 0)
    for number, question in enumerate(track(questions, "questions", console=console)):
        runs: dict[str, list[Answer]] = defaultdict(list)
        for repeat in range(repeats):
            turn = (number + repeat) % len(entries)
            for contender in entries[turn:] + entries[:turn]:
                name = contender.name if contender else "plain"
                weigh = repeats == 1 and not sampling.greedy
                runs[name].append(lab.answer(question.prompt, contender, sampling, new, shape, weigh))
        for name, repeated in runs.items():
            answers[name, question.group].append(repeated)
            if name != "plain":
                different[name] += repeated[0].tokens != runs["plain"][0].tokens
    groups = list(dict.fromkeys(question.group for question in questions))
    table = {
        name: {group: summarise(answers[name, group], answers["plain", group]) for group in groups}
        for name in ["plain", *different]
    }
    for name, by_group in table.items():
        every = [each for group in groups for each in answers[name, group]]
        plain = [each for group in groups for each in answers["plain", group]]
        means = {key: statistics.fmean(by_group[group][key] for group in groups) for key in ("tau", "speedup")}
        by_group["mean"] = summarise(every, plain) | {key: round(value, 3) for key, value in means.items()}
    return {"drafters": table, "different_from_plain": different, "questions": len(questions)}


def summarise(answers: list[list[Answer]], plain: list[list[Answer]]) -> Figures:
    """Summarise over questions; times are the median of a question's repeats."""
    first = [repeated[0] for repeated in answers]
    tokens, rounds = sum(len(a.tokens) for a in first), sum(len(a.accepted) for a in first)
    levels = sum(sum(a.depths) for a in first)
    seconds = sum(statistics.median(a.seconds for a in repeated) for repeated in answers)
    plain_tokens = sum(len(repeated[0].tokens) for repeated in plain)
    plain_seconds = sum(statistics.median(a.seconds for a in repeated) for repeated in plain)
    reached = [sum(a > d and d < D for x in first for a, D in zip(x.accepted, x.depths, strict=True)) for d in range(8)]
    tried = [sum(a >= d and d < D for x in first for a, D in zip(x.accepted, x.depths, strict=True)) for d in range(8)]
    surprise = [value for a in first for value in a.surprise]
    spread = statistics.stdev(surprise) * len(surprise) ** 0.5 if len(surprise) > 1 else 0.0
    return {
        "questions": len(first),
        "tokens": tokens,
        "surprise_per_token": round(sum(surprise) / tokens, 4) if surprise else None,
        "surprise_standard_error": round(spread / tokens, 4) if surprise else None,
        "tau": round(tokens / rounds, 3),
        "acceptance_rate": round(sum(sum(a.accepted) for a in first) / levels, 3) if levels else None,
        "tokens_per_second": round(tokens / seconds, 1),
        "speedup": round((tokens / seconds) / (plain_tokens / plain_seconds), 3),
        "draft_ms": round(1000 * sum(a.draft_seconds for a in first) / rounds, 2),
        "verify_ms": round(1000 * sum(a.verify_seconds for a in first) / rounds, 2),
        "nodes": round(sum(a.nodes for a in first) / rounds, 1),
        "steps": round(sum(a.steps for a in first) / rounds, 2),
        "accepted_by_depth": [round(r / t, 3) if t else None for r, t in zip(reached, tried, strict=True)],
    }


def as_markdown(figures: Figures) -> str:
    """Return tau (speed over plain decoding), by group and drafter."""
    drafters = figures["drafters"]
    names = [name for name in drafters if name != "plain"]
    groups = list(drafters["plain"])
    lines = ["| group | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for group in groups:
        cells = [f"{drafters[name][group]['tau']:.2f} ({drafters[name][group]['speedup']:.2f}x)" for name in names]
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show(figures: Figures, title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left")
    columns = ("tau", "accepted", "over plain", "tokens/s", "draft ms", "steps", "verify ms", "nodes")
    for column in ("drafter, mean of all groups", *columns):
        table.add_column(column, justify="right" if column in columns else "left")
    for name, by_group in figures["drafters"].items():
        row = by_group["mean"]
        rate = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.3f}"
        table.add_row(
            name,
            f"{row['tau']:.2f}",
            rate,
            f"{row['speedup']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['draft_ms']:.1f}",
            f"{row['steps']:.1f}",
            f"{row['verify_ms']:.1f}",
            f"{row['nodes']:.0f}",
        )
    console.print(table)
    print(as_markdown(figures))
    for name, by_group in figures["drafters"].items():
        mean = by_group["mean"]
        if mean["surprise_per_token"] is not None:
            text = f"{mean['surprise_per_token']:+.3f} +- {mean['surprise_standard_error']:.3f} nats a token"
            console.print(f"{name}: -log p of its tokens is above the target's entropy by {text}", style="dim")
    console.print(f"answers that differ from plain decoding: {figures['different_from_plain']}", style="dim")


def plot(figures: Figures, path: Path) -> None:
    """Plot acceptance by depth of every drafter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, by_group in figures["drafters"].items():
        shares = [share for share in by_group["mean"]["accepted_by_depth"] if share is not None]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{name}: tau {by_group['mean']['tau']:.2f}")
    axes.set(xlabel="depth in the draft tree", ylabel="accepted, of those whose parent was", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)


def open_contender(name: str, folder: Path, tables: Tables) -> Contender:
    """Open the drafter in `folder`, by its kind."""
    kind = drafter_kind(folder)
    if kind in VARIANTS:
        return VariantContender(name, folder, tables)
    return (MoAContender if kind == "moa" else BaselineContender)(name, folder, tables)


def open_contenders(
    named: str,
    tables: Tables,
    lookup: bool = False,
    bundle: Bundle | None = None,
    row_costs: Sequence[float] = (USUAL,),
) -> list[Contender]:
    """Open the drafter in `[NAME=]FOLDER`, by its kind; MoA also with prompt lookup, and through its bundle's engine.

    Without a name it has the folder's. row_costs: one of the last kind for each, see `Drafter`.
    """
    name, _, place = named.rpartition("=")
    folder = Path(place)
    name = name or folder.name
    drafter = open_contender(name, folder, tables)
    contenders = [drafter]
    if not isinstance(drafter, MoAContender):
        return contenders
    if lookup:
        contenders.append(MoAContender(f"{name} lookup", folder, tables, lookup=True, row_cost=USUAL))
    if bundle and bundle.manifest.drafter_hash == drafter.hash:
        for cost in row_costs:
            own = f"{name} bundle" if len(row_costs) == 1 else f"{name} bundle, row {cost:g}"
            contenders.append(MoAContender(own, folder, tables, bundle, lookup=True, row_cost=cost))
    return contenders


def first_moa(folders: list[Path]) -> Path:
    """Return the first MoA drafter: the verifier needs one, whichever drafts."""
    return next((folder for folder in folders if drafter_kind(folder) == "moa"), default_drafter())


def drafter_kind(folder: Path) -> str:
    if not (folder / CONFIG_FILE).is_file():
        raise DrafterError(f"{folder}: no {CONFIG_FILE} there, so this is not a drafter folder")
    kind: str = json.loads((folder / CONFIG_FILE).read_text()).get("type", "moa")
    return kind


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.drafters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(
        parser,
        "prompts",
        "target",
        "device",
        "threads",
        "seed",
        count=24,
        max_new_tokens=96,
        dtype=fast_dtype(),
        json=Path("build/drafters.json"),
    )
    parser.add_argument("--drafters", nargs="+", default=[f"moa={default_drafter()}"], metavar="[NAME=]FOLDER")
    parser.add_argument(
        "--offline", action="store_true", help="cut the link within each answer and judge the drafters' offline text"
    )
    parser.add_argument("--nodes", type=int, default=62)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--breadth", type=int, default=8)
    parser.add_argument(
        "--gain",
        type=float,
        default=TreeShape.gain,
        help="accepted tokens that one more step of the drafter must promise",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--unfed", action="store_true", help="every drafter also without features, as in an answer begun offline"
    )
    parser.add_argument(
        "--mcsd", action="store_true", help="every drafter also with drawn candidates and residual rejection (MCSD)"
    )
    parser.add_argument(
        "--lossy-seeds",
        type=int,
        default=0,
        metavar="K",
        help="and with the published process of K target seeds, which is not lossless",
    )
    parser.add_argument(
        "--decision",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="drawn trees also with early stopping, by models of lab.decision",
    )
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="draft on while a node's predicted acceptance is above it"
    )
    parser.add_argument(
        "--profile",
        type=positive_ints,
        default=[4, 2, 2, 1, 1],
        metavar="N,N",
        help="children per level of drawn trees",
    )
    parser.add_argument(
        "--lookup", action="store_true", help="MoA also with prompt lookup mixed in, as the product drafts"
    )
    parser.add_argument(
        "--bundle", type=Path, default=None, help="MoA also through the engine of this bundle of it, with prompt lookup"
    )
    parser.add_argument(
        "--row-costs",
        type=float,
        nargs="+",
        default=[USUAL],
        metavar="SHARE",
        help="with --bundle: one drafter for each, as where an extra row adds such a share of a one-row step\n"
        f"(default: {USUAL}; 2: no spare rows)",
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of every answer, of which the median counts")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)

    def show_all(figures: Figures) -> None:
        if options.offline:
            offline_curve.show(figures["offline"], console)
        else:
            show(figures, f"{options.nodes}-node trees, T = {options.temperature:g}, {figures['machine']}", console)
            plot(figures, options.json.with_suffix(".svg"))

    return conclude(lambda: run(options, console), show_all, options.json, console)


def open_lab(options: argparse.Namespace, folders: list[Path]) -> Lab:
    """Return a lab for the drafters in `folders`; of the options it reads target, dtype, device, threads and nodes."""
    settings = Settings(
        model=options.target,
        dtype=options.dtype,
        device=options.device,
        tree_budget=options.nodes,
        kv_tokens=8192,
        drafter=first_moa(folders),
        threads=options.threads or torch.get_num_threads(),
        max_sessions=4,
    )
    return Lab(load_verifier(settings))


def early_stops(
    files: list[Path], threshold: float, contenders: list[Contender], questions: list[Question]
) -> dict[str, EarlyStop]:
    """Return early stops by drafter hash.

    Raises DecisionError for another drafter's model, or one trained on a question.
    """
    stops = {}
    for file in files:
        model, drafter, prompts = load(file)
        if drafter not in {contender.hash for contender in contenders}:
            raise DecisionError(f"{file} was trained for drafter {drafter}, which is not among these")
        if not prompts.isdisjoint(question.fingerprint for question in questions):
            raise DecisionError(f"{file} was trained on one of these questions")
        stops[drafter] = EarlyStop(model, threshold)
    return stops


def run(options: argparse.Namespace, console: Console) -> Figures:
    if options.decision and not (options.mcsd or options.lossy_seeds):
        raise ValueError("--decision stops drawn trees: ask for some with --mcsd or --lossy-seeds")
    lab = open_lab(options, [Path(named.rpartition("=")[2]) for named in options.drafters])
    tables = open_target(TargetSource.resolve(options.target)).tables()
    bundle = open_bundle(options.bundle) if options.bundle else None
    contenders = [
        c
        for named in options.drafters
        for c in open_contenders(named, tables, options.lookup, bundle, options.row_costs)
    ]
    if bundle and bundle.manifest.drafter_hash not in {contender.hash for contender in contenders}:
        raise ValueError(f"{options.bundle} was exported from none of these drafters")
    longest = lab.verifier.max_context - options.max_new_tokens - options.nodes
    questions, too_long = read_questions(options.prompts, options.count, lab.encode, longest)
    early = early_stops(options.decision, options.threshold, contenders, questions)
    paths = ("json", "prompts", "drafters", "decision", "bundle")
    given = {key: value for key, value in vars(options).items() if key not in paths}
    figures = {"machine": describe_device(lab.device), "options": given, "too_long": too_long}
    if options.offline:
        asked = [(question.prompt, question.solution) for question in questions]
        return figures | {"offline": offline_curve.measure(lab, contenders, asked, options.max_new_tokens, console)}
    for base in list(contenders):
        if options.unfed:
            contenders.append(Unfed(f"{base.name} unfed", base))
        for stop in [None, *([early[base.hash]] if base.hash in early else [])]:
            suffix, drawn = "+decision" if stop else "", (options.seed, stop)
            if options.mcsd:
                contenders.append(SampledContender(f"{base.name} mcsd{suffix}", base, options.profile, 0, *drawn))
            if options.lossy_seeds:
                name = f"{base.name} {options.lossy_seeds} seeds{suffix}, LOSSY"
                contenders.append(SampledContender(name, base, options.profile, options.lossy_seeds, *drawn))
    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    shape = TreeShape(options.nodes, options.depth, options.breadth, options.gain)
    measured = measure(lab, contenders, questions, sampling, shape, options.max_new_tokens, options.repeats, console)
    return figures | measured


if __name__ == "__main__":
    sys.exit(main())
