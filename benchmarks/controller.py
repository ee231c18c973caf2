"""How much the device's choice of trees, chains or a stream loses, in virtual time: the real session and controller.

    python -m benchmarks.controller                                    200 scenarios
    python -m benchmarks.controller --scenarios 1000 --json new.json --beside old.json

Every scenario (`benchmarks.scenarios`) is a conversation over an emulated link with a simulated target, drafter and
perhaps understudy. It is written by the device as it chooses, and again with each fixed arm: trees, a stream, and if
there is an understudy chains of 4, 8 and 16 tokens. Regret is the share of tokens per second that the choice has less
than the best fixed arm of the scenario; negative if it has more. The oracle takes the best arm of each answer.
"Hindsight" begins as the choice did, learns after each answer how long every arm would have taken for it, and writes
the next one by the arm that is ahead. No choice between answers can know more.
`--beside` compares with another run of the same scenarios, such as one of another commit.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import Figures, common_arguments, conclude
from benchmarks.scenarios import ANSWERS, scenario
from benchmarks.simulation import CHOSEN, arms, write
from outrider_core.arguments import positive_int
from outrider_core.machine import describe_machine

#: what the table shows of each group
COLUMNS = {
    "mean_regret": "mean",
    "p95_regret": "95 of 100",
    "share_within_5_percent": "within 5 %",
    "mean_hindsight_regret": "hindsight",
    "hindsight_share_within_5_percent": "hindsight, within 5 %",
    "mean_oracle_regret": "oracle",
    "mean_first_answer_regret": "first answer",
    "mean_last_answer_regret": "last answer",
}


def compare(recorded: Path | None, answers: int, number: int) -> Figures:
    """Run one scenario with every arm."""
    world = scenario(number, recorded, answers)
    seconds = {arm: write(world, arm) for arm in (CHOSEN, *arms(world))}
    tokens = sum(passage.length for passage in world.passages)
    fixed = {arm: sum(each) for arm, each in seconds.items() if arm != CHOSEN}
    best, chosen = min(fixed, key=lambda arm: fixed[arm]), sum(seconds[CHOSEN])
    oracle = sum(min(seconds[arm][answer] for arm in fixed) for answer in range(len(world.passages)))
    return {
        "number": number, "disturbance": world.disturbance, "link": world.profile.name, "curve": world.curve_name,
        "understudy": world.token is not None, "best": best, "tokens_per_second": round(tokens / chosen, 3),
        "regret": round(1 - fixed[best] / chosen, 5), "oracle_regret": round(1 - oracle / chosen, 5),
        "seconds": {arm: [round(each, 4) for each in of_arm] for arm, of_arm in seconds.items()},
    }  # fmt: skip


def regrets(row: Figures) -> list[float]:
    """Of each answer of a scenario."""
    return [1 - its / own for its, own in zip(row["seconds"][row["best"]], row["seconds"][CHOSEN], strict=True)]


def hindsight_regret(row: Figures) -> float:
    """Of a device that learns after each answer how long every fixed arm would have taken for it."""
    fixed = {arm: seconds for arm, seconds in row["seconds"].items() if arm != CHOSEN}
    taken = row["seconds"][CHOSEN][0]
    for answer in range(1, len(row["seconds"][CHOSEN])):
        taken += min(fixed.values(), key=lambda seconds: sum(seconds[:answer]))[answer]
    return float(1 - sum(fixed[row["best"]]) / taken)


def summary(rows: Sequence[Figures]) -> Figures:
    """Of some scenarios."""
    regret = np.array([row["regret"] for row in rows])
    hindsight = np.array([hindsight_regret(row) for row in rows])
    return {
        "scenarios": len(rows),
        "mean_regret": round(float(regret.mean()), 4),
        "p95_regret": round(float(np.quantile(regret, 0.95)), 4),
        "share_within_5_percent": round(float((regret <= 0.05).mean()), 4),
        "mean_hindsight_regret": round(float(hindsight.mean()), 4),
        "hindsight_share_within_5_percent": round(float((hindsight <= 0.05).mean()), 4),
        "mean_oracle_regret": round(float(np.mean([row["oracle_regret"] for row in rows])), 4),
        "mean_first_answer_regret": round(float(np.mean([regrets(row)[0] for row in rows])), 4),
        "mean_last_answer_regret": round(float(np.mean([regrets(row)[-1] for row in rows])), 4),
    }


def measure(options: argparse.Namespace) -> Figures:
    one = partial(compare, options.recorded, options.answers)
    numbers = range(options.first, options.first + options.scenarios)
    other = {row["number"]: row for row in json.loads(options.beside.read_text())["rows"]} if options.beside else {}
    if any(len(regrets(row)) != options.answers for row in other.values()):
        raise ValueError(f"{options.beside} is of other conversations: give its --answers")
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes) as pool:
            rows = list(pool.map(one, numbers, chunksize=8))
    else:
        rows = [one(number) for number in numbers]
    groups: dict[str, list[Figures]] = defaultdict(list)
    for row in rows:
        for group in (row["disturbance"], f"best: {row['best'].split()[0]}", "understudy" if row["understudy"] else ""):
            groups[group].append(row)
    groups.pop("", None)
    figures = {
        "machine": describe_machine(), **summary(rows),
        "groups": {name: summary(groups[name]) for name in sorted(groups)}, "rows": rows,
    }  # fmt: skip
    if other:
        pairs = [(row, other[row["number"]]) for row in rows if row["number"] in other]
        logs = [np.log(row["tokens_per_second"] / its["tokens_per_second"]) for row, its in pairs]
        figures["over_other"] = round(float(np.exp(np.mean(logs))), 4)
        figures["other"] = summary([its for _, its in pairs])
    return figures


def show(figures: Figures, console: Console) -> None:
    table = Table(title="regret of the choice", title_justify="left")
    table.add_column("scenarios of", no_wrap=True)
    for column in ("number", *COLUMNS.values()):
        table.add_column(column, justify="right")
    named = {**figures["groups"], "all": figures} | ({"all, other run": figures["other"]} if "other" in figures else {})
    for name, row in named.items():
        table.add_row(name, str(row["scenarios"]), *(f"{100 * row[column]:.1f} %" for column in COLUMNS))
    console.print(table)
    if "other" in figures:
        console.print(f"tokens per second over the other run's, geometric mean: {figures['over_other']:.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--scenarios", type=positive_int, default=200, help="how many (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--answers", type=positive_int, default=ANSWERS, help=f"of each (default: {ANSWERS})")
    parser.add_argument("--processes", type=positive_int, default=1, help="that share the work (default: 1)")
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="take texts from this recording")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="figures of another run of the same scenarios")
    common_arguments(parser, json=Path("build/controller.json"))
    options, console = parser.parse_args(argv), Console()
    return conclude(lambda: measure(options), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    raise SystemExit(main())
