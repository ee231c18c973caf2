"""Speed of a device that writes by itself, with an understudy: token by token, and with the drafter's trees.

    python -m benchmarks.device_only --prompts spec_bench.jsonl --count 12
    python -m benchmarks.device_only --prompts spec_bench.jsonl --bundle BUNDLE --temperature 0.7

Rows: "plain" a token a step; "trees" the drafter's trees before every step; "as chosen" whichever the runtime has
measured to be faster. They take turns with every question, and the time counts from the prompt to the end. "as plain"
is the number of texts equal to those of the first row.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import Figures, common_arguments, conclude
from benchmarks.questions import as_question, read_questions
from edge_runtime.answer.offline_drafter import offline_drafter_for
from edge_runtime.blocking import BlockingRuntime
from edge_runtime.events import Finished
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.speed.arms import Arm
from outrider_core.drafting.bundle import UNDERSTUDY_FOLDER, open_bundle
from outrider_core.drafting.engines import open_engine
from outrider_core.machine import describe_machine
from outrider_core.targets.bundle import open_target_bundle

PLAIN = "plain"
ROWS: dict[str, Arm | None] = {PLAIN: Arm.STREAM, "trees": Arm.TREE, "as chosen": None}
#: of one answer: its tokens and seconds
Answer = tuple[list[int], float]


def answer(runtime: BlockingRuntime, prompt: list[int], options: argparse.Namespace) -> Answer:
    runtime.forget()  # so that a repeated question is not drafted from its first answer
    began = time.perf_counter()
    sampling = {"temperature": options.temperature, "seed": options.seed}
    *_, last = runtime.generate(prompt, max_new_tokens=options.max_new_tokens, **sampling)
    assert isinstance(last, Finished)
    return last.token_ids, time.perf_counter() - began


def measure(options: argparse.Namespace, console: Console) -> Figures:
    bundle = open_bundle(options.bundle)
    if not bundle.has_understudy:
        raise ValueError(f"{options.bundle} carries no understudy; write one that does: export bundle --understudy")
    model = open_target_bundle(bundle.folder / UNDERSTUDY_FOLDER).config
    if offline_drafter_for(bundle, open_engine(bundle, None), model) is None:
        raise ValueError(
            f"{options.bundle} lets nothing be guessed: export it again, with the target as its understudy"
        )
    longest = bundle.manifest.max_context - options.max_new_tokens
    questions, left_out = read_questions(options.prompts, options.count, as_question(bundle), longest)
    answers: dict[str, list[Answer]] = defaultdict(list)
    with ExitStack() as stack:
        runtimes = {
            name: stack.enter_context(
                BlockingRuntime(
                    EdgeRuntime(bundle, None, RuntimeOptions(threads=options.threads), pinned=Pinned(mode=mode))
                )
            )
            for name, mode in ROWS.items()
        }
        for runtime in runtimes.values():  # opens the understudy
            answer(runtime, questions[0].prompt, options)
        for number, question in enumerate(track(questions, "questions", console=console, transient=True)):
            turn = number % len(runtimes)
            for name in [*ROWS][turn:] + [*ROWS][:turn]:
                answers[name].append(answer(runtimes[name], question.prompt, options))
    groups = [question.group for question in questions]
    return {
        "machine": describe_machine(), "questions": len(questions), "left_out": left_out,
        "max_new_tokens": options.max_new_tokens, "temperature": options.temperature,
        "understudy": bundle.manifest.understudy and bundle.manifest.understudy.bits,
        "rows": {name: summarise(of_row, answers[PLAIN], groups) for name, of_row in answers.items()},
    }  # fmt: skip


def summarise(answers: Sequence[Answer], plain: Sequence[Answer], groups: Sequence[str]) -> Figures:
    over = {}
    for group in sorted(set(groups)):
        own, theirs = ([a for a, its in zip(row, groups, strict=True) if its == group] for row in (answers, plain))
        over[group] = round(rate(own) / rate(theirs), 3)
    return {
        "tokens_per_second": round(rate(answers), 2),
        "over_plain": round(rate(answers) / rate(plain), 3),
        "by_group": over,
        "same_as_plain": sum(own == other for (own, _), (other, _) in zip(answers, plain, strict=True)),
    }


def rate(answers: Sequence[Answer]) -> float:
    """Return tokens per second."""
    return sum(len(tokens) for tokens, _ in answers) / sum(seconds for _, seconds in answers)


def show(figures: Figures, console: Console) -> None:
    title = f"writing alone, {figures['understudy']} bits, T = {figures['temperature']}, {figures['machine']}"
    table = Table(box=SIMPLE, title=title, title_justify="left")
    for column in ("", "tokens/s", "over plain", "as plain"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in figures["rows"].items():
        same = f"{row['same_as_plain']} of {figures['questions']}"
        table.add_row(name, f"{row['tokens_per_second']:.1f}", f"{row['over_plain']:.2f}", same)
    console.print(table)
    for name, row in figures["rows"].items():
        if name != PLAIN:
            by_group = ", ".join(f"{group} {ratio:.2f}" for group, ratio in row["by_group"].items())
            console.print(f"{name} over plain: {by_group}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_only",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common_arguments(
        parser, "prompts", "bundle", "threads", "seed", count=6, max_new_tokens=64, json=Path("build/device_only.json")
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    options, console = parser.parse_args(argv), Console()
    return conclude(lambda: measure(options, console), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    raise SystemExit(main())
