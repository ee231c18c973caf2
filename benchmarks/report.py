"""Measure the figures of README and docs, and write tables and plots from them: one command for every figure.

    python -m benchmarks.report                      the short form, about 15 minutes on two cores
    python -m benchmarks.report --full --prompts specbench.jsonl gsm8k.jsonl
    python -m benchmarks.report --only offline load  a part of it
    python -m benchmarks.report --write              measure nothing: write the documents from benchmarks/results
    python -m benchmarks.report --check              exit with status 1 if a document differs from the results

Each section is one run of a benchmark, which writes benchmarks/results/NAME.json with its command, machine, day and
commit. docs/measurements.md, its plots and the README's table are written from these files, never by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "measurements.md"
README = ROOT / "README.md"
PROMPTS = ROOT / "benchmarks" / "prompts.jsonl"
BEGIN, END = "<!-- figures: written by python -m benchmarks.report -->", "<!-- end of figures -->"
#: fields that every results file has about its run
RUN_FIELDS = ("command", "machine", "date", "commit")
#: colours of a plot's paper, ink and bars
SCHEMES = {
    "light": ("#ffffff", "#24292f", ("#8c959f", "#54aeff", "#0969da", "#1a7f37")),
    "dark": ("#0d1117", "#e6edf3", ("#6e7681", "#388bfd", "#79c0ff", "#3fb950")),
}
INTRODUCTION = """\
# Measurements

Written by `python -m benchmarks.report`; do not edit. Each section is one run: its command, machine, day and the commit
that was measured ("+": with changes). Compare figures within a section only. The default target is small and runs on
a CPU; a step of at least 60 ms stands for a larger model where a section says so.
"""

Figures = dict[str, Any]
Rows = list[list[str]]


@dataclass(frozen=True)
class Bars:
    """A bar plot. groups: labels along the axis; series: name -> a value for each group."""

    title: str
    unit: str
    groups: list[str]
    series: dict[str, list[float]]
    alt: str


@dataclass(frozen=True)
class Section:
    """A benchmark of the report.

    module: under `benchmarks`. short, full: its arguments. prompts: whether it takes --prompts. table: head and rows
    of the section's table; bars: its plot, if it has one.
    """

    name: str
    title: str
    module: str
    short: str
    full: str
    prompts: bool
    table: Callable[[Figures], Rows]
    bars: Callable[[Figures], Bars] | None = None


@dataclass(frozen=True)
class Result:
    """A results file: `run` says how the figures were measured."""

    name: str
    run: dict[str, str]
    figures: Figures


# --- sections ---

ROUND_TRIPS = {"wifi": "8 ms", "5g": "30 ms", "4g": "60 ms"}
MODES = {"plain": "plain decoding", "stream": "stream", "ahead": "draft trees", "controller": "as the device chooses"}


def _speed(figures: Figures, profile: str, mode: str) -> float:
    return float(figures["profiles"][profile][mode]["tokens_per_second"])


def _over_plain(figures: Figures, profile: str, mode: str) -> float:
    return _speed(figures, profile, mode) / _speed(figures, profile, "plain")


def links_table(figures: Figures) -> Rows:
    """Return tokens per second over links, and their ratio to plain decoding over the same link."""
    rows = [["round trip", *MODES.values(), "answers that differ"]]
    for profile, modes in figures["profiles"].items():
        cells = [f"{_speed(figures, profile, mode):.1f} ({_over_plain(figures, profile, mode):.2f}x)" for mode in MODES]
        differ = sum(modes[mode]["different_from_target"] for mode in MODES)
        rows.append([ROUND_TRIPS.get(profile, profile), *cells, str(differ)])
    return rows


def links_bars(figures: Figures) -> Bars:
    profiles = list(figures["profiles"])
    series = {label: [_over_plain(figures, profile, mode) for profile in profiles] for mode, label in MODES.items()}
    return Bars(
        f"Speed over a link, steps of at least {figures['step_ms']:g} ms",
        "times plain decoding",
        [ROUND_TRIPS.get(profile, profile) for profile in profiles],
        series,
        "Bars: tokens per second over plain decoding, for the target's stream, draft trees and the device's choice, at "
        "three round-trip times",
    )


def cuts_table(figures: Figures) -> Rows:
    return [
        ["figure", "value"],
        ["links cut at random moments", str(figures["cuts"])],
        ["answers", str(figures["answers"])],
        ["answers that differ from the target's own", str(figures["answers_that_differ"])],
        ["answers whose screen differs from their tokens", str(figures["screens_that_differ"])],
        ["answers given up", str(figures["given_up"])],
        ["tokens written offline", str(figures["provisional"])],
        ["of these rolled back", str(figures["rolled_back"])],
        ["pause before the first offline token, 95th percentile", f"{figures['stall_ms_p95'] or 0:g} ms"],
    ]


def tau_table(figures: Figures) -> Rows:
    groups = [*figures["by_category"].items(), ("all", figures["overall"])]
    rows = [[name, str(row["answers"]), f"{row['tau']:.2f}", str(row["bytes_up_per_round"])] for name, row in groups]
    return [["kind of question", "answers", "tau", "bytes up a round"], *rows]


def tau_bars(figures: Figures) -> Bars:
    groups = {name: row["tau"] for name, row in figures["by_category"].items()} | {"all": figures["overall"]["tau"]}
    return Bars(
        f"Tokens per verification, trees of {figures['tree']['nodes']} nodes",
        "tau",
        list(groups),
        {"draft trees": list(groups.values())},
        "Bars: tokens committed per verification by kind of question",
    )


WRITERS = {"drafter": "drafter alone", "cold": "understudy, loaded after the cut", "warm": "understudy, always loaded"}


def offline_table(figures: Figures) -> Rows:
    rows = [["writer", "outage", "tokens written", "kept", "first token", "20th token", "loops"]]
    for row in figures["rows"]:
        times = [f"{row[key]} ms" if row[key] is not None else "-" for key in ("first_ms", "twentieth_ms")]
        rows.append([
            WRITERS[row["writer"]], f"{row['seconds']:g} s", str(row["written"]), f"{row['kept_share']:.0%}", *times,
            f"{row['loops']:.0%}",
        ])  # fmt: skip
    return rows


def offline_bars(figures: Figures) -> Bars:
    outages = sorted({row["seconds"] for row in figures["rows"]})
    kept = {(row["writer"], row["seconds"]): 100 * row["kept_share"] for row in figures["rows"]}
    series = {
        label: [kept[writer, seconds] for seconds in outages]
        for writer, label in WRITERS.items()
        if all((writer, seconds) in kept for seconds in outages)
    }
    return Bars(
        "Offline text that the target keeps",
        "% of the tokens",
        [f"{seconds:g} s offline" for seconds in outages],
        series,
        "Bars: share of the tokens written offline that the target keeps, for the drafter and for the understudy",
    )


def memory_table(figures: Figures) -> Rows:
    devices = {"off": "without an understudy", "cold": "with one, not loaded", "warm": "with one, loaded"}
    return [
        ["process", "resident memory"],
        ["verifier, ready", f"{figures['resident_mib_ready']} MiB"],
        [f"verifier with a session of {figures['tokens']} tokens", f"{figures['resident_mib_with_session']} MiB"],
        *([f"device {devices[way]}", f"{peak} MiB"] for way, peak in figures["device_peak_mib"].items()),
    ]


def load_table(figures: Figures) -> Rows:
    rows = [["devices", "tokens/s", "VERIFY, median", "VERIFY, 95th percentile", "wrong verdicts"]]
    for phase in figures["phases"]:
        times = phase["verify_ms"] or {"p50": 0.0, "p95": 0.0}
        rows.append([
            str(phase["devices"]), f"{phase['tokens_per_second']:.0f}", f"{times['p50']:.0f} ms",
            f"{times['p95']:.0f} ms", str(phase["wrong_verdicts"]),
        ])  # fmt: skip
    return rows


def load_bars(figures: Figures) -> Bars:
    phases = figures["phases"]
    return Bars(
        "One verifier, many devices",
        "tokens/s of all devices",
        [str(phase["devices"]) for phase in phases],
        {"tokens/s": [phase["tokens_per_second"] for phase in phases]},
        "Bars: tokens per second of all devices together, by the number of devices",
    )


def demo_table(figures: Figures) -> Rows:
    cut = figures["cut"]
    return [
        ["figure", "value"],
        ["answers equal to plain decoding", _same(figures)],
        ["as the device chooses, over plain decoding", f"{figures['ratio_to_plain']:.2f}x"],
        ["tau of trees of 12 nodes", f"{figures['trees']['tau']:.2f}"],
        ["bytes a round, up and down", _bytes(figures)],
        ["first offline token after the verifier was killed", _stall(figures)],
        ["offline tokens that the target kept", f"{cut['kept']} of {cut['provisional']}"],
    ]


def _same(figures: Figures) -> str:
    same = [*figures["same_text_as_plain_decoding"], figures["cut"]["same_text_as_plain_decoding"]]
    return f"{sum(same)} of {len(same)}"


def _stall(figures: Figures) -> str:
    return f"{max(figures['cut']['stall_seconds'], default=0.0) * 1e3:.0f} ms"


def _bytes(figures: Figures) -> str:
    return f"{figures['trees']['bytes_up_per_round']} / {figures['trees']['bytes_down_per_round']}"


LINKS = "--profiles wifi 5g 4g --modes plain stream ahead controller --step-ms 60"
SECTIONS = (
    Section(
        "cuts", "Answers under cut links", "network", "--cuts 20 --understudy cold --max-new-tokens 64",
        "--cuts 500 --understudy cold --max-new-tokens 64", True, cuts_table,
    ),
    Section(
        "links", "Speed over links", "network", f"{LINKS} --count 6 --max-new-tokens 64",
        f"{LINKS} --count 12 --max-new-tokens 128 --repeats 3", True, links_table, links_bars,
    ),
    Section(
        "tau", "Tokens per verification", "acceptance", "--nodes 32 --count 12 --max-new-tokens 96",
        "--nodes 32 --count 20 --max-new-tokens 128", True, tau_table, tau_bars,
    ),
    Section(
        "offline", "Writing offline", "offline", "--outages 2 5 --count 3 --no-score", "--outages 2 5 15 --count 12",
        True, offline_table, offline_bars,
    ),
    Section("memory", "Memory", "memory", "", "", False, memory_table),
    Section(
        "load", "Load", "load", "--devices 1,4,16 --seconds 10", "--devices 1,4,16,64 --seconds 30", True, load_table,
        load_bars,
    ),
    Section("demo", "The demo, on one machine", "demo", "", "", False, demo_table),
)  # fmt: skip

#: the README's table: label, section, value
HEADLINES: tuple[tuple[str, str, Callable[[Figures], str]], ...] = (
    (
        "answers that differ from the target's own after links were cut at random moments",
        "cuts",
        lambda f: f"{f['answers_that_differ']} of {f['answers']} ({f['cuts']} cuts)",
    ),
    (
        "speed over plain decoding, target step 60 ms, at a round trip of 8, 30 and 60 ms",
        "links",
        lambda f: ", ".join(f"{_over_plain(f, profile, 'controller'):.2f}x" for profile in ROUND_TRIPS),
    ),
    ("tokens per verification (tau), greedy, trees of 32 nodes", "tau", lambda f: f"{f['overall']['tau']:.2f}"),
    (
        "offline text that the target keeps: drafter alone, with an understudy",
        "offline",
        lambda f: " and ".join(f"{_kept(f, writer):.0%}" for writer in ("drafter", "cold")),
    ),
    ("demo answers identical to plain decoding (the verifier was killed during one)", "demo", _same),
    ("first offline token after the verifier was killed", "demo", _stall),
    ("bytes per round, up and down", "demo", _bytes),
    (
        "memory of a device without and with a loaded understudy",
        "memory",
        lambda f: " and ".join(f"{f['device_peak_mib'][way]} MiB" for way in ("off", "warm")),
    ),
    (
        "speed over plain decoding with device, verifier and a small target on one machine",
        "demo",
        lambda f: f"{f['ratio_to_plain']:.2f}x",
    ),
)


def _kept(figures: Figures, writer: str) -> float:
    rows = [row for row in figures["rows"] if row["writer"] == writer]
    return float(sum(row["kept_share"] * row["written"] for row in rows) / max(1, sum(row["written"] for row in rows)))


# --- measuring ---


def measure(sections: Iterable[Section], full: bool, prompts: Sequence[Path]) -> None:
    """Run each section's benchmark. Raises CalledProcessError for one that fails."""
    chosen = list(sections)
    for number, section in enumerate(chosen, 1):
        path = RESULTS / f"{section.name}.json"
        arguments = [*(section.full if full else section.short).split(), "--json", str(path)]
        if section.prompts:
            named = [str(each.relative_to(ROOT) if each.is_relative_to(ROOT) else each) for each in prompts]
            arguments += ["--prompts", *named]
        print(f"[{number}/{len(chosen)}] {section.title}: python -m benchmarks.{section.module}", flush=True)
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", f"benchmarks.{section.module}", *arguments], cwd=ROOT, check=True)
        print(f"[{number}/{len(chosen)}] {section.title}: {time.monotonic() - begun:.0f} s", flush=True)


# --- writing ---


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Read the sections' results files. Raises ValueError on one without its origin."""
    results = {}
    for section in SECTIONS:
        path = folder / f"{section.name}.json"
        if not path.is_file():
            continue
        figures = json.loads(path.read_text(encoding="utf-8"))
        run = figures.pop("run", {})
        if missing := [field for field in RUN_FIELDS if not run.get(field)]:
            raise ValueError(f"{path.name} does not say its {', '.join(missing)}; write it with a benchmark's --json")
        results[section.name] = Result(section.name, run, figures)
    return results


def document(results: dict[str, Result]) -> str:
    """Return docs/measurements.md."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        if result := results.get(section.name):
            run = result.run
            parts += [f"## {section.title}", ""]
            if section.bars:
                parts += [_picture(section, section.bars(result.figures)), ""]
            parts += [*_table(section.table(result.figures)), ""]
            source = f"`{run['command']}`; {run['machine']}; {run['date']}; commit {run['commit']}"
            parts += [*textwrap.wrap(source, 120, break_long_words=False, break_on_hyphens=False), ""]
    return "\n".join(parts)


def headlines(results: dict[str, Result]) -> str:
    """Return the README's table, without its markers."""
    used = [(label, results[name], value) for label, name, value in HEADLINES if name in results]
    if not used:
        return "Nothing yet: run `python -m benchmarks.report`."
    rows = [["figure", "value"], *([label, f"**{value(result.figures)}**"] for label, result, value in used)]
    machines = "; ".join(sorted({result.run["machine"] for _, result, _ in used}))
    days = sorted({result.run["date"] for _, result, _ in used})
    when = " to ".join(dict.fromkeys([days[0], days[-1]]))
    measured = textwrap.fill(f"`python -m benchmarks.report` on {machines}, {when}.", 119, break_on_hyphens=False)
    return "\n".join([*_table(rows), "", measured])


def with_headlines(readme: str, results: dict[str, Result]) -> str:
    """Return README.md with its figures replaced. Raises ValueError if the markers are missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md has no place for figures; it needs a line {BEGIN!r} and a line {END!r}")
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{headlines(results)}\n{END}{rest.partition(END)[2]}"


def draw(bars: Bars, path: Path, scheme: str) -> None:
    """Draw a plot as SVG, with text as text."""
    import matplotlib
    from matplotlib.figure import Figure

    paper, ink, colours = SCHEMES[scheme]
    with matplotlib.rc_context({
        "svg.fonttype": "none", "svg.hashsalt": "outrider", "text.color": ink, "axes.labelcolor": ink,
        "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": ink, "font.family": "sans-serif",
    }):  # fmt: skip
        figure = Figure(figsize=(7.2, 3.4), layout="constrained", facecolor=paper)
        axes = figure.subplots()
        axes.set_facecolor(paper)
        width = 0.8 / len(bars.series)
        for place, (name, values) in enumerate(bars.series.items()):
            at = [group + (place - (len(bars.series) - 1) / 2) * width for group in range(len(bars.groups))]
            drawn = axes.bar(at, values, width * 0.92, label=name, color=colours[place % len(colours)])
            axes.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2, color=ink)
        axes.set_xticks(range(len(bars.groups)), bars.groups)
        axes.set_title(bars.title, loc="left", fontsize=11, color=ink)
        axes.set_ylabel(bars.unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
        if len(bars.series) > 1:
            figure.legend(loc="outside lower center", ncols=len(bars.series), frameon=False, fontsize=9, labelcolor=ink)
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw_all(results: dict[str, Result]) -> None:
    """Draw the plots of all sections beside docs/measurements.md, light and dark."""
    for section in SECTIONS:
        if section.bars and (result := results.get(section.name)):
            for scheme in SCHEMES:
                draw(section.bars(result.figures), _plot(section, scheme), scheme)


def _plot(section: Section, scheme: str) -> Path:
    return DOCUMENT.with_name(f"plot-{section.name}-{scheme}.svg")


def _picture(section: Section, bars: Bars) -> str:
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{_plot(section, "dark").name}">\n'
        f'  <img alt="{bars.alt}" src="{_plot(section, "light").name}" width="700">\n</picture>'
    )


def _table(rows: Rows) -> list[str]:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("--full", action="store_true", help="longer runs, for hours rather than minutes")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", default=[PROMPTS], metavar="FILE", help="JSONL of questions")
    parser.add_argument("--write", action="store_true", help="measure nothing; write documents and plots")
    parser.add_argument("--check", action="store_true", help="measure and write nothing; exit status 1 if stale")
    options = parser.parse_args(argv)
    try:
        if not options.write and not options.check:
            chosen = (section for section in SECTIONS if section.name in options.only)
            measure(chosen, options.full, [path.absolute() for path in options.prompts])
        results = read_results()
        wanted = {
            DOCUMENT: document(results),
            README: with_headlines(README.read_text(encoding="utf-8"), results),
        }
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(ROOT)} is stale; run: python -m benchmarks.report --write", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if not options.check:
        draw_all(results)
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
