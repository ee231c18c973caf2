"""Tables and a plot of `benchmarks.network`'s measurements, and ratios between its modes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import Figures

#: modes that the device may choose from
CHOICES = ("ahead", "tree", "stream")
COLUMNS = {
    "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "first ms": lambda row: "" if row["first_token_ms"] is None else str(row["first_token_ms"]),
    "gap p50/p95 ms": lambda row: f"{row['gap_ms']['p50']:.0f}/{row['gap_ms']['p95']:.0f}",
    "calls/100": lambda row: f"{row['calls_per_100_tokens']:.0f}",
    "steps/token": lambda row: f"{row['target_steps_per_token']:.2f}",
    "B up/down": lambda row: f"{row['bytes_up_per_token']}/{row['bytes_down_per_token']}",
    "tau": lambda row: f"{row['tau']:.2f}" if row["tau"] else "",
    "nodes": lambda row: f"{row['nodes']:.0f}" if row["tau"] else "",
    "draft ms": lambda row: f"{row['draft_ms_per_round']:.1f}" if row["tau"] else "",
    "hit": lambda row: "" if not row["ahead_hit_rate"] else f"{row['ahead_hit_rate']:.2f}",
    "hidden": lambda row: f"{row['drafting_while_waiting']:.2f}" if row["ahead_hit_rate"] else "",
    "stalls": lambda row: str(row["stalls"]),
    "differ": lambda row: "-" if row["unverified"] else str(row["different_from_target"]),
}  # fmt: skip


def show(figures: Figures, console: Console) -> None:
    if "cuts" in figures:
        for name, value in figures.items():
            console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)
        return
    slow = f", steps of at least {figures['step_ms']:g} ms" if figures["step_ms"] else ""
    slow += f", the device's of {figures['device_step_ms']:g} ms" if figures["device_step_ms"] else ""
    slow += f", {figures['dilation']:g} times slower" if figures["dilation"] != 1 else ""
    for profile, rows in figures["profiles"].items():
        table = Table(title=f"{profile}{slow}, {figures['questions']} questions", title_justify="left")
        table.add_column("mode")
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for name, row in rows.items():
            table.add_row(name, *(cell(row) for cell in COLUMNS.values()))
        console.print(table)
    print(as_markdown(figures))


def ratios(rows: Figures) -> dict[str, float | None]:
    """Return ratios between the modes of one profile; None if one of them was not measured.

    trees: drafting ahead, compared with fixed sizes without it. spared: share of the drafting time between verdict and
    tree that drafting ahead saves.
    """

    def speed(names: Sequence[str]) -> float:
        return max((rows[name]["tokens_per_second"] for name in names if name in rows), default=0.0)

    def over(names: Sequence[str], others: Sequence[str]) -> float | None:
        return round(speed(names) / speed(others), 3) if speed(names) and speed(others) else None

    shown = [rows[name]["draft_ms_per_round"] for name in ("ahead", "tree") if name in rows]
    sizes = [name for name in rows if name.endswith(" nodes")]
    return {
        "controller / best mode": over(["controller"], CHOICES),
        "trees / best size": over(["tree"], sizes),
        "trees / serial trees": over(["ahead"], ["tree"]),
        "drafting spared": round(1 - shown[0] / shown[1], 3) if len(shown) == 2 and shown[1] else None,
        "trees / stream": over(["ahead"], ["stream"]),
    }


def uncertainty(rows: Figures) -> float | None:
    """Return the standard error of `controller / best mode`, from its spread over the answers; None for too few.

    Both answered the same questions one after the other, so a disturbance of a minute affects both.
    """
    fixed = [rows[name] for name in CHOICES if name in rows]
    if not fixed or "controller" not in rows:
        return None
    best = max(fixed, key=lambda row: float(row["tokens_per_second"]))["answers_tokens_per_second"]
    answers = np.array(rows["controller"]["answers_tokens_per_second"]) / np.array(best)
    return round(float(np.std(answers, ddof=1) / np.sqrt(len(answers))), 3) if len(answers) > 1 else None


def as_markdown(figures: Figures) -> str:
    """Return tokens per second by profile and mode, and ratios between them."""
    names = list(next(iter(figures["profiles"].values())))
    compared = list(ratios({}))
    lines = ["| profile | " + " | ".join([*names, *compared]) + " |", "|---" * (1 + len(names) + len(compared)) + "|"]
    for profile, rows in figures["profiles"].items():
        cells = [f"{rows[name]['tokens_per_second']:.1f}" for name in names]
        cells += ["" if value is None else f"{value:.2f}" for value in ratios(rows).values()]
        if (error := uncertainty(rows)) is not None:
            cells[len(names)] += f" ± {error:.2f}"
        lines.append(f"| {profile} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(figures: Figures, path: Path) -> None:
    """Plot tokens per second of every mode over the profiles."""
    from matplotlib.figure import Figure

    profiles = figures["profiles"]
    names = list(next(iter(profiles.values())))
    figure = Figure(figsize=(1.5 + 1.1 * len(profiles), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        heights = [rows[name]["tokens_per_second"] for rows in profiles.values()]
        axes.bar(np.arange(len(profiles)) + place * width, heights, width, label=name)
    axes.set_xticks(np.arange(len(profiles)) + 0.4 - width / 2, list(profiles))
    axes.set(ylabel="tokens per second", yscale="log")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path)
